"""Whose end leaves which GPUs to nobody, and for how long a guardian is needed."""

import socket

import pytest

from perseus_ds.device.guarded_ranks import GuardedRanks, Registration


class SetTime:
    def __init__(self):
        self.seconds = 0.0

    def now_s(self):
        return self.seconds


@pytest.fixture
def now():
    return SetTime()


@pytest.fixture
def ranks(now):
    return GuardedRanks(now)


@pytest.fixture
def connections():
    made = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    yield made
    for connection in made:
        connection.close()


def test_a_gpu_is_to_be_reset_when_the_last_of_its_ranks_ends(ranks, connections):
    one, two, three = connections
    with (
        ranks.living(one, Registration("1", ("a", "b"))),
        ranks.living(two, Registration("2", ("b",))),
        ranks.living(three, Registration("3", ("c",))),
    ):
        assert ranks.end(one) == ["a"]
        assert ranks.end(two) == ["b"]
        assert ranks.are_living
        assert ranks.end(three) == ["c"]
        assert not ranks.are_living


def test_a_rank_has_ended_when_the_first_of_its_connections_ends(ranks, connections):
    """It may have given up one in order to register again; the clock is reset once too often then, never too rarely."""
    one, two, _ = connections
    rank = Registration("1", ("a",))
    with ranks.living(one, rank), ranks.living(two, rank):
        assert ranks.end(one) == ["a"]
        assert ranks.end(two) == ["a"]


def test_a_rank_is_left_until_all_is_done_for_it_or_the_driver_hangs(ranks, connections, now):
    one, two, _ = connections
    assert not ranks.had_any
    with ranks.living(one, Registration("1", ("a",))):
        now.seconds = 100.0
        assert ranks.had_any
        assert ranks.are_left
        ranks.end(one)
        now.seconds = 109.9
        assert ranks.are_left
        now.seconds = 110.1
        assert not ranks.are_left, "a driver that hangs must not keep the guardian"
        with ranks.living(two, Registration("2", ("b",))):
            assert ranks.are_left
            ranks.end(two)
            assert ranks.are_left
        assert not ranks.are_left


def test_copies_are_of_living_ranks(ranks, connections):
    one, two, _ = connections
    first, second = Registration("1", ("a",)), Registration("2", ("b",))
    with ranks.living(one, first), ranks.living(two, second):
        ranks.end(one)
        ((registration, copy),) = ranks.copies()
        with copy:
            assert registration == second
            assert copy.fileno() not in (one.fileno(), two.fileno())
