"""A driver that fails in every way, for tests of whatever may happen, in virtual time."""

from hypothesis import strategies as st

from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import GpuState

MOODS = st.sampled_from(["well", "well", "hangs", "refuses", "busy", "fails although it takes effect", "mistake"])
"""What the driver does in one of its calls."""


class HostileGpu:
    """A driver whose calls fail, hang, take effect late or in spite of an error, as given by a list of moods.

    Attributes:
        clock_mhz_now: The clock, None for the default.
        callers: Greatest number of simultaneous calls.
        locks: Number of calls that lock a clock.
    """

    name = "hostile"
    has_energy_counter = True
    state = GpuState()

    def __init__(self, time, moods):
        self._time = time
        self._moods = moods
        self._is_called = 0
        self.callers = self.locks = 0
        self.clock_mhz_now = None

    def supported_clocks_mhz(self):
        return (900, 1200, 1410)

    def lock_clock(self, clock_mhz):
        self.locks += 1
        self._answer(clock_mhz)

    def reset_clock(self):
        self._answer(None)

    def energy_j(self):
        return self._answer(self.clock_mhz_now) or 0.0

    def clock_mhz(self):
        return self.clock_mhz_now or 1410

    def throttle_reasons(self):
        return ()

    def power_limit_w(self):
        return None

    def close(self):
        pass

    def _answer(self, clock_mhz):
        self._is_called += 1
        self.callers = max(self.callers, self._is_called)
        mood = self._moods.pop() if self._moods else "well"
        if mood == "hangs":
            self._time.sleep(20.0)
        if mood != "refuses":
            self._time.sleep(0.01)
            self.clock_mhz_now = clock_mhz
        self._is_called -= 1
        if mood in ("refuses", "fails although it takes effect"):
            raise GpuError("unknown error")
        if mood == "busy":
            raise GpuBusyError("busy")
        if mood == "mistake":
            raise ZeroDivisionError
