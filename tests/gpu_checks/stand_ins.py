"""Stand-ins for the machine with a GPU, on which the code of the checks runs without one.

All their measurements are labelled simulated and do not describe a GPU.
"""

import ctypes
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from gpu_checks.machine import Recorded, clocks_by_an_agent, versions
from gpu_checks.recording import RecordsChanges, latency_of_all_clocks
from one_rank_server import follow_of
from stub_cuda.controller import TorchCuda
from virtual.agent import clocks_of
from virtual.cuda import VirtualCuda, wait_for_event
from virtual.time import VirtualTime

from perseus_ds.artifacts.evidence import Machine
from perseus_ds.client.devices import gpu_of
from perseus_ds.client.marks import CUDA, StreamMarks, StreamWrites
from perseus_ds.client.timers import CudaExecution
from perseus_ds.config import parse_block
from perseus_ds.protocol.job_messages import RankFailed, RankReport
from perseus_ds.simulation.device_models import MEMORY_BOUND
from perseus_ds.simulation.gpu import SimulatedGpu
from perseus_ds.timebase import REAL_TIME


class RecordingSimulatedGpu(RecordsChanges, SimulatedGpu):
    """A simulated GPU that records clock changes instead of making them."""


class _StandIn:
    simulated = True

    def described(self):
        return Machine(simulated=True, gpu=self.gpu.name, driver=None, versions=versions())


class VirtualMachine(_StandIn):
    """A simulated GPU in virtual time, to which work is launched as with CUDA. Another one may be read instead."""

    def __init__(self, gpu=None, now=None):
        self.timebase = now or VirtualTime()
        self.simulated_gpu = RecordingSimulatedGpu.named("a100-sxm", timebase=self.timebase)
        self.gpu = gpu or self.simulated_gpu
        self.cuda = VirtualCuda(self.timebase, self.simulated_gpu)
        self.sleep, self.compute, self.synchronize = self.cuda.idle, self.cuda.launch, self.cuda.synchronize
        self.launch_for = self.count_for = self.timebase.sleep
        self.fill_queue_for = self.fill_queue_with_triton_for = self.timebase.sleep

    def seconds(self, wanted_s):
        return wanted_s

    def execution(self):
        return CudaExecution(torch.device("cuda", 0), self.cuda, wait_for_event)

    @contextmanager
    def clocks(self, latency_s=None):
        failures, reports = [], {}

        def receive(message):
            if isinstance(message, RankFailed):
                failures.append(message)
            elif isinstance(message, RankReport):
                reports[message.report.iteration] = message

        with latency_of_all_clocks(latency_s):
            made = clocks_of(self.gpu, self.timebase, self.cuda, receive)
            tell_agent = made._link.agent.receive_from_server
            try:
                yield Recorded(
                    made,
                    lambda: list(self.gpu.changes),
                    lambda program: tell_agent(follow_of(program, 1)),
                    failures,
                    reports,
                )
            finally:
                made.close()

    def compute_lightly(self, seconds):
        self.cuda.launch(seconds, MEMORY_BOUND)

    def start_beside(self, seconds):
        """Make another stream busy for this long, and return the time when its work ends."""
        return self.timebase.now_s() + seconds

    def wait_for(self, ended_s):
        self.cuda.enqueue(lambda: self.timebase.sleep(max(0.0, ended_s - self.timebase.now_s())))

    def free_bytes(self):
        return 0


class StubCudaMachine(_StandIn):
    """The stub CUDA driver. Its streams are threads of this process."""

    timebase = REAL_TIME
    stream_write_names = CUDA

    def __init__(self, cuda):
        self._cuda = cuda
        self._copied = ctypes.c_int64(0)
        self.gpu = gpu_of(parse_block({"device": "simulated"}), torch.device("cpu"), rank=0, local_rank=0)
        self.new_stream, self.using, self.synchronize = cuda.new_stream, cuda.using, cuda.synchronize
        self.sleep = self.compute = cuda.delay
        self.timed_event = cuda.event
        self.captured = self.captured_alone = cuda.captured

    def turns(self, wanted):
        return min(wanted, 5)

    def stream_handle(self, stream=None):
        return stream or self._cuda.stream

    def launch_small(self):
        self._cuda.delay(0.0)

    def copy_to_host(self, value):
        self.store(value)
        return self.stored

    def store(self, value):
        self._cuda.store(self._copied, value)

    def stored(self):
        return self._copied.value

    def execution(self):
        return CudaExecution(torch.device("cuda", 0), TorchCuda(self._cuda))

    def clocks(self):
        cuda = TorchCuda(self._cuda)
        return clocks_by_an_agent(
            self.gpu, lambda lease: StreamMarks(StreamWrites(lease.shared), 0, cuda, cuda.current_stream)
        )


class HostMachine(_StandIn):
    """The CPU instead of the GPU: the real engine on gloo, and a simulated GPU for Perseus."""

    timebase = REAL_TIME
    backend = "gloo"
    block: ClassVar[dict[str, Any]] = {
        "device": "simulated",
        "simulated": {"longest_instruction_s": 0.01, "counter_period_s": 0.02, "lock_latency_s": 0.002},
    }
    size = stage_size = (8, 4, 2, 4)
    setups = ("bf16", "contiguous recomputation")
    most_iterations = 1_000_000  # a busy machine plans after any number of such short iterations

    def __init__(self):
        torch.set_num_threads(1)
        self._is_busy = False
        self.device = torch.device("cpu")
        self.gpu = RecordingSimulatedGpu.named("a100-sxm")

    def seconds(self, wanted_s):
        return min(wanted_s, 0.1)

    def turns(self, wanted):
        return min(wanted, 5)

    def sleep(self, seconds):
        self._is_busy = seconds > 1

    def synchronize(self):
        """Never return after a long sleep, not even on a signal, like a call of the driver."""
        if self._is_busy:
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)  # zeros: PTHREAD_MUTEX_INITIALIZER
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
