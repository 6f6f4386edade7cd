"""One GPU as Perseus needs it, opened by its address, or by its number in another process.

That process may see other GPUs than this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_ds.errors import GpuError

if TYPE_CHECKING:
    from perseus_ds.gpu.base import Gpu
    from perseus_ds.protocol.messages import FindGpu


def open_gpu(address: str) -> Gpu:
    """Return the real GPU of an :attr:`~perseus_ds.gpu.base.Gpu.address`. Raises a ``GpuError`` on failure."""
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.gpu.nvml import NvmlGpu, index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.gpu.zeus import open_address

        return open_address(identity)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:…, zeus:… or simulated:….")


def find_gpu(place: FindGpu) -> Gpu:
    """Open the GPU that CUDA or HIP gives a number. Raises a ``GpuError`` if it is not certain which."""
    if place.device == "zeus":
        from perseus_ds.gpu.zeus import open_zeus_gpu

        return open_zeus_gpu(place.ordinal, place.uuid, place.pci_address, place.variables)
    from perseus_ds.gpu.nvml import NvmlGpu, index_of_cuda_device

    return NvmlGpu(index_of_cuda_device(place.ordinal, place.uuid, place.variables))
