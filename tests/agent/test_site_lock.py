"""A clock that somebody has locked before the job, as a busy GPU shows it."""

import pytest
from virtual.time import VirtualTime

from perseus_ds.agent.site_lock import check_lock_permission


class BusyGpu:
    """A busy GPU with a clock that depends on the time and on whether it was reset."""

    def __init__(self, clock_mhz, time):
        self._clock_mhz, self._time = clock_mhz, time
        self._is_reset = False

    def supported_clocks_mhz(self):
        return tuple(range(210, 1411, 15))

    def clock_mhz(self):
        return self._clock_mhz(self._time.now_s(), self._is_reset)

    def throttle_reasons(self):
        return ()

    def check_lock_permission(self):
        self._is_reset = True


@pytest.mark.parametrize(
    ("clock_mhz", "was_locked"),
    [
        (lambda now_s, is_reset: 1410 if is_reset else 1200, True),
        (lambda now_s, is_reset: min(1410, 210 + 3000 * (now_s - 100.0)), False),  # on its way from the idle clock
        (lambda now_s, is_reset: 1200, False),
        (lambda now_s, is_reset: 1410, False),
    ],
)
def test_a_constant_clock_that_rises_when_it_is_reset_was_locked(clock_mhz, was_locked):
    time = VirtualTime()
    notice = check_lock_permission(BusyGpu(clock_mhz, time), time)
    assert ("locked at 1200 MHz" in notice) == was_locked
    assert bool(notice) == was_locked


@pytest.mark.parametrize("clock_mhz", [1410, 1395])
def test_a_gpu_that_reaches_about_its_highest_clock_is_not_observed_any_longer(clock_mhz):
    time = VirtualTime()
    begun_s = time.now_s()
    assert not check_lock_permission(BusyGpu(lambda now_s, is_reset: clock_mhz, time), time)
    assert time.now_s() == begun_s
