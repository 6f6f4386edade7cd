"""``perseus-ds reset``: returns GPUs whose clocks stayed locked to their default clocks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from perseus_ds.cli.arguments import argument
from perseus_ds.device.gpu.nvml import NvmlGpu
from perseus_ds.device.gpu.nvml_lookup import gpu_count, index_of_uuid
from perseus_ds.device.lock_records import left_locks
from perseus_ds.errors import ConfigError, GpuError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Return GPUs to their default clocks.

    It is needed where a node's guardian was killed together with its job.
    """

    examples: ClassVar = ("perseus-ds reset", "perseus-ds reset gpus=[0,1]")

    gpus: list[int | str] | None = argument(
        "index of nvidia-smi, UUID, or the beginning of a UUID; by default all GPUs of this node", None
    )


def run(arguments: Arguments) -> int:
    """Reset the clocks; returns 1 if a GPU could not be reset."""
    chosen = arguments.gpus
    if chosen == []:
        raise ConfigError("gpus=[]: name at least one GPU, or leave gpus out for all of them.")
    if chosen is None:
        chosen = [*range(gpu_count())]
    results = [_reset(gpu) for gpu in chosen]
    return 0 if all(results) else 1


def _reset(index_or_uuid: int | str) -> bool:
    try:
        gpu = NvmlGpu(index_or_uuid) if isinstance(index_or_uuid, int) else NvmlGpu(index_of_uuid(index_or_uuid))
        try:
            gpu.reset_clock()
            for left in left_locks():
                if left.address == gpu.address:
                    left.forget()
            print(f"{gpu}: clock reset to the driver's default; {gpu.clock_mhz()} MHz now.")
        finally:
            gpu.close()
    except GpuError as error:
        print(f"GPU {index_or_uuid}: NOT reset. {error}", file=sys.stderr)
        return False
    return True
