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
