"""The state of a rank is one value, which changes by a table of transitions."""

import socket

import pytest

from perseus_ds.agent.rank import TRANSITIONS, Rank, RankEvent, State


@pytest.fixture
def rank():
    ours, theirs = socket.socketpair()
    yield Rank(ours, 1)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], State.JOINED),
        ([RankEvent.GRANTED], State.RUNNING),
        ([RankEvent.REFUSED], State.GONE),
        ([RankEvent.ENDED], State.LEAVING),
        ([RankEvent.GRANTED, RankEvent.STALLED], State.STANDING_STILL),
        ([RankEvent.GRANTED, RankEvent.TERMINATED], State.LEAVING),
        ([RankEvent.GRANTED, RankEvent.ENDED], State.LEAVING),
        ([RankEvent.GRANTED, RankEvent.STALLED, RankEvent.CONTINUED], State.RUNNING),
        ([RankEvent.GRANTED, RankEvent.STALLED, RankEvent.TERMINATED], State.LEAVING),
        ([RankEvent.GRANTED, RankEvent.STALLED, RankEvent.ENDED], State.LEAVING),
        ([RankEvent.GRANTED, RankEvent.ENDED, RankEvent.RESET], State.GONE),
    ],
)
def test_each_transition_leads_to_its_state(rank, events, state):
    assert all(rank.on(event) for event in events)
    assert rank.state is state


def test_every_transition_of_the_table_is_tested_above():
    marks = {mark.name: mark for mark in test_each_transition_leads_to_its_state.pytestmark}
    cases = marks["parametrize"].args[1]
    assert len(TRANSITIONS) == sum(bool(events) for events, _ in cases)


@pytest.mark.parametrize(("before", "event"), [(b, e) for b in State for e in RankEvent if (b, e) not in TRANSITIONS])
def test_other_events_change_nothing(rank, before, event):
    """For example, a rank that leaves does not run again, whatever its agent or its process do."""
    rank.state = before
    assert not rank.on(event)
    assert rank.state is before


@pytest.mark.parametrize("state", State)
def test_clocks_are_set_only_for_ranks_with_a_lease_that_do_not_leave(rank, state):
    rank.state = state
    assert rank.sets_clocks == (state in (State.RUNNING, State.STANDING_STILL))
