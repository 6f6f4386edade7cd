"""A profile that is converted for another schedule keeps the model's time and energy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import dual_pipe_v, one_f_one_b, synthetic_profile

from perseus_ds.artifacts.profile import TransferDuration
from perseus_ds.errors import ProfileError
from perseus_ds.layouts.schedule_comparison import held_by_rank, held_by_stage, recut
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Schedule

SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def split_schedule(stages: int) -> Schedule:
    """Return a schedule of one micro-batch with one stage per rank, split backwards and no transfers."""
    streams = [tuple(Compute(Instruction(stage, kind, 0)) for kind in SPLIT) for stage in range(stages)]
    return Schedule("split", 1, tuple(streams))


def totals(profile, clock_mhz):
    rows = [row for row in profile.measurements if row.clock_mhz == clock_mhz]
    return sum(row.time_s for row in rows), sum(row.energy_j for row in rows)


@given(st.sampled_from([1, 2, 4, 8]), st.floats(0.05, 0.95))
def test_time_and_energy_of_the_model_are_the_same_for_any_number_of_stages(stages, weight_share):
    profile = synthetic_profile(4)
    result, assumptions = recut(profile, split_schedule(stages), weight_share=weight_share)
    assert any(f"{weight_share:.0%}" in sentence for sentence in assumptions)
    assert result.num_stages == stages
    for clock_mhz in (900, 1410):
        assert totals(result, clock_mhz) == pytest.approx(totals(profile, clock_mhz))
        weights_s = sum(result.at(stage, Kind.BACKWARD_WEIGHT, clock_mhz).time_s for stage in range(stages))
        whole_s = sum(profile.at(stage, Kind.BACKWARD, clock_mhz).time_s for stage in range(4))
        assert weights_s == pytest.approx(weight_share * whole_s)


@pytest.mark.parametrize(
    ("kinds", "schedule"), [((Kind.FORWARD, Kind.BACKWARD), one_f_one_b(3, 4)), (SPLIT, split_schedule(3))]
)
def test_a_fitting_profile_is_unchanged_without_assumptions(kinds, schedule):
    profile = synthetic_profile(3, kinds=kinds)
    result, assumptions = recut(profile, schedule, weight_share=0.3)
    assert result.measurements == profile.measurements
    assert assumptions == []


@pytest.mark.parametrize(
    ("parts", "assumed"),
    [
        ((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), []),
        (
            (Kind.RECOMPUTE, Kind.BACKWARD),
            ["recomputation, measured as a separate instruction, is part of the backward"],
        ),
    ],
)
def test_parts_of_a_backward_that_were_measured_are_added(parts, assumed):
    profile = synthetic_profile(2, kinds=(Kind.FORWARD, *parts))
    result, assumptions = recut(profile, one_f_one_b(2, 4), weight_share=0.3)
    measured_s = sum(profile.at(0, kind, 900).time_s for kind in parts)
    assert result.at(0, Kind.BACKWARD, 900).time_s == pytest.approx(measured_s)
    assert assumptions == assumed


def test_the_tail_of_a_rank_is_that_of_all_its_stages():
    profile = synthetic_profile(2, tail_s={0: 0.2, 1: 0.4})
    result, _ = recut(profile, dual_pipe_v(2, 4), weight_share=0.5)
    # Each rank has a half of both measured stages: stages 0 and 3, or stages 1 and 2.
    assert list(result.info.tail_s.values()) == pytest.approx([0.3, 0.3])
    result, _ = recut(synthetic_profile(1, tail_s={0: 0.2}), dual_pipe_v(2, 4), weight_share=0.5)
    assert list(result.info.tail_s.values()) == pytest.approx([0.1, 0.1])


def test_transfers_within_a_measured_stage_take_the_mean_of_those_between_stages():
    transfers = [
        TransferDuration(payload="activation", source=0, target=1, time_s=0.01),
        TransferDuration(payload="activation", source=1, target=2, time_s=0.03),
    ]
    profile = synthetic_profile(3, transfers=transfers)
    result, assumptions = recut(profile, one_f_one_b(6, 2), weight_share=0.5)
    found = {(t.source, t.target): t.time_s for t in result.info.transfers if t.payload == "activation"}
    assert found == pytest.approx({(0, 1): 0.02, (1, 2): 0.01, (2, 3): 0.02, (3, 4): 0.03, (4, 5): 0.02})
    assert any("mean" in sentence for sentence in assumptions)


def test_a_number_of_stages_that_is_not_a_multiple_is_an_error():
    with pytest.raises(ProfileError, match=r"has 3 stages, the profile 2: expected a multiple or a divisor.*ranks"):
        recut(synthetic_profile(2), one_f_one_b(3, 4), weight_share=0.5)


def test_micro_batches_are_held_until_the_gradients_of_the_weights_are_there():
    assert held_by_stage(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert held_by_rank(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert held_by_rank(dual_pipe_v(2, 6)) == [2.5, 2.5]
    kinds = [Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT, Kind.FORWARD]
    stream = [Compute(Instruction(0, kind, number)) for number, kind in enumerate(kinds)]
    assert held_by_stage(Schedule("late", 3, (tuple(stream),))) == [3]
