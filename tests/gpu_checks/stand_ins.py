"""Stand-ins for the machine with a GPU, on which the code of the checks runs without one.

All their measurements are labelled simulated and do not describe a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from gpu_checks.machine import Recorded, clocks_by_an_agent, versions
from gpu_checks.recording import RecordsChanges, latency_of_all_clocks
from one_rank_server import follow_of
from stub_cuda.controller import Event, Graph, StubCuda
from virtual.agent import clocks_of
from virtual.gpu import VirtualCuda, wait_for_event
from virtual.time import VirtualTime

from perseus_ds.artifacts.evidence import Machine
from perseus_ds.client.devices import gpu_of
from perseus_ds.client.marks import CUDA, StreamMarks, StreamWrites
from perseus_ds.client.timers import CudaExecution
from perseus_ds.config import parse_block
from perseus_ds.gpu.device_models import MEMORY_BOUND
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.protocol.job_messages import RankFailed, RankReport, ToServer
from perseus_ds.timebase import REAL_TIME


class RecordingSimulatedGpu(RecordsChanges, SimulatedGpu):
    """A simulated GPU that records clock changes instead of making them."""


class VirtualMachine:
    """A simulated GPU in virtual time, to which work is launched as with CUDA.

    Args:
        gpu: The GPU to read; by default the simulated one.
        now: Its virtual time.
    """

    simulated = True

    def __init__(self, gpu: Any = None, now: VirtualTime | None = None) -> None:
        self.timebase = now or VirtualTime()
        self.simulated_gpu = RecordingSimulatedGpu.named("a100-sxm", timebase=self.timebase)
        self.gpu = gpu or self.simulated_gpu
        self.cuda = VirtualCuda(self.timebase, self.simulated_gpu)

    def described(self) -> Machine:
        return Machine(simulated=True, gpu=self.gpu.name, driver=self.gpu.driver, versions=versions())

    def seconds(self, wanted_s: float) -> float:
        return wanted_s

    def execution(self) -> CudaExecution:
        return CudaExecution(torch.device("cuda", 0), self.cuda, wait_for_event)

    @contextmanager
    def clocks(self, latency_s: float | None = None) -> Iterator[Recorded]:
        with latency_of_all_clocks(latency_s):
            failures: list[RankFailed] = []
            reports: dict[int, RankReport] = {}

            def tell(message: ToServer) -> None:
                if isinstance(message, RankFailed):
                    failures.append(message)
                elif isinstance(message, RankReport):
                    reports[message.report.iteration] = message

            made = clocks_of(self.gpu, self.timebase, self.cuda, tell)
            receive = made._link.agent.receive_from_server
            try:
                yield Recorded(
                    made,
                    lambda: list(self.gpu.changes),
                    lambda program: receive(follow_of(program, 1)),
                    failures,
                    reports,
                )
            finally:
                made.close()

    def compute(self, seconds: float) -> None:
        self.cuda.launch(seconds)

    def compute_lightly(self, seconds: float) -> None:
        self.cuda.launch(seconds, MEMORY_BOUND)

    def sleep(self, seconds: float) -> None:
        self.cuda.idle(seconds)

    def start_beside(self, seconds: float) -> float:
        """Make another stream busy for this long, and return the time when its work ends."""
        return self.timebase.now_s() + seconds

    def wait_for(self, ended_s: float) -> None:
        self.cuda.enqueue(lambda: self.timebase.sleep(max(0.0, ended_s - self.timebase.now_s())))

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def launch_for(self, seconds: float) -> None:
        self.timebase.sleep(seconds)

    count_for = fill_queue_for = fill_queue_with_triton_for = launch_for

    def free_bytes(self) -> int:
        return 0


class StubCudaMachine:
    """The stub CUDA driver. Its streams are threads of this process.

    Args:
        cuda: The stub.
    """

    simulated = True
    timebase = REAL_TIME
    stream_write_names = CUDA

    def __init__(self, cuda: StubCuda) -> None:
        self._cuda = cuda
        self._copied = ctypes.c_int64(0)
        self.gpu = gpu_of(parse_block({"device": "simulated"}), torch.device("cpu"), rank=0, local_rank=0)

    def described(self) -> Machine:
        return Machine(simulated=True, gpu="stub of CUDA's driver", driver=None, versions=versions())

    def turns(self, wanted: int) -> int:
        return min(wanted, 5)

    def stream_handle(self, stream: int | None = None) -> int:
        return stream or self._cuda.stream

    def new_stream(self) -> int:
        return self._cuda.new_stream()

    def using(self, stream: int) -> AbstractContextManager[object]:
        return self._cuda.using(stream)

    def sleep(self, seconds: float) -> None:
        self._cuda.delay(seconds)

    compute = sleep

    def launch_small(self) -> None:
        self._cuda.delay(0.0)

    def timed_event(self, *, blocking: bool = False) -> Event:
        return self._cuda.event()

    def external_event(self) -> Event:
        return self._cuda.external_event()

    def copy_to_host(self, value: int) -> Callable[[], int]:
        self.store(value)
        return lambda: self._copied.value

    def store(self, value: int) -> None:
        self._cuda.store(self._copied, value)

    def stored(self) -> int:
        return self._copied.value

    def captured(self, body: Callable[[], None]) -> Graph:
        return self._cuda.captured(body)

    captured_alone = captured

    def execution(self) -> CudaExecution:
        cuda = SimpleNamespace(
            Event=lambda **_: self._cuda.external_event(),
            current_device=lambda: 0,
            current_stream=lambda device: self._cuda.stream,
        )
        return CudaExecution(torch.device("cuda", 0), cuda)

    def clocks(self) -> AbstractContextManager[Recorded]:
        cuda = SimpleNamespace(current_device=lambda: 0)
        return clocks_by_an_agent(
            self.gpu, lambda lease: StreamMarks(StreamWrites(lease.shared), 0, cuda, lambda device: self._cuda.stream)
        )

    def synchronize(self) -> None:
        self._cuda.synchronize()


class HostMachine:
    """The CPU instead of the GPU: the real engine on gloo, and a simulated GPU for Perseus."""

    simulated = True
    timebase = REAL_TIME
    backend = "gloo"
    block: ClassVar[dict[str, Any]] = {
        "device": "simulated",
        "simulated": {"longest_instruction_s": 0.01, "counter_period_s": 0.02, "lock_latency_s": 0.002},
    }
    size = stage_size = (8, 4, 2, 4)
    setups = ("bf16", "contiguous recomputation")
    most_iterations = 1_000_000  # a busy machine plans after any number of such short iterations

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._is_busy = False
        self.device = torch.device("cpu")
        self.gpu = RecordingSimulatedGpu.named("a100-sxm")

    def described(self) -> Machine:
        return Machine(simulated=True, gpu=self.gpu.name, driver=None, versions=versions())

    def seconds(self, wanted_s: float) -> float:
        return min(wanted_s, 0.1)

    def turns(self, wanted: int) -> int:
        return min(wanted, 5)

    def sleep(self, seconds: float) -> None:
        self._is_busy = seconds > 1

    def synchronize(self) -> None:
        """Never return after a long sleep, not even on a signal, like a call of the driver."""
        if self._is_busy:
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)  # zeros: PTHREAD_MUTEX_INITIALIZER
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
