"""Devices in virtual time: a stand-in for CUDA, to which work is only launched, and a host, which does it at once."""

from collections import deque
from contextlib import contextmanager

from perseus_ds.simulation.device_models import COMPUTE_BOUND


class VirtualHost:
    """A device that has done its work when a launch returns, unlike :class:`VirtualCuda`."""

    def __init__(self, time, gpu):
        self.time, self.gpu = time, gpu
        self.CUDAGraph = graphs_of(self)  # nothing is captured, but sessions replace methods of the class

    def launch(self, seconds, workload=COMPUTE_BOUND):
        self.gpu.begin_work(workload)
        self.gpu.finish_work(seconds)

    def idle(self, seconds):
        self.time.sleep(seconds)

    def synchronize(self):
        """Do nothing, since nothing is under way."""


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


def graphs_of(cuda):
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
