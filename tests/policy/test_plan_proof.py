"""Comparisons of plans with default clocks, and the decisions based on them."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import job_report

from perseus_ds.policy.plan_proof import (
    ANALYSES,
    IterationSample,
    PlanComparison,
    PlanProof,
    Verdict,
    error_probability,
    under_plan_minus_default,
)

PERIOD_S = 0.1
MAY_ERR = error_probability(0)


def sample(time_s=1.0, energy_j=100.0, iterations=12, noise=0.0, seed=0, **promised):
    draw = random.Random(seed)
    result = IterationSample(PERIOD_S, **promised)
    for _ in range(iterations):
        result.add(time_s * (1 + noise * draw.gauss(0, 1)), energy_j)
    return result


def decide(*, is_last=False, slowdown=0.0, saved=0.1, error=0.002, **fields):
    comparison = PlanComparison(slowdown, error, saved, error, **fields)
    return Verdict.of(comparison, MAY_ERR, is_last=is_last)


def test_a_block_lasts_until_enough_iterations_without_stalls_have_run():
    block = sample(time_s=0.9, iterations=7)
    block.add(31.0, 9.0)
    assert not block.is_as_long_as(1)
    assert block.remaining_s(0.9) == pytest.approx(0.9)
    block.add(0.9, 100.0)
    assert block.is_as_long_as(1)


def test_default_clocks_are_measured_until_they_are_known_to_one_percent_or_for_long():
    assert sample(time_s=0.9, iterations=8).is_enough
    assert not sample(iterations=16, noise=0.2).is_enough
    assert sample(iterations=36, noise=0.2).is_enough


def test_iterations_in_which_a_rank_has_failed_or_its_counter_stands_still_are_left_out():
    found = IterationSample(PERIOD_S)
    for report in ({}, {"energy_j": math.nan}, {"failed": True}, {"energy_j": 0.0}):
        found.add_reports(job_report({}, report))
    assert found.times_s == [1.0]
    found.add_reports(job_report({"time_s": 0.1, "energy_j": 0.0}))  # shorter than a refresh of the counter
    assert found.times_s == [1.0, 0.1]


@given(st.floats(-0.5, 0.5), st.floats(-0.02, 0.02), st.sampled_from(ANALYSES))
def test_a_steady_drift_of_the_host_is_no_slowdown(slowdown, drift, pairs):
    blocks = np.arange(2 * pairs + 1)
    difference, error = under_plan_minus_default(drift * blocks + slowdown * (blocks % 2))
    assert difference == pytest.approx(slowdown, abs=1e-9)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_the_error_is_that_of_the_differences_between_blocks():
    draw = np.random.default_rng(1)
    levels = 0.01 * draw.standard_normal((2000, 13))
    difference, error = under_plan_minus_default(levels)
    assert difference.std() == pytest.approx(np.sqrt((error**2).mean()), rel=0.05)
    quantile = PlanComparison(0.0, 1.0, 0.0, 1.0, freedom=5).standard_errors(0.025)
    assert quantile == pytest.approx(2.571, abs=0.001)  # Student's t of 6 differences
    assert (abs(difference) <= quantile * error).mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("block", [0, 3, 8])
def test_a_stall_changes_neither_the_verdict_nor_the_saving_wherever_it_is(block):
    """During a checkpoint of a minute, GPUs wait at a quarter of the power."""
    undisturbed, stalled = PlanProof(MAY_ERR), PlanProof(MAY_ERR)
    for number in range(9):
        clean = sample(0.998, 90.0 if number % 2 else 100.0, noise=0.002, seed=number)
        undisturbed.add(clean)
        disturbed = IterationSample.joined([clean])
        if number == block:
            disturbed.add(60.0, 60.0 * 25.0)
        stalled.add(disturbed)
        assert stalled.verdict == undisturbed.verdict
    assert stalled.verdict.kept
    assert stalled.verdict.comparison.saved == pytest.approx(0.1, abs=0.01)


def test_plans_that_follow_each_other_are_each_held_to_their_own_promise():
    slow = sample(1.21, 72.6, promised_slowdown=0.2, promised_power=0.6)
    fast = sample(1.01, 90.9, promised_slowdown=0.0, promised_power=0.9)
    comparison = PlanComparison.of_blocks([sample(), slow, sample(), fast, sample(), slow, sample(), fast, sample()])
    assert comparison.promised_slowdown == pytest.approx(0.095, abs=0.002)
    assert comparison.promised_saved == pytest.approx(0.19, abs=0.01)
    assert comparison.slowdown == pytest.approx(0.105, abs=0.002)
    assert comparison.saved == pytest.approx(0.19, abs=0.01)
    assert comparison.slowdown_error < 0.002


@given(st.floats(0.8, 1.3), st.floats(0.5, 1.5), st.floats(0.0, 0.3))
def test_a_plan_is_kept_only_if_it_saves_energy_in_the_time_that_it_promises(time, energy, promised):
    blocks = [sample(), sample(time, 100 * energy, promised_slowdown=promised)] * 3 + [sample()]
    comparison = PlanComparison.of_blocks(blocks)
    verdict = Verdict.of(comparison, MAY_ERR, is_last=True)
    assert comparison.slowdown == pytest.approx(time - 1)
    assert comparison.saved == pytest.approx(1 - energy)
    if verdict.kept:
        assert energy < 1
        assert time - 1 <= promised + 0.0101
    elif energy < 0.95:
        assert verdict.is_late
        assert time - 1 > promised


def test_a_comparison_goes_on_until_it_is_certain_known_or_long_enough():
    assert decide(slowdown=0.008, error=0.005) is None
    assert decide(slowdown=0.0, error=0.003).kept
    assert not decide(slowdown=0.02, error=0.003).kept
    assert decide(slowdown=0.03, error=0.005).is_late, "its error is too large for the estimate to decide"
    assert decide(slowdown=0.008, error=0.003).kept, "known well enough: the estimate decides"
    assert decide(slowdown=0.008, error=0.003, freedom=3) is None, "the same errors of four blocks are less certain"
    assert decide(slowdown=0.008, error=0.01, is_last=True).kept
    assert not decide(slowdown=0.012, error=0.01, is_last=True).kept
    assert decide(saved=0.01, error=0.0045) is None
    uncertain = decide(saved=0.01, error=0.0045, is_last=True)
    assert (uncertain.kept, uncertain.is_late) == (False, False)
    assert "no energy" in uncertain.reason
    assert "uses more energy" in decide(saved=-0.1).reason


class SimulatedJob:
    """Iterations of 1 s ± 1 % on a host with drift and stalls, and a plan that saves 8 % energy."""

    def __init__(self, seed, slowdown):
        self._draw = random.Random(seed)
        self._drift = self._draw.uniform(-3e-4, 3e-4)
        self._slowdown = slowdown
        self._iterations = 0

    def block(self, *, is_planned):
        result = IterationSample(PERIOD_S)
        while not result.is_as_long_as(1):
            self._iterations += 1
            stall = self._draw.uniform(0.1, 3.0) if self._draw.random() < 0.03 else 0.0
            time_s = math.exp(self._drift * self._iterations) * (1 + self._draw.gauss(0, 0.01) + stall)
            time_s *= 1 + self._slowdown * is_planned
            power_w = 100 * (1 - 0.08 * is_planned) / (1 + self._slowdown * is_planned) * self._draw.gauss(1, 0.01)
            result.add(time_s, power_w * time_s)
        return result

    def verdict(self, before):
        """Compare until there is a verdict, as the job does, after ``before`` other comparisons."""
        proof = PlanProof(error_probability(before))
        while proof.verdict is None:
            proof.add(self.block(is_planned=proof.next_is_planned))
        return proof.verdict


def test_a_plan_that_is_late_is_hardly_ever_kept_and_one_that_is_in_time_hardly_ever_dropped():
    late = [SimulatedJob(seed, 0.02) for seed in range(60)]
    in_time = [SimulatedJob(1000 + seed, 0.0) for seed in range(60)]
    assert sum(job.verdict(before).kept for job in late for before in (0, 2)) <= 0.05 * 120
    assert sum(any(not job.verdict(before).kept for before in range(4)) for job in in_time) <= 0.05 * 60
    # All comparisons of a job together may err with a probability of 5 %.
    assert sum(len(ANALYSES) * error_probability(number) for number in range(40)) == pytest.approx(0.05, rel=0.01)


def test_a_plan_that_runs_is_in_doubt_when_it_is_late_uses_more_energy_or_is_much_faster():
    def is_in_doubt(time_s, energy_j):
        return PlanComparison.of_samples(sample(), sample(time_s, energy_j, promised_slowdown=0.1)).is_in_doubt

    assert not is_in_doubt(1.1, 90.0)
    assert is_in_doubt(1.3, 95.0)
    assert is_in_doubt(1.0, 110.0)
    assert is_in_doubt(0.9, 80.0)


def quiet_verdict(seed, *, saves, comparisons):
    """Return the verdict on a plan as fast as default clocks, in a job of which iterations vary by 0.1 %."""
    draw = np.random.default_rng(seed)
    proof = PlanProof(error_probability(comparisons))
    while proof.verdict is None:
        power_w = 1000.0 * (1 - saves * proof.next_is_planned)
        block = IterationSample(PERIOD_S)
        for time_noise, power_noise in np.exp(0.001 * draw.standard_normal((8, 2))).tolist():
            block.add(time_noise, time_noise * power_w * power_noise)
        proof.add(block)
    return proof.verdict


@pytest.mark.parametrize("comparisons", [10, 20])
def test_later_comparisons_of_a_quiet_job_keep_plans_that_save_and_drop_useless_ones(comparisons):
    assert all(quiet_verdict(seed, saves=0.1, comparisons=comparisons).kept for seed in range(30))
    assert not any(quiet_verdict(seed, saves=0.0, comparisons=comparisons).kept for seed in range(10))
