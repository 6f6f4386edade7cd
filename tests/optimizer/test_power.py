"""Power over a second of an iteration that repeats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import one_f_one_b, scaled, synthetic_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.optimizer.problem import power_swing, problem_for
from perseus_ds.pipeline.instruction import Kind


def one_rank(forward_s, backward_s):
    """Return a forward at 300 W and a backward at 500 W, the same at both clocks."""
    times_s = {Kind.FORWARD: (forward_s, 300.0), Kind.BACKWARD: (backward_s, 500.0)}
    rows = [Measurement(0, k, mhz, t, w * t) for k, (t, w) in times_s.items() for mhz in (1200, 1410)]
    return problem_for(one_f_one_b(1, 1), StageProfile(rows), blocking_power_w=100.0)


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "expected"),
    [
        # A second fits into each pass, and can directly follow one of the other pass.
        (2.0, 2.0, (500.0, 300.0, 200.0)),
        # A second contains at most half a second of 500 W, and two such seconds do not overlap.
        (3.5, 0.5, (400.0, 300.0, 100.0)),
        # Every second consists of two whole iterations.
        (0.25, 0.25, (400.0, 400.0, 0.0)),
    ],
)
def test_extremes_are_those_of_the_worst_second(forward_s, backward_s, expected):
    problem = one_rank(forward_s, backward_s)
    swing = power_swing(problem, problem.baseline)
    assert (swing.highest_w, swing.lowest_w, swing.change_w) == pytest.approx(expected)


@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 4), micro_batches=st.integers(1, 8), scale=st.floats(0.5, 40.0))
def test_no_second_of_a_fine_simulation_is_beyond_the_extremes(ranks, micro_batches, scale):
    profile = scaled(synthetic_profile(ranks), time=scale, energy=scale)
    problem = problem_for(one_f_one_b(ranks, micro_batches), profile, blocking_power_w=40.0)
    plan = problem.plan(problem.most_frugal)
    swing, durations = power_swing(problem, plan), problem.durations_s(problem.most_frugal)
    end_s = problem.dag.finish_s(durations)
    step_s = plan.time_s / 4000
    moments_s = (np.arange(4000) + 0.5) * step_s
    power_w = np.full(4000, 40.0 * ranks)
    for node in problem.node:
        i = problem.dag.nodes[node].work
        rows = [m for m in profile.measurements if (m.stage, m.kind) == (i.stage, i.kind)]
        row = next(m for m in rows if m.time_s == durations[node])
        runs = (moments_s >= end_s[node] - row.time_s) & (moments_s < end_s[node])
        power_w[runs] += row.energy_j / row.time_s - 40.0
    seconds = round(1 / step_s)
    repeated = np.concatenate([[0.0], np.cumsum(np.tile(power_w, seconds // 4000 + 2))])
    mean_w = (repeated[seconds:] - repeated[:-seconds]) / seconds
    assert mean_w.max() <= swing.highest_w * 1.01 + 0.01 * power_w.max()
    assert mean_w.min() >= swing.lowest_w * 0.99 - 0.01 * power_w.max()
    assert swing.lowest_w * (1 - 1e-9) <= plan.mean_power_w <= swing.highest_w * (1 + 1e-9)
