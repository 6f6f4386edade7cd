"""The clocks' thread does not make another thread's capture of a CUDA graph fail."""

import ctypes
import threading
from contextlib import contextmanager

import pytest
import torch
from virtual.gpu import VirtualCuda
from virtual.time import VirtualTime

from perseus_ds.clocks.controller import ClockController
from perseus_ds.clocks.events import Captures, captures_to_avoid, relax_stream_capture
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

    def cudaThreadExchangeStreamCaptureMode(self, pointer):  # noqa: N802
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        name = threading.current_thread().name
        before = self.mode_of.get(name, GLOBAL)
        if self.error == 0:
            self.mode_of[name], mode.value = mode.value, before
        return self.error


@pytest.mark.parametrize(("error", "is_relaxed"), [(0, True), (1, False)])
def test_the_mode_of_the_calling_thread_is_exchanged(error, is_relaxed):
    runtime = Runtime(error)
    assert relax_stream_capture(runtime) is is_relaxed
    assert runtime.mode_of == ({threading.current_thread().name: RELAXED} if is_relaxed else {})


def test_a_runtime_without_the_function_is_told_apart():
    assert relax_stream_capture(object()) is False


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_torch_without_cuda_has_no_runtime():
    assert relax_stream_capture() is False


def test_the_clocks_thread_queries_events_only_in_the_relaxed_mode():
    now, runtime = VirtualTime(), Runtime()
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


class Graph:
    """A stand-in for ``torch.cuda.CUDAGraph`` whose captures fail if another thread asks for an event meanwhile."""

    def __init__(self):
        self.is_capturing = False
        self.failures = 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if capture_error_mode == "wrong":
            raise RuntimeError("no such mode")
        self.is_capturing = True

    def capture_end(self):
        self.is_capturing = False


def watched_graph():
    """A class of its own, which is changed, and the captures of its objects."""
    kind = type("WatchedGraph", (Graph,), {"capture_begin": Graph.capture_begin, "capture_end": Graph.capture_end})
    return kind(), Captures(kind)


class CountingCaptures(Captures):
    """Knows how many calls captures wait for."""

    calls = 0

    @contextmanager
    def outside(self):
        with super().outside():
            self.calls += 1
            yield
            self.calls -= 1


def test_where_the_mode_cannot_be_exchanged_the_clocks_thread_stays_away_from_captures():
    now, captures = VirtualTime(), CountingCaptures(type("WatchedGraph", (Graph,), {}))
    cuda, calls = VirtualCuda(now), []
    execution = CudaExecution(torch.device("cuda:0"), cuda, now, relax_capture=lambda: False, captures=captures)
    clocks = ClockController(
        SimulatedGpu(DEVICES["a100-sxm"], timebase=now), pytest.fail, on_start=execution.use_device, timebase=now
    )
    execution.begin(Compute(Instruction(0, Kind.FORWARD, 0)))
    cuda.launch(0.1)
    ended = execution.end(Compute(Instruction(0, Kind.FORWARD, 0)))
    query = ended.event.event.event.query
    ended.event.event.event.query = lambda: (calls.append(captures.calls), query())[1]
    clocks.request(1110, ended)
    now.sleep(1.0)
    clocks.close()
    assert clocks.changes == 1
    assert set(calls) == {1}, "captures wait for each of them"


def test_a_capture_waits_for_a_call_that_is_under_way_and_calls_wait_for_it():
    graph, captures = watched_graph()
    order, may_end, has_begun = [], threading.Event(), threading.Event()

    def call():
        with captures.outside():
            has_begun.set()
            may_end.wait()
            order.append("call")

    def capture():
        graph.capture_begin()
        order.append("capture")

    first = threading.Thread(target=call)
    first.start()
    has_begun.wait()
    capturing = threading.Thread(target=capture)
    capturing.start()
    while not captures._capturing:
        pass
    second = threading.Thread(target=call)
    second.start()
    may_end.set()
    capturing.join()
    order.append("captured")
    graph.capture_end()
    for thread in (first, second):
        thread.join()
    assert order == ["call", "capture", "captured", "call"]


def test_a_capture_that_cannot_begin_keeps_nobody_waiting_and_its_own_thread_may_call():
    graph, captures = watched_graph()
    with pytest.raises(RuntimeError, match="no such mode"):
        graph.capture_begin(capture_error_mode="wrong")
    graph.capture_begin()
    with captures.outside():
        pass
    graph.capture_end()
    with captures.outside():
        pass


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_captures_are_watched_once_where_there_is_no_runtime_to_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("OtherGraph", (Graph,), {}))
    captures_to_avoid.cache_clear()
    captures = captures_to_avoid()
    assert isinstance(captures, Captures)
    assert captures_to_avoid() is captures
    captures_to_avoid.cache_clear()
