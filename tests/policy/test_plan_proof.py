"""When a plan has proved itself against iterations at default clocks, and when it has not."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lone_communicator import told_of

from perseus_ds.policy.plan_proof import Comparison, IterationSample, is_in_doubt, is_kept

PERIOD_S = 0.1


def sample(time_s=1.0, energy_j=100.0, iterations=12, noise=0.0, seed=0):
    draw = random.Random(seed)
    result = IterationSample(PERIOD_S)
    for _ in range(iterations):
        result.add(time_s * (1 + noise * draw.gauss(0, 1)), energy_j)
    return result


def test_a_sample_is_looked_at_three_times_the_first_after_sixty_refreshes_and_eight_iterations():
    assert [sample(time_s=0.9, iterations=n).looks for n in (7, 8, 15, 16, 31, 32, 99)] == [0, 1, 1, 2, 2, 3, 3]
    assert [sample(time_s=0.1, iterations=n).looks for n in (59, 61)] == [0, 1]


def test_default_clocks_are_measured_until_they_are_known_to_one_percent_or_for_long():
    assert sample(time_s=0.9, iterations=8).is_enough
    assert not sample(iterations=16, noise=0.2).is_enough
    assert sample(iterations=32, noise=0.2).is_enough


def test_one_iteration_that_is_held_up_changes_no_typical_one():
    held_up = sample()
    held_up.add(60.0, 6000.0)
    assert held_up.time_s == pytest.approx(1.0)
    assert held_up.energy_j == pytest.approx(100.0)


@pytest.mark.parametrize(("time_s", "kept"), [(1.0, 0), (0.1, 80)])
def test_iterations_in_which_a_counter_stands_still_are_left_out_unless_shorter_than_its_refreshes(time_s, kept):
    found = IterationSample(PERIOD_S)
    for _ in range(80):
        found.add_reports(told_of({"time_s": time_s, "energy_j": 100.0}, {"time_s": time_s, "energy_j": 0.0}))
    assert len(found.times_s) == kept


def test_without_any_energy_nothing_is_compared():
    stands_still = sample(energy_j=0.0, iterations=99)
    assert stands_still.looks == 0
    assert not stands_still.is_enough


@given(st.floats(0.8, 1.3), st.floats(0.5, 1.5), st.floats(0.0, 0.3))
def test_a_plan_wins_if_and_only_if_it_saves_energy_for_sure_and_is_as_fast_as_promised(time, energy, promised):
    comparison = Comparison.of(sample(), sample(time, 100 * energy), promised)
    if comparison.wins:
        assert energy < 1
        assert time - 1 <= promised + 0.02
    elif energy < 0.95:
        assert time - 1 > promised


def noisy(seed, time_noise, power_noise, saving=0.0):
    """Iterations whose times and powers vary, looked at as a job does; returns whether the plan wins."""
    draw = random.Random(seed)

    def iteration(energy_j):
        time_s = 1 + time_noise * draw.gauss(0, 1)
        return time_s, energy_j * time_s * (1 + power_noise * draw.gauss(0, 1))

    default, planned, looks = IterationSample(PERIOD_S), IterationSample(PERIOD_S), 0
    while not default.is_enough:
        default.add(*iteration(100.0))
    while True:
        planned.add(*iteration(100.0 * (1 - saving)))
        if planned.looks > looks:
            looks = planned.looks
            comparison = Comparison.of(default, planned, 0.0)
            if comparison.is_sure or comparison.is_late or planned.is_longest:
                return comparison.wins


@pytest.mark.parametrize("noise", [(0.005, 0.01), (0.01, 0.02), (0.02, 0.02)])
def test_noise_alone_is_hardly_ever_called_a_saving_and_a_true_one_nearly_always(noise):
    by_chance = sum(noisy(seed, *noise) for seed in range(200))
    found = sum(noisy(seed, *noise, saving=0.08) for seed in range(200))
    assert by_chance <= 12
    assert found >= 180


def test_one_default_iteration_that_is_held_up_loses_no_plan():
    default = sample(noise=0.005)
    default.add(5.0, 500.0)
    assert Comparison.of(default, sample(energy_j=75.0, noise=0.005, seed=3), 0.0).wins


def test_iterations_of_failed_ranks_or_unknown_energy_are_left_out():
    default = sample()
    for report in ({"energy_j": math.nan}, {"failed": True}):
        default.add_reports(told_of({}, report))
    assert len(default.times_s) == 12
    default.add_reports(told_of({}, {}))
    assert len(default.times_s) == 13


def test_a_power_cap_keeps_a_plan_that_is_late_and_draws_less():
    late = Comparison.of(sample(), sample(1.3, 95.0), 0.1)
    assert not is_kept(late, caps_power=False)
    assert is_kept(late, caps_power=True)
    more = Comparison.of(sample(), sample(1.0, 110.0), 0.0)
    assert not is_kept(more, caps_power=True)


def test_under_a_power_cap_a_plan_is_in_doubt_when_it_draws_more_not_when_it_is_late():
    late = Comparison.of(sample(), sample(1.3, 95.0), 0.1)
    assert (is_in_doubt(late, caps_power=False), is_in_doubt(late, caps_power=True)) == (True, False)
    more = Comparison.of(sample(), sample(1.0, 110.0), 0.0)
    assert is_in_doubt(more, caps_power=True)
    faster = Comparison.of(sample(), sample(0.9, 80.0), 0.0)
    assert (is_in_doubt(faster, caps_power=False), is_in_doubt(faster, caps_power=True)) == (True, True)


def test_errors_say_how_well_a_result_is_known():
    exact, noisy = sample(), sample(noise=0.05)
    assert exact.time_error == 0
    assert exact.energy_error == pytest.approx(0.408 * PERIOD_S / 12, rel=0.01)
    assert noisy.time_error > 0.01


def test_the_verdict_names_measured_and_promised_figures():
    text = str(Comparison.of(sample(), sample(1.02, 90.0), 0.02))
    assert text.startswith("-10.0% energy (+/- ")
    assert "at +2.0% time" in text
    assert "promised +2.0%" in text
