"""Durations of loads, transfers and the tail without waiting, from adjacent passes."""

import pytest

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Schedule, Span, Transfer, Wait
from perseus_ds.profiler.fixed_durations import (
    fixed_durations,
    launched_transfer_durations_s,
    medians,
    pass_variation,
    passes_of,
    tails_s,
    without_gaps,
)

ACTIVATION = Transfer("activation", 0, 1, 0)


def tail(stage, *times):
    return [Span(Compute(Instruction(stage, Kind.TAIL, 0)), begin, end) for begin, end in times]


def test_durations_are_medians_and_those_of_transfers_the_shorter_of_their_two_sides():
    sender = [
        Span(Exchange(sends=(ACTIVATION,)), 1.0, 1.1),
        *(Span(Load(0, m), m, m + t) for m, t in enumerate((0.1, 0.2, 0.9))),
    ]
    receiver = [Span(Exchange(receives=(ACTIVATION,)), 0.2, 1.1)]
    found = fixed_durations([[sender], [receiver]])
    assert found.transfer_s == {("activation", 0, 1): pytest.approx(0.1)}
    assert found.load_s == {0: pytest.approx(0.2)}


def test_the_tail_of_a_stage_is_the_sum_of_its_parts():
    iterations = [tail(0, (5.0, 5.1), (5.1, 5.3)), tail(0, (7.0, 7.2), (7.2, 7.6)), tail(0, (9.0, 9.2), (9.2, 9.3))]
    assert medians(tail for spans in iterations for tail in tails_s(spans).items()) == pytest.approx({0: 0.3})


def test_gaps_are_added_to_loads_transfers_and_tails_except_the_gap_before_the_tail():
    forward = Compute(Instruction(0, Kind.FORWARD, 0))
    spans = [Span(Load(0, 0), 0.1, 0.2), Span(forward, 0.3, 1.0), *tail(0, (1.1, 1.2), (1.25, 1.3))]
    closed = without_gaps(spans, 1.5)
    assert [(s.start_s, s.end_s) for s in closed] == [(0.0, 0.3), (0.3, 1.0), (1.1, 1.25), (1.25, 1.5)]


def forward(stage, micro_batch):
    return Compute(Instruction(stage, Kind.FORWARD, micro_batch))


def test_passes_vary_by_their_deviation_within_iterations_whatever_lengthens_all_of_one():
    def iteration(factor, *times_s):
        return [Span(forward(0, number), number, number + factor * time_s) for number, time_s in enumerate(times_s)]

    iterations = [iteration(factor, 0.09, 0.10, 0.11) + tail(0, (5.0, 5.0 + factor)) for factor in (1.0, 1.5, 3.0)]
    assert pass_variation([iterations, iterations]) == pytest.approx(0.1)
    assert pass_variation([[iteration(1.0, 0.1, 0.2)]]) is None, "no three of them are equal"


FIRST, SECOND = Transfer("activation", 0, 1, 0), Transfer("activation", 0, 1, 1)
SCHEDULE = Schedule(
    "test:Launched",
    2,
    (
        (forward(0, 0), Launch(sends=(FIRST,)), forward(0, 1), Launch(sends=(SECOND,)), Wait((FIRST, SECOND))),
        (Exchange(receives=(FIRST,)), forward(1, 0), Launch(receives=(SECOND,)), Wait((SECOND,)), forward(1, 1)),
    ),
)


def seconds_of(schedule, receiver):
    """Return the transfer duration if rank 0 computes from 0 to 1 and from 1 to 2."""
    sender = [Span(forward(0, 0), 0.0, 1.0), Span(forward(0, 1), 1.0, 2.0)]
    passes = passes_of([(sender, 100.0), ([Span(forward(1, m), *times) for m, times in enumerate(receiver)], 99.5)])
    found = launched_transfer_durations_s(schedule, [passes])
    assert list(found) == [("activation", 0, 1)]
    return found["activation", 0, 1]


def test_a_transfer_lasts_from_the_pass_that_made_it_to_the_one_that_waited_for_it():
    # Rank 1 begins its iteration half a second earlier than rank 0.
    assert seconds_of(SCHEDULE, [(1.8, 1.9), (2.6, 3.0)]) == pytest.approx((0.3 + 0.1) / 2)
    # The second transfer went on while its receiver computed, and does not count.
    assert seconds_of(SCHEDULE, [(1.8, 4.0), (4.0, 5.0)]) == pytest.approx(0.3)
