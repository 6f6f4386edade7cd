"""Detection of stragglers: plans assigned to pipelines and the resulting time of the job."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.decisions import Assignment
from perseus_ds.server.job_control import Straggler
from perseus_ds.server.selector import StragglerWatch, straggler_of, with_reported

INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),), (Instruction(1, Kind.FORWARD, 0),))
PLANS = tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - i,),) * 2, 1.0 + 0.005 * i, 100.0 - 0.5 * i) for i in range(61))
PROVENANCE = Provenance(schedule="1f1b", micro_batches=1, stages=2, blocking_power_w=10, solver="none")
FRONTIER = Frontier(PLANS, 1.0, PLANS[0], PROVENANCE)


def run_job(slowness_at, iterations, noise=0.0, seed=0):
    """Simulate pipelines that follow stragglers, and return the assignments and each pipeline's times [s]."""
    draw = random.Random(seed)
    watch = StragglerWatch(len(slowness_at(0)))
    assignment = Assignment.of(FRONTIER, 0, watch.stretch_factors)
    assignments, times = [], []
    before = None
    for iteration in range(iterations):
        own_s = [
            FRONTIER.plans[plan].time_s * slow * draw.gauss(1.03, noise)
            for plan, slow in zip(assignment.plans, slowness_at(iteration), strict=True)
        ]
        assignments.append(assignment)
        times.append(own_s)
        if before is not None:  # the times reported at the last boundary
            watch.update([s / FRONTIER.plans[plan].time_s for s, plan in zip(*before, strict=True)])
        before = own_s, assignment.plans
        assignment = Assignment.of(FRONTIER, 0, watch.stretch_factors)
    return assignments, times


def test_others_follow_within_five_iterations_and_come_back():
    assignments, times = run_job(lambda i: (1.0, 1.2 if 20 <= i < 60 else 1.0), 80)
    assert [a.plans for a in assignments[:20]] == [(0, 0)] * 20
    assert all(a.plans[0] > 30 and a.plans[1] == 0 for a in assignments[24:60])
    assert all(max(own) <= 1.2 * 1.03 + 1e-9 for own in times), "no pipeline may wait for one that follows"
    assert [a.plans for a in assignments[65:]] == [(0, 0)] * 15


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1.0, 1.4), min_size=2, max_size=8), st.integers(0, 1000), st.floats(0, 0.006))
def test_the_job_is_no_slower_than_its_slowest_pipeline_however_many_are_slow(slowness, seed, noise):
    assignments, times = run_job(lambda i: slowness if i >= 5 else [1.0] * len(slowness), 60, noise, seed)
    job_s = [max(own) for own in times[12:]]
    assert sum(job_s) / len(job_s) <= max(slowness) * 1.03 * (1 + 4 * noise + 0.001)
    changes = sum(a.plans != b.plans for a, b in itertools.pairwise(assignments[12:]))
    assert changes <= 8, "no flapping"


def test_one_slow_iteration_and_noise_change_nothing():
    spikes = {5: (1.0, 1.5), 9: (1.5, 1.0), 10: (1.0, 1.5), 14: (1.3, 1.3)}
    assignments, _ = run_job(lambda i: spikes.get(i, (1.0, 1.0)), 30, noise=0.008)
    assert {a.plans for a in assignments} == {(0, 0)}


def test_a_pipeline_at_the_border_does_not_flap():
    watch = StragglerWatch(2)
    for _ in range(3):
        watch.update((1.0, 1.08))
    given_rooms = [watch.update((1.0, 1.08 + 0.01 * (i % 2))) for i in range(20)]
    assert set(given_rooms) == {(1.08, 1.0)}
    assert watch.update((1.0, 1.04)) == (1.08, 1.0)
    assert watch.update((1.0, 1.04)) == (1.04, 1.0), "reduced so that no pipeline waits, but still a straggler"
    for _ in range(2):
        watch.update((1.0, 1.02))
    assert watch.stretch_factors == (1.0, 1.0)


def test_who_is_told_of_a_straggler_believes_it_and_counts_nothing_twice():
    reported = Straggler(1, 1.2)
    assert with_reported((1.0, 1.0, 1.0), reported) == (1.2, 1.0, 1.2)
    assert with_reported((1.2, 1.0, 1.2), reported) == pytest.approx((1.2, 1.0, 1.2))
    stretch_factors = with_reported((1.5, 1.5, 1.0), reported)  # another one is even slower
    assert stretch_factors == pytest.approx((1.5, 1.25, 1.0))
    assert straggler_of(stretch_factors) == Straggler(2, 1.5)
    assert straggler_of((1.0, 1.0)) is None
    assert with_reported((1.0,), Straggler(0, 1.3)) == (1.0,), "a single pipeline has no stretch factor"


def test_the_forecast_accounts_as_the_papers_emulation_does():
    assignment = Assignment.of(FRONTIER, 0, (1.2, 1.0))
    plan = PLANS[assignment.plans[0]]
    assert 1.18 < plan.time_s < 1.2
    forecast = assignment.forecast(FRONTIER, gpus_per_stage=4)
    assert forecast.time_s == pytest.approx(1.2)
    assert forecast.energy_j == pytest.approx(4 * (plan.energy_j + 1.2 * 100 + 10 * 2 * (1.2 - plan.time_s)))
    default_j = FRONTIER.baseline.energy_j
    assert forecast.default_energy_j == pytest.approx(4 * (default_j + 1.2 * default_j + 10 * 2 * 0.2))
