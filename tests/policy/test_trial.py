"""The trial of plans: blocks, pairs of them, and the verdicts that they lead to."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_ds.policy.trial import Block, BlockIteration, Pair, Trial, Verdict, compare
from perseus_ds.savings import DefaultClocks

PERIOD_S = 0.1
GPUS = 2


@pytest.fixture
def default():
    """What default clocks take for two orders: 1 s and 100 J, and half of that."""
    found = DefaultClocks()
    found.predict(0, 1.0, 100.0)
    found.predict(1, 0.5, 50.0)
    return found


def block_of(default, times_s, energy_j=100.0, order=0, limits=frozenset(), **promised):
    block = Block(default, is_planned=bool(promised), counter_period_s=PERIOD_S)
    for time_s in times_s:
        energies_j = np.full(GPUS, energy_j / GPUS) if np.isscalar(energy_j) else np.array(energy_j)
        block.add(BlockIteration(order, time_s, energies_j, **promised), limits)
    return block


def pair_of(late=0.0, energy=-0.1, promised=0.0):
    return Pair(slowdown=late + promised, promised=promised, energy=energy)


def trial_of(pairs):
    trial = Trial()
    for pair in pairs:
        verdict = trial.add(pair)
        if verdict.is_dropped:
            break
    return trial, verdict


# Blocks.


def test_a_block_ends_when_its_time_is_certain_and_the_counter_was_refreshed_often_enough(default):
    assert not block_of(default, [1.0] * 3).is_complete
    assert block_of(default, [1.0] * 4).is_complete
    assert not block_of(default, [0.1] * 19).is_complete, "the counter was refreshed 19 times"
    assert block_of(default, [0.1] * 20).is_complete
    noisy = [1.0 + 0.05 * (-1) ** number for number in range(16)]
    assert not block_of(default, noisy[:15]).is_complete
    assert block_of(default, noisy).is_complete, "noise is averaged over pairs"


def test_iterations_with_a_stall_are_left_out_of_a_block(default):
    block = block_of(default, [1.0, 1.0, 60.0, 1.0])
    assert not block.is_complete
    block.add(BlockIteration(0, 1.0, np.full(GPUS, 50.0)))
    assert block.is_complete
    assert block.level.time == pytest.approx(0.0)


def test_a_block_has_no_iterations_in_which_the_counter_includes_the_power_before(default):
    block = Block(default, is_planned=True, counter_period_s=PERIOD_S, counter_settle_s=1.0)
    block.pass_over(5.0)  # its clocks change in it
    block.pass_over(0.5, is_at_its_clocks=True)
    for _ in range(2):
        block.add(BlockIteration(0, 0.4, np.full(GPUS, 50.0)))
    assert block.iterations == []
    block.add(BlockIteration(0, 0.4, np.full(GPUS, 50.0)))
    assert len(block.iterations) == 1


def test_a_block_that_cannot_be_completed_is_given_up(default):
    block = block_of(default, [1.0] * 3)
    for _ in range(61):
        assert not block.is_given_up
        block.pass_over(1.0)
    assert block.is_given_up


def test_orders_of_different_length_are_compared_relative_to_their_own_default_clocks(default):
    block = block_of(default, [1.02] * 2, energy_j=90.0)
    for _ in range(2):
        block.add(BlockIteration(1, 0.51, np.full(GPUS, 22.5)))
    level = block.level
    assert level.time == pytest.approx(math.log(1.02))
    assert level.energies.sum() == pytest.approx(0.9)


# Pairs.


def test_a_steady_drift_cancels_in_a_pair(default):
    before, planned, after = (block_of(default, [1.0 + drift] * 4) for drift in (0.0, 0.03, 0.06))
    pair = compare([(before, planned), (after, planned)])
    assert pair.slowdown == pytest.approx(0.0, abs=0.001)


def test_blocks_under_different_limits_of_gpus_are_not_compared(default):
    limited, free = (block_of(default, [1.0] * 4, limits=limits) for limits in (frozenset({(0, 300.0)}), frozenset()))
    planned = block_of(default, [1.1] * 4)
    assert compare([(limited, planned), (limited, planned)]) is None
    assert compare([(None, planned), (free, None)]) is None
    assert compare([(limited, planned), (free, planned)]).slowdown == pytest.approx(math.log(1.1))


@pytest.mark.parametrize("broken", [math.nan, 0.0], ids=["fails", "stands still"])
def test_a_gpu_whose_counter_fails_is_left_out_of_the_comparison_of_energy(default, broken):
    before = block_of(default, [1.0] * 4, [60.0, 40.0])
    planned = block_of(default, [1.0] * 4, [54.0, broken])
    assert compare([(before, planned)]).energy == pytest.approx(math.log(0.9))
    none = block_of(default, [1.0] * 4, [broken, broken])
    assert compare([(before, none)]).energy is None


def test_lateness_is_relative_to_what_plans_promise(default):
    before, planned = block_of(default, [1.0] * 4), block_of(default, [1.03] * 4, promised_slowdown=0.02)
    assert compare([(before, planned)]).late == pytest.approx(math.log(1.03 / 1.02))


# Verdicts.


@pytest.mark.parametrize(
    ("pair", "verdict", "pairs"),
    [
        (pair_of(), Verdict.GOOD, 3),
        (pair_of(late=0.02), Verdict.LATE, 3),
        (pair_of(energy=0.01), Verdict.COSTS_ENERGY, 3),
        (pair_of(energy=None), Verdict.GOOD, 3),
        (pair_of(promised=0.05), Verdict.GOOD, 3),
    ],
)
def test_without_noise_three_pairs_decide(pair, verdict, pairs):
    trial = Trial()
    assert [trial.add(pair) for _ in range(pairs)] == [Verdict.UNKNOWN] * (pairs - 1) + [verdict]


def noisy_pairs(seed, deviation, late=0.0, energy=-0.1, number=60):
    draw = random.Random(seed)
    return [pair_of(late + draw.gauss(0, deviation), energy + draw.gauss(0, deviation)) for _ in range(number)]


@pytest.mark.parametrize("deviation", [0.002, 0.01])
def test_a_saver_is_kept_and_plans_that_are_late_or_useless_are_dropped(deviation):
    def dropped(pairs, **effect):
        jobs = [trial_of(noisy_pairs(seed, deviation, number=pairs, **effect))[1].is_dropped for seed in range(60)]
        return statistics.fmean(jobs)

    assert dropped(60, energy=-0.03) <= 0.01
    assert dropped(24, late=0.02) >= 0.95
    assert dropped(24, energy=0.01) >= 0.95
    assert dropped(24, energy=0.0) >= 0.95


@pytest.mark.parametrize(("late", "verdict"), [(0.011, Verdict.GOOD), (0.014, Verdict.LATE)])
def test_plans_of_which_it_is_not_known_whether_they_are_late_are_kept_unless_it_is_probable(late, verdict):
    pairs = [pair_of(late=late + 0.009 * (-1) ** number) for number in range(24)]
    trial, found = trial_of(pairs)
    assert len(trial.pairs) == 24, "it was not certain before"
    assert found is verdict


def test_pairs_become_rarer_while_plans_are_good_and_frequent_again_after_one_that_is_late():
    trial = Trial()
    blocks = []
    for _ in range(10):
        trial.add(pair_of())
        blocks.append(trial.blocks)
    assert blocks == [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert not trial.add(pair_of(late=0.05)).is_dropped, "one pair may be disturbed"
    assert trial.blocks == 1


def test_plans_that_were_good_for_long_are_dropped_soon_after_they_become_late():
    trial = Trial()
    for _ in range(24):
        trial.add(pair_of())
    verdicts = [trial.add(pair_of(late=0.05)) for _ in range(12)]
    assert Verdict.LATE in verdicts
    assert verdicts.index(Verdict.LATE) < 6


def test_plans_that_were_early_for_long_and_become_late_are_late_by_what_the_latest_pairs_show():
    trial = Trial(pairs=[pair_of(late=-0.05)] * 18 + [pair_of(late=0.02)] * 6)
    assert trial.verdict() is Verdict.LATE
    assert trial.lateness == pytest.approx(math.expm1(0.02))


def test_pairs_that_cannot_be_compared_change_no_verdict_and_become_rarer():
    trial = Trial()
    for _ in range(3):
        trial.add(pair_of())
    assert [trial.add(None) for _ in range(8)] == [Verdict.GOOD] * 8
    assert trial.blocks == 64
    assert len(trial.pairs) == 3


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-0.2, 0.2), st.floats(-0.5, 0.5) | st.none()) | st.none(), max_size=40))
def test_a_trial_continues_from_what_was_saved_of_it(outcomes):
    trial = Trial()
    for outcome in outcomes:
        trial.add(None if outcome is None else pair_of(*outcome))
    restored = Trial.model_validate_json(trial.model_dump_json())
    assert restored == trial
    assert restored.add(pair_of()) is trial.add(pair_of())
    assert restored == trial


def test_the_stated_errors_contain_the_truth():
    within = []
    for seed in range(150):
        trial = Trial()
        for pair in noisy_pairs(seed, 0.004):
            if trial.add(pair) is not Verdict.UNKNOWN:
                break
        figures = trial.figures
        within.append(abs(figures.saved - (1 - math.exp(-0.1))) <= figures.saved_error)
        within.append(abs(figures.slowdown) <= figures.slowdown_error)
    assert statistics.fmean(within) >= 0.95
