import pytest
from pipelines import one_f_one_b

from perseus_ds.artifacts.plan import FrequencyPlan, check_instructions
from perseus_ds.errors import PlanError
from perseus_ds.pipeline.instruction import Instruction, Kind


def test_a_plan_fits_the_schedule_it_was_made_for():
    instructions = one_f_one_b(3, 4).instructions
    check_instructions(instructions, instructions)


def test_a_plan_without_tails_fits_too():
    instructions = one_f_one_b(3, 4).instructions
    check_instructions([[i for i in stream if i.kind is not Kind.TAIL] for stream in instructions], instructions)


def test_a_misfit_names_rank_instruction_and_remedy():
    planned, expected = one_f_one_b(4, 8).instructions, one_f_one_b(4, 16).instructions
    with pytest.raises(PlanError) as error:
        check_instructions(planned, expected)
    assert str(error.value) == (
        "Plan does not fit this schedule: rank 0, instruction 13: expected forward of micro-batch 8 on stage 0, "
        'the plan has backward of micro-batch 5 on stage 0. Run "perseus-ds optimize" again for '
        "4 ranks and 16 micro-batches."
    )


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(PlanError, match="it is for 2 ranks, the schedule has 3"):
        check_instructions(one_f_one_b(2, 4).instructions, one_f_one_b(3, 4).instructions)


def test_a_plan_that_is_too_long_is_refused():
    long, short = one_f_one_b(1, 2).instructions, one_f_one_b(1, 1).instructions
    with pytest.raises(PlanError, match="rank 0, instruction 2: expected tail of stage 0, the plan has forward"):
        check_instructions(long, short)


def test_clock_changes_count_from_the_end_of_one_iteration_to_the_start_of_the_next():
    stream = tuple(Instruction(0, Kind.FORWARD, m) for m in range(4))
    assert FrequencyPlan((stream,), ((900, 900, 900, 900),), 1.0, 1.0).clock_changes == 0
    assert FrequencyPlan((stream,), ((900, 900, 1000, 1000),), 1.0, 1.0).clock_changes == 2
    assert FrequencyPlan((stream, ()), ((900, 1000, 900, 1000), ()), 1.0, 1.0).clock_changes == 4


def test_the_gap_is_a_fraction_of_the_bound():
    assert FrequencyPlan((), (), 1.0, 101.0, 100.0).gap == pytest.approx(0.01)
    assert FrequencyPlan((), (), 1.0, 101.0).gap is None
