"""Stand-ins for the module ``torch.cuda`` in virtual time: one stream on which work is launched."""

from collections import deque


class VirtualCuda:
    """See ``perseus_ds.clocks.timers.Cuda``.

    Attributes:
        chosen: The device that each call of ``set_device`` chose.
        events: How many events were created.
    """

    def __init__(self, now, device=0):
        self.now = now
        self.chosen = []
        self.events = 0
        self._device = device
        self._free_s = now.now_s()

    def launch(self, seconds):
        """Enqueue work that takes some time on the stream; returns at once."""
        self._free_s = max(self._free_s, self.now.now_s()) + seconds

    def Event(self, *, enable_timing, blocking):  # noqa: N802
        assert enable_timing, "an event without timing cannot be read"
        assert blocking, "a thread that waits for it would occupy a core"
        self.events += 1
        return _Event(self)

    def current_device(self):
        return self._device

    def set_device(self, device):
        self.chosen.append(device)

    def synchronize(self):
        self.now.sleep(max(0.0, self._free_s - self.now.now_s()))


class _Event:
    def __init__(self, cuda):
        self._cuda = cuda
        self._at_s = None

    def record(self):
        self._at_s = max(self._cuda._free_s, self._cuda.now.now_s())

    def query(self):
        assert self._at_s is not None, "not recorded"
        return self._cuda.now.now_s() >= self._at_s

    def synchronize(self):
        self._cuda.now.sleep(max(0.0, self._at_s - self._cuda.now.now_s()))

    def elapsed_time(self, end_event):
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event._at_s - self._at_s) * 1e3


class CudaOnGpu:
    """One stream whose work a simulated GPU does, at the clock that it has: launches return at once.

    Args:
        now: Its virtual time.
        gpu: A simulated GPU that lives in it.

    Attributes:
        events: How many events were created.
    """

    def __init__(self, now, gpu):
        self.events = 0
        self._now = now
        self._gpu = gpu
        self._queue = deque()
        self._changed = now.condition()
        self._is_busy = False
        now.thread(self._run, "stream").start()

    def launch(self, workload, seconds):
        """Enqueue work that takes some time at the top clock."""

        def work():
            self._gpu.begin_work(workload)
            self._gpu.finish_work(seconds)

        self.enqueue(work)

    def enqueue(self, work):
        """Enqueue a function, during which the stream is busy."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def Event(self, *, enable_timing, blocking):  # noqa: N802
        assert enable_timing, "an event without timing cannot be read"
        assert blocking, "a thread that waits for it would occupy a core"
        self.events += 1
        return _EventOnGpu(self)

    def current_device(self):
        return 0

    def set_device(self, device):
        assert device == 0

    def synchronize(self):
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


class _EventOnGpu:
    def __init__(self, cuda):
        self._cuda = cuda
        self._at_s = None
        self._records = 0

    def record(self):
        self._at_s = None
        self._records += 1
        number = self._records
        self._cuda.enqueue(lambda: self._pass(number))

    def query(self):
        return self._at_s is not None

    def synchronize(self):
        self._cuda.wait_until(self.query)

    def elapsed_time(self, end_event):
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event._at_s - self._at_s) * 1e3

    def _pass(self, number):
        if number == self._records:
            self._at_s = self._cuda._now.now_s()
