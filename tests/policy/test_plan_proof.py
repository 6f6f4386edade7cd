"""When a plan has proved itself against iterations at default clocks, and when it has not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.policy.plan_proof import Comparison, IterationSample

PERIOD_S = 0.1


def sample(time_s=1.0, energy_j=100.0, iterations=12, noise=0.0, seed=0):
    draw = random.Random(seed)
    result = IterationSample(PERIOD_S)
    for _ in range(iterations):
        result.add(time_s * (1 + noise * draw.gauss(0, 1)), energy_j)
    return result


def test_a_sample_is_enough_after_sixty_refreshes_and_eight_iterations():
    assert not sample(time_s=0.9, iterations=7).is_enough
    assert sample(time_s=0.9, iterations=8).is_enough
    assert not sample(time_s=0.1, iterations=59).is_enough
    assert sample(time_s=0.1, iterations=61).is_enough
    assert not sample(time_s=0.9, iterations=31).is_most
    assert sample(time_s=0.9, iterations=32).is_most


def test_one_iteration_that_is_held_up_changes_no_typical_one():
    held_up = sample()
    held_up.add(60.0, 6000.0)
    assert held_up.time_s == pytest.approx(1.0)
    assert held_up.energy_j == pytest.approx(100.0)


@given(st.floats(0.8, 1.3), st.floats(0.5, 1.5), st.floats(0.0, 0.3))
def test_a_plan_wins_if_and_only_if_it_saves_energy_for_sure_and_is_as_fast_as_promised(time, energy, promised):
    comparison = Comparison.of(sample(), sample(time, 100 * energy), promised)
    if comparison.wins:
        assert energy < 1
        assert time - 1 <= promised + 0.02
    elif energy < 0.95:
        assert time - 1 > promised


@given(st.integers(0, 10_000))
def test_noise_alone_is_hardly_ever_called_a_saving(seed):
    noisy = Comparison.of(sample(noise=0.02, seed=seed), sample(noise=0.02, seed=seed + 1), 0.0)
    assert not noisy.wins or noisy.saved < 0.05


def test_errors_say_how_well_a_result_is_known():
    exact, noisy = sample(), sample(noise=0.05)
    assert exact.time_error == 0
    assert exact.energy_error == pytest.approx(0.408 * PERIOD_S / 12, rel=0.01)
    assert noisy.time_error > 0.01


def test_energy_that_cannot_be_read_never_wins():
    assert not Comparison.of(sample(), sample(energy_j=float("nan")), 0.0).wins


def test_the_verdict_names_measured_and_promised_figures():
    text = str(Comparison.of(sample(), sample(1.02, 90.0), 0.02))
    assert text.startswith("-10.0% energy (± ")
    assert "at +2.0% time" in text
    assert "promised +2.0%" in text
