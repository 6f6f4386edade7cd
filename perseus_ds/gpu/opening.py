"""Opens a GPU by its address, in a process that may see other GPUs than the one that wrote the address down."""

from __future__ import annotations

from collections.abc import Sequence

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu


def open_gpu(address: str, logs: Sequence[memoryview] = ()) -> Gpu:
    """Return the GPU of an :attr:`~perseus_ds.gpu.base.Gpu.address`.

    Args:
        address: The address.
        logs: For a simulated GPU, the memory of its work log and of its clock log.

    Raises:
        GpuError: It cannot be opened.
    """
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.gpu.nvml import NvmlGpu, index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.gpu.zeus import open_address

        return open_address(identity)
    if device == "simulated":
        from perseus_ds.gpu.simulated import open_address as open_simulated

        return open_simulated(identity, logs)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:…, zeus:… or simulated:….")
