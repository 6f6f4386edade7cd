"""``perseus-ds reset``: returns GPUs whose clocks stayed locked to their default clocks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from perseus_ds.cli.arguments import argument
from perseus_ds.clocks.lock_records import left_locks
from perseus_ds.errors import ConfigError, GpuError
from perseus_ds.gpu.nvml import NvmlGpu, gpu_count, gpu_uuids, match_uuid


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Return GPUs to their default clocks.

    It is needed where a node's guardian was killed together with its job.
    """

    examples = ("perseus-ds reset", "perseus-ds reset gpus=[0,1]")

    gpus: list[str] | None = argument(
        "index of nvidia-smi, UUID, or the beginning of a UUID; by default all GPUs of this node", None
    )


def run(arguments: Arguments) -> int:
    """Reset the clocks; returns 2 if a GPU could not be reset."""
    results = [_reset(index) for index in _indices(arguments.gpus)]
    return 0 if all(results) else 2


def _indices(chosen: list[str] | None) -> list[int]:
    """Return the indices of the chosen GPUs.

    Raises:
        ConfigError: One of them is not on this node.
        GpuError: NVML or the driver is missing.
    """
    if chosen == []:
        raise ConfigError("gpus=[]: name at least one GPU, or leave gpus out for all of them.")
    count = gpu_count()
    if chosen is None:
        return [*range(count)]
    try:
        indices = [int(gpu) if gpu.isdecimal() else match_uuid(gpu, gpu_uuids()) for gpu in chosen]
    except GpuError as error:
        raise ConfigError(f"gpus: {error}") from None
    for index in indices:
        if not 0 <= index < count:
            raise ConfigError(f"gpus: there is no GPU {index} on this node, which has {count}; see `nvidia-smi -L`.")
    return indices


def _reset(index: int) -> bool:
    try:
        gpu = NvmlGpu(index)
        try:
            gpu.reset_clock()
            for left in left_locks():
                if left.address == gpu.address:
                    left.forget()
            print(f"{gpu}: clock reset to the driver's default; {gpu.clock_mhz()} MHz now.")
        finally:
            gpu.close()
    except GpuError as error:
        print(f"GPU {index}: NOT reset. {error}", file=sys.stderr)
        return False
    return True
