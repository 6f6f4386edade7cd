"""The program of a rank under a plan: clocks by position and predicted times of instructions."""

from types import SimpleNamespace

import pytest
from pipelines import one_f_one_b

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.decisions import Assignment
from perseus_ds.server.iterations import Plans, Run

TIMES_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}
SCHEDULE = one_f_one_b(ranks=2, micro_batches=1)
STREAMS = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in SCHEDULE.instructions)


def program(rank, clocks_mhz, times_s):
    plan = FrequencyPlan(STREAMS, clocks_mhz, 0.7, 1.0)
    frontier = SimpleNamespace(instruction_times_s=times_s, plans=(plan,))
    plans = Plans(frontier, Assignment(plans=(0,)), Dag.build(SCHEDULE))
    return Run("run", plans=plans).program(5, 0, rank, SCHEDULE)


def times_at(*clocks_mhz):
    return {(stage, kind, clock): s for stage in (0, 1) for clock in clocks_mhz for kind, s in TIMES_S.items()}


def test_instructions_begin_when_the_ranks_before_have_sent_their_input():
    found = program(0, ((1110, 1200), (1410, 1410)), times_at(1110, 1200, 1410))
    assert found.spans_s[:2] == ((0.0, 0.1), pytest.approx((0.4, 0.6)))
    assert found.time_s == 0.7


def test_a_tail_without_a_choice_of_clock_has_the_one_that_the_next_iteration_starts_with():
    """So that the clock changes during the tail."""
    found = program(0, ((1110, 1200), (1410, 1410)), times_at(1110, 1200, 1410))
    assert (found.number, found.first_mhz, found.clocks_mhz) == (5, 1110, (1110, 1200, 1110))


def test_a_rank_with_one_clock_has_nothing_to_mark():
    found = program(1, ((1110, 1200), (1410, 1410)), times_at(1110, 1200, 1410))
    assert (found.first_mhz, found.clocks_mhz, found.spans_s) == (1410, (), ())


def test_where_a_time_is_unknown_no_begins_are_expected():
    assert program(0, ((1110, 1200), (1410, 1410)), times_at(1110, 1410)).spans_s == ()
