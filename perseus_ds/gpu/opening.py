"""Opens a GPU by its address, in a process that may see other GPUs than the one that wrote the address down."""

from __future__ import annotations

from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu


def open_gpu(address: str) -> Gpu:
    """Return the GPU of an :attr:`~perseus_ds.gpu.base.Gpu.address`.

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
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:… or zeus:….")
