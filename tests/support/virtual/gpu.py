"""Simulated GPUs in virtual time with various faults, and a stand-in for CUDA."""

import bisect
import math
from collections import deque
from contextlib import contextmanager

import numpy as np

from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.simulation.device_models import COMPUTE_BOUND
from perseus_ds.simulation.gpu import SimulatedGpu

REFUSALS = {
    "driver error": GpuError("Locking the clock failed: unknown error (code 999)"),
    "driver busy": GpuBusyError("Locking the clock failed: the driver did not answer in time"),
    "no permission": GpuPermissionError("Locking the clock failed: changing clocks needs root or CAP_SYS_ADMIN"),
}
DRIVER_FAULTS = ("driver error", "driver busy", "no permission", "driver hangs", "counter fails")


def set_clock(actor, clock_mhz):
    """Request a clock, and return when the driver has accepted or refused it, and a refused one was reset."""
    actor.request(clock_mhz)
    actor._time.sleep(0.1)


class RecordingGpu(SimulatedGpu):
    """Records the clocks that were set, None for the default, and their times.

    Attributes:
        set_at: Clocks and times.
        refusal: An error raised instead of locking a clock.
        refusal_to_reset: An error raised instead of resetting the clock.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.set_at = []
        self.refusal = self.refusal_to_reset = None

    @property
    def clocks_set(self):
        return [clock_mhz for clock_mhz, _ in self.set_at]

    def lock_clock(self, clock_mhz):
        self._record(clock_mhz, self.refusal)
        super().lock_clock(clock_mhz)

    def reset_clock(self):
        self._record(None, self.refusal_to_reset)
        super().reset_clock()

    def _record(self, clock_mhz, refusal):
        if refusal is not None:
            raise refusal
        self.set_at.append((clock_mhz, self.timebase.now_s()))


class FaultyGpu(SimulatedGpu):
    """A GPU with a driver that fails between :meth:`begin` and :meth:`end`.

    Attributes:
        fault: One of :data:`DRIVER_FAULTS` or of :data:`REFUSALS`, or ``"counter stands still"``; None if it works.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.fault = None
        self._stands_at_j = 0.0
        self._works = self.timebase.condition()

    @property
    def is_at_default_clock(self):
        return self.locked_clock_mhz == self.model.top_clock_mhz

    def begin(self, fault):
        """Fail from now on."""
        self._stands_at_j = super().energy_j()
        self.fault = fault

    def end(self):
        """Recover from the fault."""
        with self._works:
            self.fault = None
            self._works.notify_all()

    def lock_clock(self, clock_mhz):
        self._answer()
        if self.fault in REFUSALS:
            raise REFUSALS[self.fault]
        super().lock_clock(clock_mhz)

    def reset_clock(self):
        self._answer()
        if self.fault == "no permission":
            raise REFUSALS[self.fault]
        super().reset_clock()

    def energy_j(self):
        self._answer()
        if self.fault == "counter fails":
            raise GpuError("Reading the energy counter failed: unknown error (code 999)")
        return self._stands_at_j if self.fault == "counter stands still" else super().energy_j()

    def _answer(self):
        with self._works:
            while self.fault == "driver hangs":
                self._works.wait()


class AveragingGpu(SimulatedGpu):
    """A GPU with a counter that integrates a moving average of the power, as power readings do.

    Attributes:
        average_s: Window of the average [s]; a test may change it.
    """

    average_s = 1.0

    def __init__(self, model, *, timebase, counter_period_s=0.1, **settings):
        self._clock, self._refreshed_every_s = timebase, counter_period_s
        self._seen_s, self._seen_j = [], []
        super().__init__(model, timebase=timebase, counter_period_s=counter_period_s, **settings)

    def energy_j(self):
        self._seen_s.append(self._clock.now_s())
        self._seen_j.append(self.true_energy_j)
        at_s = math.floor(self._seen_s[-1] / self._refreshed_every_s) * self._refreshed_every_s
        first = max(0, bisect.bisect(self._seen_s, at_s - self.average_s) - 1)
        asked_s = np.linspace(at_s - self.average_s, at_s, 51)
        return float(np.interp(asked_s, self._seen_s[first:], self._seen_j[first:]).mean())


