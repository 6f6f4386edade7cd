"""Transfers that are launched and waited for later are measured by the passes around them."""

import pytest

from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Schedule, Transfer, Wait
from perseus_ds.profiler.launched_transfers import launched_transfer_durations, launches_transfers, passes_of


def forward(stage, micro_batch):
    return Compute(Instruction(stage, Kind.FORWARD, micro_batch))


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
    """The duration found, where rank 0 computes from 0 to 1 and from 1 to 2."""
    sender = [Span(forward(0, 0), 0.0, 1.0), Span(forward(0, 1), 1.0, 2.0)]
    passes = passes_of([(sender, 100.0), ([Span(forward(1, m), *times) for m, times in enumerate(receiver)], 99.5)])
    (found,) = launched_transfer_durations(schedule, [passes])
    assert (found.payload, found.source, found.target) == ("activation", 0, 1)
    return found.time_s


def test_a_transfer_lasts_from_the_pass_that_made_it_to_the_one_that_waited_for_it():
    # Rank 1 begins its iteration half a second earlier than rank 0.
    assert seconds_of(SCHEDULE, [(1.8, 1.9), (2.6, 3.0)]) == pytest.approx((0.3 + 0.1) / 2)


def test_a_transfer_that_went_on_while_its_receiver_computed_does_not_count_beside_one_that_was_waited_for():
    assert seconds_of(SCHEDULE, [(1.8, 4.0), (4.0, 5.0)]) == pytest.approx(0.3)


def test_schedules_whose_ranks_wait_for_every_transfer_launch_none():
    assert launches_transfers(SCHEDULE)
    assert not launches_transfers(Schedule("test:Blocking", 1, ((forward(0, 0), Exchange(sends=(FIRST,))),)))
