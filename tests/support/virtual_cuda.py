"""A stand-in for the module ``torch.cuda`` in virtual time: one stream on which work is launched."""


class VirtualCuda:
    """See ``perseus_ds.device.timers.Cuda``.

    Attributes:
        chosen: The device that each call of ``set_device`` chose.
    """

    def __init__(self, now, device=0):
        self.now = now
        self.chosen = []
        self._device = device
        self._free_s = now.now_s()

    def launch(self, seconds):
        """Enqueue work that takes some time on the stream; returns at once."""
        self._free_s = max(self._free_s, self.now.now_s()) + seconds

    def Event(self, *, enable_timing, blocking):  # noqa: N802
        assert enable_timing, "an event without timing cannot be read"
        assert blocking, "a thread that waits for it would occupy a core"
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
