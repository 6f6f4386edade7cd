"""The clocks' thread does not make another thread's capture of a CUDA graph fail."""

import ctypes
import threading

import pytest
import torch
from virtual.gpu import VirtualCuda
from virtual.time import VirtualTime

from perseus_ds.clocks.controller import ClockController
from perseus_ds.clocks.events import relax_stream_capture
from perseus_ds.clocks.timers import CudaExecution
from perseus_ds.gpu.device_models import DEVICES
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

GLOBAL, RELAXED = 0, 2


class Runtime:
    """A stand-in for the CUDA runtime's library: each thread has a mode, the global one at first."""

    def __init__(self, error=0):
        self.mode_of = {}
        self.error = error

    def exchange(self, pointer):
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        name = threading.current_thread().name
        before = self.mode_of.get(name, GLOBAL)
        if self.error == 0:
            self.mode_of[name], mode.value = mode.value, before
        return self.error


class Cuda(Runtime):
    cudaThreadExchangeStreamCaptureMode = Runtime.exchange  # noqa: N815


class Hip(Runtime):
    hipThreadExchangeStreamCaptureMode = Runtime.exchange  # noqa: N815


@pytest.mark.parametrize("kind", [Cuda, Hip])
@pytest.mark.parametrize(("error", "is_relaxed"), [(0, True), (1, False)])
def test_the_mode_of_the_calling_thread_is_exchanged(kind, error, is_relaxed):
    runtime = kind(error)
    assert relax_stream_capture(runtime) is is_relaxed
    assert runtime.mode_of == ({threading.current_thread().name: RELAXED} if is_relaxed else {})


def test_a_runtime_without_the_function_is_told_apart():
    assert relax_stream_capture(object()) is False


def test_the_clocks_thread_queries_events_only_in_the_relaxed_mode():
    now, runtime = VirtualTime(), Cuda()
    cuda, queried_in = VirtualCuda(now), []
    execution = CudaExecution(torch.device("cuda:0"), cuda, now, relax_capture=lambda: relax_stream_capture(runtime))
    clocks = ClockController(
        SimulatedGpu(DEVICES["a100-sxm"], timebase=now), pytest.fail, on_start=execution.use_device, timebase=now
    )
    execution.begin(Compute(Instruction(0, Kind.FORWARD, 0)))
    cuda.launch(0.1)
    ended = execution.end(Compute(Instruction(0, Kind.FORWARD, 0)))
    query = ended.event.event.query
    ended.event.event.query = lambda: (queried_in.append(runtime.mode_of.get("perseus-clocks", GLOBAL)), query())[1]
    clocks.request(1110, ended)
    now.sleep(1.0)
    clocks.close()
    assert set(queried_in) == {RELAXED}
    assert "MainThread" not in runtime.mode_of, "the training thread keeps its own mode"
