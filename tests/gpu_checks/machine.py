"""The machine on which checks run: one GPU, read through NVML and used through torch."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from gpu_checks.recording import (
    CHANGES_FILE,
    LATENCY_S,
    Change,
    RecordingGpu,
    changes_in,
    guard_agents,
    guard_nvml,
)
from one_rank_server import OneRankServer

from perseus_ds.artifacts.evidence import Machine
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.lease import Lease
from perseus_ds.client.marks import CUDA, Marks, StreamMarks, StreamWrites
from perseus_ds.client.timers import CudaExecution
from perseus_ds.gpu.nvml import index_of_cuda_device
from perseus_ds.protocol.job_messages import Program, RankFailed, RankReport
from perseus_ds.timebase import REAL_TIME, Flag

_MATRIX = 4096
_WARM_UP_S = 1.0
_LOAD_PART_S, _LOAD_AHEAD = 0.05, 2
_jobs = itertools.count()
_kept: list[Any] = []
"""GPU-mapped memory, which must stay alive."""


def why_no_gpu() -> str | None:
    """Return the reason why there is no GPU for the checks, or None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the packages used by the checks."""
    names = ("perseus-ds", "torch", "deepspeed", "nvidia-ml-py")
    return {name: _version(name) for name in names} | {"CUDA": str(torch.version.cuda)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # found through PYTHONPATH
        return "not installed"


@dataclass(frozen=True)
class Recorded:
    """The GPU's clocks during a check.

    Attributes:
        clocks: As in a training process.
        changes: Returns the requested changes in order.
        follow: Makes the agent follow a program from the next iteration on.
        failures: Failures reported by the agent.
        reports: Reports of iterations to the server, by their numbers.
    """

    clocks: AgentClocks
    changes: Callable[[], list[Change]]
    follow: Callable[[Program], object]
    failures: list[RankFailed]
    reports: dict[int, RankReport]


@contextmanager
def clocks_by_an_agent(gpu: Any, marks: Callable[[Lease], Marks], latency_s: float | None = None) -> Iterator[Recorded]:
    """Have an agent, in its own process, record the changes of a GPU's clock.

    Args:
        gpu: The GPU.
        marks: Returns the writer of the marks.
        latency_s: Time by which clocks are requested early [s]; None for the latency measured by the agent.
    """
    with tempfile.NamedTemporaryFile() as file:
        known = {} if latency_s is None else {LATENCY_S: str(latency_s)}
        with patch.dict(os.environ, {CHANGES_FILE: file.name, **known}):
            lease = Lease(gpu.address, f"check {os.getpid()} {next(_jobs)}", files=getattr(gpu, "files", ()))
        clocks = AgentClocks(lease, lease.memory, marks(lease), gpu.name)
        _kept.append(lease.shared)
        with OneRankServer() as server:
            clocks.follow(server.connect)
            try:
                yield Recorded(
                    clocks,
                    lambda: changes_in(Path(file.name)),
                    partial(server.follow, clocks),
                    server.failures,
                    server.reports,
                )
            finally:
                clocks.close()


@contextmanager
def full_load(machine: Any, launch: Callable[[float], None] | None = None) -> Iterator[None]:
    """Keep a machine's GPU busy from another thread, without pauses."""
    stop = Flag(machine.timebase)

    def work() -> None:
        launched: deque[Any] = deque()
        while not stop.is_set():
            (launch or machine.compute)(_LOAD_PART_S)
            ended = machine.cuda.Event(enable_timing=True, blocking=True)
            ended.record()
            launched.append(ended)
            if len(launched) > _LOAD_AHEAD:
                launched.popleft().synchronize()

    thread = machine.timebase.thread(work, "load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        machine.synchronize()


class OneGpu:
    """The first CUDA GPU.

    Attributes:
        gpu: Read through NVML, never changed.
        block: The part of a ``perseus`` block that chooses the GPU.
        size: Width, rows of a micro-batch, layers and micro-batches of the models.
        stage_size: The same for a model whose activations are sent through the host's memory.
        setups: How models are trained (``gpu_checks.training.SETUPS``).
        most_iterations: Number of iterations after which a mode must have reached its goal.
    """

    simulated = False
    timebase = REAL_TIME
    cuda = torch.cuda
    backend = "nccl"
    block: ClassVar[dict[str, Any]] = {"device": "nvml"}
    size = (1024, 16384, 4, 8)
    stage_size = (1024, 2048, 8, 8)
    setups = ("bf16", "fp16", "ZeRO-1", "recomputation", "contiguous recomputation", "torch.compile")
    most_iterations = 400

    def __init__(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes matrix products bitwise reproducible
        guard_nvml()
        guard_agents()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.gpu = RecordingGpu(index_of_cuda_device(self.device.index, self._uuid))
        self._side = torch.cuda.Stream()
        self._heavy = _Products(self, torch.randn(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16))
        self._light = _Products(self, torch.zeros(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16))
        self._cycles_per_s: float | None = None

    @property
    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def described(self) -> Machine:
        """Return the machine's description for the evidence."""
        return Machine(simulated=False, gpu=self.gpu.name, driver=self.gpu.driver, versions=versions())

    def seconds(self, wanted_s: float) -> float:
        """Return the duration of a measurement [s]."""
        return wanted_s

    def turns(self, wanted: int) -> int:
        """Return the number of measurements."""
        return wanted

    def execution(self) -> CudaExecution:
        """Return the timer of operations on the GPU."""
        return CudaExecution(self.device)

    def clocks(self, latency_s: float | None = None) -> AbstractContextManager[Recorded]:
        """Return the GPU's clocks, followed by an agent, as in :func:`clocks_by_an_agent`."""
        return clocks_by_an_agent(
            self.gpu, lambda lease: StreamMarks(StreamWrites(lease.shared), self.device.index), latency_s
        )

    def compute(self, seconds: float) -> None:
        """Launch matrix products of about this duration, without waiting."""
        self._heavy.launch(seconds)

    def compute_lightly(self, seconds: float) -> None:
        """Launch products of zeros of about this duration, which draw less power, without waiting."""
        self._light.launch(seconds)

    def sleep(self, seconds: float) -> None:
        """Launch a kernel that does nothing for this duration, without waiting."""
        torch.cuda._sleep(int(seconds * self.cycles_per_s()))

    def start_beside(self, seconds: float) -> torch.cuda.Event:
        """Launch such a kernel on another stream, and return an event at its end."""
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            self.sleep(seconds)
            ended.record(self._side)
        return ended

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event, without waiting on the host."""
        torch.cuda.current_stream().wait_event(event)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def launch_for(self, seconds: float) -> None:
        """Keep this thread launching small kernels on another stream."""
        end_s = self.timebase.now_s() + seconds
        small = torch.zeros(64, device=self.device)
        with torch.cuda.stream(self._side):
            while self.timebase.now_s() < end_s:
                for _ in range(20):
                    small.add_(1)
                self._side.synchronize()

    def fill_queue_for(self, seconds: float) -> None:
        """Keep this thread launching more than the GPU can process, so that launches wait."""
        small = torch.zeros(64, device=self.device)
        self._fill_queue(seconds, lambda: small.add_(1))

    def fill_queue_with_triton_for(self, seconds: float) -> None:
        """The same with a Triton kernel, which may hold the interpreter's lock while its launch waits."""
        small = torch.zeros(64, device=self.device)
        kernel = torch.compile(lambda values: values + 1)
        kernel(small)
        self._fill_queue(seconds, lambda: kernel(small))

    def _fill_queue(self, seconds: float, launch: Callable[[], object]) -> None:
        end_s = self.timebase.now_s() + seconds
        with torch.cuda.stream(self._side):
            while self.timebase.now_s() < end_s:
                self.sleep(0.0005)
                launch()
        self._side.synchronize()

    stream_write_names = CUDA

    def stream_handle(self, stream: torch.cuda.Stream | None = None) -> int:
        """Return the driver's handle of a stream, by default the device's current one."""
        if stream is not None:
            return int(stream.cuda_stream)
        # torch.cuda.current_stream takes at least 6 µs, this call 0.3 µs.
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def new_stream(self) -> torch.cuda.Stream:
        """Return another stream."""
        return torch.cuda.Stream()

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Launch on this stream within the context."""
        return torch.cuda.stream(stream)

    def timed_event(self, *, blocking: bool = False) -> torch.cuda.Event:
        """Return an event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        event.record()
        return event

    def external_event(self) -> torch.cuda.Event:
        """Return an event that a graph records in each replay."""
        return torch.cuda.Event(enable_timing=True, external=True)

    def launch_small(self) -> None:
        """Launch a kernel that takes a few microseconds."""
        self._small.add_(1)

    def copy_to_host(self, value: int) -> Callable[[], int]:
        """Launch a kernel and a copy of its result to the host, and return a function that reads it."""
        self._pinned.copy_(self._small.fill_(value % 2**20), non_blocking=True)
        return lambda: int(self._pinned[0])

    def store(self, value: int) -> None:
        """Launch a kernel that writes a value into the GPU's memory."""
        self._small.fill_(value)

    def stored(self) -> int:
        """Wait for the GPU and return the stored value."""
        return int(self._small[0])

    def captured(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of a function's launches."""
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph

    def captured_alone(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of a function's launches, captured while other streams may be busy."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.new_stream()):
            graph.capture_begin(capture_error_mode="global")
            body()
            graph.capture_end()
        return graph

    @cached_property
    def _small(self) -> torch.Tensor:
        return torch.zeros(64, device=self.device)

    @cached_property
    def _pinned(self) -> torch.Tensor:
        return torch.zeros(64, pin_memory=True)

    def free_bytes(self) -> int:
        """Return the free memory of the GPU, over all processes."""
        return torch.cuda.mem_get_info(self.device)[0]

    def count_for(self, seconds: float) -> None:
        """Keep this thread in pure Python, which never releases the interpreter's lock by itself."""
        end_s, count = self.timebase.now_s() + seconds, 0
        while self.timebase.now_s() < end_s:
            for _ in range(1000):
                count += 1

    def cycles_per_s(self) -> float:
        """Return the cycles per second of a waiting kernel, by the host's clock."""
        if self._cycles_per_s is None:
            self._cycles_per_s = 1e9
            self.repeat_for(_WARM_UP_S, lambda: torch.cuda._sleep(10_000_000))
            torch.cuda.synchronize()
            began_s = self.timebase.now_s()
            torch.cuda._sleep(1_000_000_000)
            torch.cuda.synchronize()
            self._cycles_per_s = 1e9 / (self.timebase.now_s() - began_s)
        return self._cycles_per_s

    def repeat_for(self, seconds: float, launch: Callable[[], object]) -> None:
        """Launch something repeatedly for this duration."""
        end_s = self.timebase.now_s() + seconds
        while self.timebase.now_s() < end_s:
            for _ in range(20):
                launch()
            torch.cuda.synchronize()


class _Products:
    """Products of a matrix with itself."""

    def __init__(self, machine: OneGpu, matrix: torch.Tensor) -> None:
        self._machine = machine
        self._matrix = matrix
        self._product = torch.empty_like(matrix)

    def launch(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / self._one_s))):
            self._multiply()

    @cached_property
    def _one_s(self) -> float:
        self._machine.repeat_for(_WARM_UP_S, self._multiply)
        torch.cuda.synchronize()
        now_s = self._machine.timebase.now_s
        began_s = now_s()
        for _ in range(200):
            self._multiply()
        torch.cuda.synchronize()
        return (now_s() - began_s) / 200

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
