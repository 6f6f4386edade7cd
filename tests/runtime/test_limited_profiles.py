"""The clocks that are left of a profile under a limit, and their times."""

import math

import pytest

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.runtime.limited_plans import StageLimit, limited

FORWARD = Kind.FORWARD
POWERS_W = {900: 200.0, 1200: 300.0, 1400: 400.0}


def rows(stage):
    return [Measurement(stage, FORWARD, mhz, 1200 / mhz, power_w * 1200 / mhz) for mhz, power_w in POWERS_W.items()]


QUALITY = [RowQuality(stage=stage, kind=FORWARD, clock_mhz=1200, samples=1) for stage in (0, 1)]
PROFILE = StageProfile([*rows(0), *rows(1)], ProfileInfo(rows=QUALITY, blocking_power_w=50.0))


def clocks(profile, stage):
    return profile.options(stage, FORWARD).clock_mhz.tolist()


def test_clocks_above_a_limit_are_left_out_for_its_stage_but_for_the_highest_which_is_as_fast_as_default_clocks():
    found = limited(PROFILE, [StageLimit(0, 250.0, math.inf)], {(0, FORWARD): 1.1})
    assert (clocks(found, 0), clocks(found, 1)) == ([900, 1400], [900, 1200, 1400])
    highest = found.at_highest_clock(0, FORWARD)
    assert highest.time_s == 1.1
    assert highest.energy_j == pytest.approx(290.0), "what the profile says between 1200 and 900 MHz"
    assert [row.stage for row in found.info.rows] == [1], "the quality of rows that are left"


def test_heat_leaves_clocks_next_to_it_to_the_highest_one():
    found = limited(PROFILE, [StageLimit(0, math.inf, 1200.0)], {(0, FORWARD): 1.0})
    assert clocks(found, 0) == [900, 1400]
    assert found.at_highest_clock(0, FORWARD).energy_j == pytest.approx(300.0)


def test_no_row_is_faster_than_default_clocks_under_the_limit():
    found = limited(PROFILE, [StageLimit(0, 310.0, math.inf)], {(0, FORWARD): 1.05})
    assert found.options(0, FORWARD).time_s.tolist() == pytest.approx([1200 / 900, 1.05, 1.05])


def test_below_all_rows_the_lowest_clock_is_left():
    found = limited(PROFILE, [StageLimit(0, 100.0, math.inf)], {(0, FORWARD): 2.0})
    assert clocks(found, 0) == [900, 1400]
    assert found.options(0, FORWARD).time_s.tolist() == [2.0, 2.0]
    more_s = 2.0 - 1200 / 900
    expected_j = 200.0 * 1200 / 900 + 50.0 * more_s
    assert found.options(0, FORWARD).energy_j.tolist() == pytest.approx([expected_j] * 2), "as waiting, beyond its time"
