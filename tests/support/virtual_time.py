"""A time of the test's own, in which minutes pass at once."""


class VirtualTime:
    """Stands still but when somebody sleeps; see ``perseus_ds.device.gpu.simulated.Timebase``."""

    def __init__(self):
        self.seconds = 100.0

    def now_s(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds

    def wait(self, changed, seconds):
        self.seconds += seconds
