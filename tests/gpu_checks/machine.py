"""The machine on which checks run: one GPU, read through NVML and used through torch."""

import importlib.metadata
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from gpu_checks.recording import CHANGES_FILE, LATENCY_S, RecordingNvmlGpu, changes_in, guard_agents, guard_nvml
from one_rank_server import OneRankServer

from perseus_ds.artifacts.evidence import Machine
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.lease import Lease
from perseus_ds.client.marks import CUDA, StreamMarks, StreamWrites
from perseus_ds.client.timers import CudaExecution
from perseus_ds.gpu.nvml import index_of_cuda_device
from perseus_ds.timebase import REAL_TIME, Flag

_MATRIX = 4096
_WARM_UP_S = 1.0
_LOAD_PART_S, _LOAD_AHEAD = 0.05, 2
_jobs = itertools.count()
_kept = []
"""GPU-mapped memory, which must stay alive."""


def why_no_gpu():
    """Return the reason why there is no GPU for the checks, or None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU"


def versions():
    """Return the versions of the packages used by the checks."""

    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # found through PYTHONPATH
            return "not installed"

    names = ("perseus-ds", "torch", "deepspeed", "nvidia-ml-py")
    return {name: version(name) for name in names} | {"CUDA": str(torch.version.cuda)}


class Recorded(NamedTuple):
    """The GPU's clocks during a check, as in a training process, and what the agent does with them.

    ``changes`` returns the requested changes in order, ``follow`` makes the agent follow a program from the next
    iteration on, ``failures`` are those that it reported, and ``reports`` those of iterations by their numbers.
    """

    clocks: AgentClocks
    changes: Callable
    follow: Callable
    failures: list
    reports: dict


@contextmanager
def clocks_by_an_agent(gpu, marks, latency_s=None):
    """Have an agent, in its own process, record the changes of a GPU's clock.

    ``marks`` returns the writer of the marks, given the lease. Clocks are requested early by the latency [s], if it is
    None by the one that the agent measures.
    """
    with tempfile.NamedTemporaryFile() as file:
        known = {} if latency_s is None else {LATENCY_S: str(latency_s)}
        with patch.dict(os.environ, {CHANGES_FILE: file.name, **known}):
            lease = Lease(gpu.address, f"check {os.getpid()} {next(_jobs)}", files=getattr(gpu, "files", ()))
        clocks = AgentClocks(lease, lease.memory, marks(lease))
        _kept.append(lease.shared)
        with OneRankServer() as server:
            clocks.follow(server.connect)
            changes, follow = partial(changes_in, Path(file.name)), partial(server.follow, clocks)
            try:
                yield Recorded(clocks, changes, follow, server.failures, server.reports)
            finally:
                clocks.close()


@contextmanager
def full_load(machine, launch=None):
    """Keep a machine's GPU busy from another thread, without pauses."""
    stop = Flag(machine.timebase)

    def work():
        launched = deque()
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
    """The first CUDA GPU, which is never changed. Launches do not wait, unless a method says so.

    Attributes:
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
    stream_write_names = CUDA

    def __init__(self):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes matrix products bitwise reproducible
        guard_nvml()
        guard_agents()
        self.device = torch.device("cuda", torch.cuda.current_device())
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.gpu = RecordingNvmlGpu(index_of_cuda_device(self.device.index, uuid))
        self._side = torch.cuda.Stream()

    def described(self):
        return Machine(simulated=False, gpu=self.gpu.name, driver=self.gpu.driver, versions=versions())

    def seconds(self, wanted_s):
        """Return the duration of a measurement [s]."""
        return wanted_s

    def turns(self, wanted):
        """Return the number of measurements."""
        return wanted

    def execution(self):
        """Return the timer of operations on the GPU."""
        return CudaExecution(self.device)

    def clocks(self, latency_s=None):
        """Return the GPU's clocks, followed by an agent, as in :func:`clocks_by_an_agent`."""
        return clocks_by_an_agent(
            self.gpu, lambda lease: StreamMarks(StreamWrites(lease.shared), self.device.index), latency_s
        )

    def compute(self, seconds):
        """Launch matrix products of about this duration."""
        self._heavy(seconds)

    def compute_lightly(self, seconds):
        """Launch products of zeros of about this duration, which draw less power."""
        self._light(seconds)

    @cached_property
    def _heavy(self):
        return self._products(torch.randn(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16))

    @cached_property
    def _light(self):
        return self._products(torch.zeros(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16))

    def _products(self, matrix):
        """Return a function that launches products of a matrix with itself for about a duration."""
        product, turns = torch.empty_like(matrix), 200

        def multiply():
            torch.mm(matrix, matrix, out=product)

        one_s = self._time_s(multiply, lambda: [multiply() for _ in range(turns)]) / turns
        return lambda seconds: [multiply() for _ in range(max(1, round(seconds / one_s)))]

    def _time_s(self, warm_up, launch):
        """Return the time of some launches, by the host's clock, after a second of others."""
        end_s = self.timebase.now_s() + _WARM_UP_S
        while self.timebase.now_s() < end_s:
            for _ in range(20):
                warm_up()
            torch.cuda.synchronize()
        began_s = self.timebase.now_s()
        launch()
        torch.cuda.synchronize()
        return self.timebase.now_s() - began_s

    @cached_property
    def _cycles_per_s(self):
        return 1e9 / self._time_s(lambda: torch.cuda._sleep(10_000_000), lambda: torch.cuda._sleep(1_000_000_000))

    def sleep(self, seconds):
        """Launch a kernel that does nothing for this duration."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def start_beside(self, seconds):
        """Launch such a kernel on another stream, and return an event at its end."""
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            self.sleep(seconds)
            ended.record(self._side)
        return ended

    def wait_for(self, event):
        """Let the current stream wait for an event."""
        torch.cuda.current_stream().wait_event(event)

    def synchronize(self):
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def launch_for(self, seconds):
        """Keep this thread launching small kernels on another stream."""
        end_s, small = self.timebase.now_s() + seconds, torch.zeros(64, device=self.device)
        with torch.cuda.stream(self._side):
            while self.timebase.now_s() < end_s:
                for _ in range(20):
                    small.add_(1)
                self._side.synchronize()

    def count_for(self, seconds):
        """Keep this thread in pure Python, which never releases the interpreter's lock by itself."""
        end_s, count = self.timebase.now_s() + seconds, 0
        while self.timebase.now_s() < end_s:
            for _ in range(1000):
                count += 1

    def fill_queue_for(self, seconds):
        """Keep this thread launching more than the GPU can process, so that launches wait."""
        small = torch.zeros(64, device=self.device)
        self._fill_queue(seconds, lambda: small.add_(1))

    def fill_queue_with_triton_for(self, seconds):
        """The same with a Triton kernel, which may hold the interpreter's lock while its launch waits."""
        small = torch.zeros(64, device=self.device)
        kernel = torch.compile(lambda values: values + 1)
        kernel(small)
        self._fill_queue(seconds, lambda: kernel(small))

    def _fill_queue(self, seconds, launch):
        end_s = self.timebase.now_s() + seconds
        with torch.cuda.stream(self._side):
            while self.timebase.now_s() < end_s:
                self.sleep(0.0005)
                launch()
        self._side.synchronize()

    def stream_handle(self, stream=None):
        """Return the driver's handle of a stream, by default the device's current one."""
        if stream is not None:
            return int(stream.cuda_stream)
        # torch.cuda.current_stream takes at least 6 µs, this call 0.3 µs.
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def new_stream(self):
        return torch.cuda.Stream()

    def using(self, stream):
        """Launch on this stream within the context."""
        return torch.cuda.stream(stream)

    def timed_event(self):
        """Return an event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def launch_small(self):
        """Launch a kernel that takes a few microseconds."""
        self._small.add_(1)

    def copy_to_host(self, value):
        """Launch a kernel and a copy of its result to the host, and return a function that reads it."""
        self._pinned.copy_(self._small.fill_(value % 2**20), non_blocking=True)
        return lambda: int(self._pinned[0])

    def store(self, value):
        """Launch a kernel that writes a value into the GPU's memory."""
        self._small.fill_(value)

    def stored(self):
        """Wait for the GPU and return the stored value."""
        return int(self._small[0])

    def captured(self, body):
        """Return a graph of a function's launches."""
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph

    def captured_alone(self, body):
        """Return a graph of a function's launches, captured while other streams may be busy."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.new_stream()):
            graph.capture_begin(capture_error_mode="global")
            body()
            graph.capture_end()
        return graph

    @cached_property
    def _small(self):
        return torch.zeros(64, device=self.device)

    @cached_property
    def _pinned(self):
        return torch.zeros(64, pin_memory=True)

    def free_bytes(self):
        """Return the free memory of the GPU, over all processes."""
        return torch.cuda.mem_get_info(self.device)[0]
