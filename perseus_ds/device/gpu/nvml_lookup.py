"""Finds GPUs among those that NVML sees: how many there are, and NVML's index of one."""

from __future__ import annotations

import os
from typing import Any

from perseus_ds.device.gpu.nvml_calls import call, nvml_session
from perseus_ds.device.gpu.visible import match_uuid, pick
from perseus_ds.errors import GpuError


def gpu_count() -> int:
    """Return how many GPUs this node has, visible to CUDA or not.

    Raises:
        GpuError: NVML or the driver is missing.
    """
    with nvml_session():
        return int(call("Counting the GPUs", "nvmlDeviceGetCount"))


def index_of_uuid(uuid: str) -> int:
    """Return the index of a GPU by its full or abbreviated UUID, whatever ``CUDA_VISIBLE_DEVICES`` says.

    Raises:
        GpuError: No GPU, or more than one, has it.
    """
    with nvml_session():
        return match_uuid(uuid, _uuids())


def index_of_cuda_device(cuda_index: int, uuid: str | None = None) -> int:
    """Return the index of the GPU that CUDA calls ``cuda_index`` in this process.

    Args:
        cuda_index: CUDA ordinal, after ``CUDA_VISIBLE_DEVICES``.
        uuid: The GPU's UUID if CUDA reports it (``torch.cuda.get_device_properties(i).uuid``): the sure way.
            Without it, NVML's order, by PCI bus, is taken for CUDA's, which is right where all GPUs are alike.

    Raises:
        GpuError: There is no such GPU, it is a MIG device, or the order of unlike GPUs is not certain.
    """
    if uuid is not None:
        return index_of_uuid(uuid)
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    with nvml_session():
        index = pick(cuda_index, value, _uuids())
        _check_order(value)
    return index


def _handles() -> list[Any]:
    count = call("Counting the GPUs", "nvmlDeviceGetCount")
    return [call(f"Opening GPU {index}", "nvmlDeviceGetHandleByIndex", index) for index in range(count)]


def _uuids() -> list[str]:
    return [
        str(call(f"Reading the UUID of GPU {index}", "nvmlDeviceGetUUID", handle))
        for index, handle in enumerate(_handles())
    ]


def _check_order(value: str | None) -> None:
    """Refuse to guess where CUDA's numbering may differ from NVML's, which is by PCI bus."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or (value or "").strip().startswith("GPU-"):
        return
    names = {str(call("Reading the GPUs' names", "nvmlDeviceGetName", handle)) for handle in _handles()}
    if len(names) > 1:
        raise GpuError(
            f"This node has different GPUs ({', '.join(sorted(names))}), which CUDA numbers by speed and NVML by PCI "
            f"bus. Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the job, so that clocks reach the right GPU."
        )
