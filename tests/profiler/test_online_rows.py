"""Power of each kind, estimated from a counter of the total energy."""

import numpy as np
import pytest

from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.profiler.online import OnlineProfiler

POWER_W = {Kind.FORWARD: 300.0, Kind.BACKWARD: 400.0, None: 80.0}


def iteration(rng, start_s, micro_batches=8):
    """Return spans, pieces of constant power and the end of an iteration with waits of up to 40 ms."""
    spans, pieces, now_s = [], [], start_s
    for micro_batch in range(micro_batches):
        for kind, time_s in ((Kind.FORWARD, 0.03), (Kind.BACKWARD, 0.07)):
            wait_s = rng.uniform(0, 0.04)
            pieces += [(now_s, now_s + wait_s, None), (now_s + wait_s, now_s + wait_s + time_s, kind)]
            now_s += wait_s + time_s
            spans.append(Span(Compute(Instruction(0, kind, micro_batch)), now_s - time_s, now_s))
    return spans, pieces, now_s


@pytest.mark.parametrize("jitter_s", [0.0, 0.002])
def test_time_and_energy_are_estimated_by_kind(jitter_s):
    rng = np.random.default_rng(5)
    profiler = OnlineProfiler(blocking_power_w=80.0)
    for start_s in (10.0, 20.0, 30.0):
        spans, pieces, end_s = iteration(rng, start_s)
        readings = []
        for moment in np.arange(start_s + 0.05, end_s, 0.05):
            used_j = sum(POWER_W[kind] * max(0.0, min(moment, b) - a) for a, b, kind in pieces)
            readings.append((moment + rng.uniform(0, jitter_s), 1000 + used_j))
        profiler.add(1200, [spans], readings)
    backward, forward = (row.measurement for row in profiler.rows())
    tolerance = 0.04 if jitter_s else 0.01
    assert forward.time_s == pytest.approx(0.03)
    assert forward.energy_j == pytest.approx(9.0, rel=tolerance)
    assert backward.energy_j == pytest.approx(28.0, rel=tolerance)


def test_iterations_without_two_refreshes_yield_no_row():
    spans, _, _ = iteration(np.random.default_rng(1), 0.0)
    profiler = OnlineProfiler(blocking_power_w=80.0)
    profiler.add(1200, [spans], [(0.1, 5.0)])
    assert profiler.rows() == []


def test_power_while_waiting_may_be_lower_at_low_clocks():
    rng = np.random.default_rng(7)
    profiler = OnlineProfiler(blocking_power_w=80.0)
    for clock_mhz, waiting_w, computing_w in ((1410, 80.0, 400.0), (600, 50.0, 180.0)):
        for start_s in (10.0, 20.0, 30.0, 40.0):
            spans, pieces, end_s = iteration(rng, start_s)
            moments = np.arange(start_s + 0.05, end_s, 0.1)
            watts = [waiting_w if kind is None else computing_w for *_, kind in pieces]
            used_j = [
                sum(w * max(0.0, min(moment, b) - a) for w, (a, b, _) in zip(watts, pieces, strict=True))
                for moment in moments
            ]
            profiler.add(clock_mhz, [spans], list(zip(moments, used_j, strict=True)))
    for row in profiler.rows():
        watts = row.measurement.energy_j / row.measurement.time_s
        assert watts == pytest.approx(400.0 if row.measurement.clock_mhz == 1410 else 180.0, rel=0.045)


def sampled(pieces, moment, period_s=0.1, share=0.25):
    """Energy by a counter that looks at power in the last quarter of each period [J]."""
    begins = np.arange(round(pieces[0][0] / period_s), round(moment / period_s)) * period_s + (1 - share) * period_s
    return sum(
        POWER_W[kind] / share * max(0.0, min(begin + share * period_s, b) - max(begin, a))
        for begin in begins
        for a, b, kind in pieces
    )


def test_the_error_of_power_says_that_a_counter_looks_a_quarter_of_the_time_only():
    exact, quarter = OnlineProfiler(blocking_power_w=80.0), OnlineProfiler(blocking_power_w=80.0)
    rng = np.random.default_rng(3)
    for number in range(12):
        spans, pieces, end_s = iteration(rng, 10.0 * number)
        moments = np.arange(10.0 * number + 0.1, end_s, 0.1)
        exact.add(1200, [spans], [(m, sum(POWER_W[k] * max(0, min(m, b) - a) for a, b, k in pieces)) for m in moments])
        quarter.add(1200, [spans], [(m, sampled(pieces, m)) for m in moments])
        if number == 0:
            assert quarter.power_error(1200) > 0.05
    assert exact.power_error(1200) < 0.02
    assert quarter.power_error(1200) > 3 * exact.power_error(1200)
    backward, forward = (row.measurement.energy_j for row in quarter.rows())
    assert backward + forward == pytest.approx(0.03 * 300.0 + 0.07 * 400.0, rel=3 * quarter.power_error(1200))
    assert min(row.quality.energy_relative_error for row in quarter.rows()) > 0.015
