"""The formula of times over the clock, with and without a power limit."""

import numpy as np
import pytest

from perseus_ds.profiler.physical_model import Series, TimeModel

CLOCKS_MHZ = np.arange(600.0, 1501.0, 100.0)


def model_of(time_s):
    return TimeModel([Series(CLOCKS_MHZ, time_s, np.full(len(CLOCKS_MHZ), np.nan))])


def times_s(clock_mhz):
    return 0.02 + 60 / clock_mhz


@pytest.mark.parametrize("limit_mhz", [1100, 1200, 1300, 1400])
def test_the_clock_from_which_times_are_constant_and_the_clock_reached_there_are_found(limit_mhz):
    model = model_of(np.where(limit_mhz > CLOCKS_MHZ, times_s(CLOCKS_MHZ), times_s(limit_mhz - 50)))
    assert model.limit_mhz == limit_mhz
    assert model.reached_mhz == [pytest.approx(limit_mhz - 50)]


def test_times_that_hardly_depend_on_the_clock_do_not_tell_a_clock_far_below_the_limit():
    model = model_of(np.where(CLOCKS_MHZ < 1300.0, 0.1 + 0.5 / CLOCKS_MHZ, 0.102))
    assert (model.limit_mhz, model.reached_mhz) == (1300, [650])


def test_no_part_of_a_time_is_negative():
    model = model_of(1e5 / CLOCKS_MHZ**2)
    slow_s, fast_s = model.values(0, np.array([600.0, 1200.0]))
    assert slow_s == pytest.approx(2 * fast_s), "as if all of it were proportional"


def test_an_outlier_does_not_change_the_formula():
    noise = 1 + 0.004 * (-1.0) ** np.arange(len(CLOCKS_MHZ))
    noise[3] = 1.5
    assert model_of(times_s(CLOCKS_MHZ) * noise).values(0, CLOCKS_MHZ) == pytest.approx(times_s(CLOCKS_MHZ), rel=0.01)