class OneAtATime:
    """A driver that serves one call at a time, as a context manager around each call."""

    def __init__(self, time):
        self._changed = time.condition()
        self._is_busy = False

    @contextmanager
    def __call__(self):
        with self._changed:
            while self._is_busy:
                self._changed.wait()
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify()


class VirtualCuda:
    """One CUDA stream, with launches that return immediately and run on a simulated GPU.

    It stands in for the module ``torch.cuda``. If another device is used, that has a stream of its own.

    Args:
        time: Its virtual time.
        gpu: A simulated GPU with the same time; None for work that always takes its nominal time.
        device: Number of its device, which is the current one at first.

    Attributes:
        device: Number of the current device; a test may change it.
        events: Number of events created.
        CUDAGraph: Class of the graphs on this stream.
    """

    def __init__(self, time, gpu=None, device=0):
        self.time = time
        self.events = self.blocking_events = 0
        self.gpu = gpu
        self.device = device
        self._streams = {device: self}
        self._queue = deque()
        self.CUDAGraph = graphs_of(self)
        self.captured = None  # what a graph that is being captured consists of
        self._changed = time.condition()
        self._is_busy = False
        time.thread(self._run, "stream").start()

    def launch(self, seconds, workload=COMPUTE_BOUND):
        """Enqueue work that takes ``seconds`` at the top clock, without waiting."""

        def work():
            self.gpu.begin_work(workload)
            self.gpu.finish_work(seconds)

        self.idle(seconds) if self.gpu is None else self.enqueue(work)

    def idle(self, seconds):
        """Enqueue an idle time."""
        self.enqueue(lambda: self.time.sleep(seconds))

    def enqueue(self, work):
        """Enqueue a function, which occupies the stream, or add it to the graph being captured."""
        if self.captured is not None:
            self.captured.append(work)
            return
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    @contextmanager
    def graph(self, graph, **_):
        """Capture everything enqueued within the context."""
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()

    def check_captured(self, wanted=False):
        """Raise an error if a graph is being captured, or with ``wanted``, if none is."""
        if (self.captured is not None) is not wanted:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing, or only then")

    def Event(self, *, enable_timing, blocking=False, external=False):  # noqa: N802
        assert enable_timing, "an event without timing cannot be read"
        self.blocking_events += blocking
        self.events += 1
        return _Event(self, external)

    def current_device(self):
        return self.device

    def current_stream(self, device):
        if device not in self._streams:
            self._streams[device] = VirtualCuda(self.time, device=device)
        return self._streams[device]

    def synchronize(self, device=None):
        assert device in (None, self.device)
        self.check_captured()
        self.wait_until(lambda: not self._queue and not self._is_busy)

    def wait_until(self, is_so):
        with self._changed:
            while not is_so():
                self._changed.wait()

    def _run(self):
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                work = self._queue.popleft()
                self._is_busy = True
            work()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()


def graphs_of(cuda=None):
    """Return a class of graphs of the launches on such a stream, a new one since sessions replace its methods."""

    class CUDAGraph:
        def __init__(self):
            self._launched = []

        def capture_begin(self, **_):
            cuda.check_captured()
            self._launched = cuda.captured = []

        def capture_end(self):
            cuda.captured = None

        def replay(self):
            for work in self._launched:
                cuda.enqueue(work)

    return CUDAGraph


def wait_for_event(event):
    """Wait for an event in virtual time, without polling."""
    event.synchronize()


class _Event:
    def __init__(self, cuda, external):
        self._cuda = cuda
        self._stream = None
        self._external = external
        self._at_s = None
        self._records = 0

    def record(self, stream=None):
        self._cuda.check_captured(self._external)
        self._at_s = None
        self._records += 1
        number = self._records
        self._stream = stream or self._cuda.current_stream(self._cuda.device)
        self._stream.enqueue(lambda: self._pass(number))

    def query(self):
        self._cuda.check_captured()
        return self._at_s is not None

    def synchronize(self):
        if not self.query():
            self._stream.wait_until(self.query)

    def elapsed_time(self, end_event):
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event._at_s - self._at_s) * 1e3

    def _pass(self, number):
        if number == self._records:
            self._at_s = self._cuda.time.now_s()
