"""The agent of the GPU checks: like that of a job, but it never changes GPUs."""

import os
from collections.abc import Sequence
from functools import partial

from gpu_checks.recording import DEVICE, LATENCY_S, RecordingGpu, guard_nvml, latency_of_all_clocks

from perseus_ds.agent import process
from perseus_ds.agent.gpu_records import UnrecordedGpu
from perseus_ds.gpu import open_gpu
from perseus_ds.gpu.base import Gpu
from perseus_ds.gpu.nvml import index_of_cuda_device, index_of_uuid
from perseus_ds.protocol.messages import FindGpu


def open_to_read(address: str, logs: Sequence[memoryview] = ()) -> Gpu:
    """Open a GPU of a check."""
    device, _, uuid = address.partition(":")
    return RecordingGpu(index_of_uuid(uuid)) if device == DEVICE else open_gpu(address, logs)  # type: ignore[return-value]


def find_to_read(place: FindGpu) -> Gpu:
    """Open a GPU of a job that trains in a check."""
    return RecordingGpu(index_of_cuda_device(place.ordinal, place.uuid, place.variables))  # type: ignore[return-value]


def main() -> None:
    """Run the agent."""
    guard_nvml()
    process.Agent = partial(process.Agent, open_gpu=open_to_read, find_gpu=find_to_read)  # type: ignore[misc, assignment]
    # No clock is locked, and this agent must not reset clocks left locked by other jobs.
    process.GpuRecord = lambda gpu, agent: UnrecordedGpu(gpu)  # type: ignore[misc, assignment]
    process.left_locked = lambda agent: iter(())  # type: ignore[assignment]
    latency_s = os.environ.get(LATENCY_S)
    with latency_of_all_clocks(None if latency_s is None else float(latency_s)):
        process.main()
