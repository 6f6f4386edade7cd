"""Detection of stalled ranks, for which the clock of the GPU is reset."""

from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.agent.rank import Progress
from perseus_ds.protocol import layout
from perseus_ds.protocol.layout import RankMemory


class Rank:
    """A rank that an agent checks every 0.1 s.

    Attributes:
        may_be_locked: Whether its clock may be locked.
        resets: Times at which its clock was reset [s].
    """

    def __init__(self):
        self.memory = RankMemory.create(memoryview(bytearray(layout.LENGTH)))
        self.may_be_locked = True
        self.progress = Progress()
        self.now_s = 100.0
        self.resets = []

    def wait(self, seconds):
        for _ in range(round(10 * seconds)):
            self.now_s += 0.1
            if self.progress.is_standing_still(self.memory, self.now_s, may_be_locked=self.may_be_locked):
                self.resets.append(self.now_s)
                self.may_be_locked = False

    def train(self, iterations, seconds):
        self.may_be_locked = True
        for _ in range(iterations):
            self.memory.begin_iteration()
            self.wait(seconds)
            self.memory.end_iteration()
            self.wait(0.1)


def test_outside_of_iterations_a_clock_stays_for_two_seconds_and_is_reset_once():
    rank = Rank()
    rank.train(3, 0.5)
    ended_s = rank.now_s
    rank.wait(60)
    (reset_s,) = rank.resets
    assert 1.9 < reset_s - ended_s < 2.3
    rank.train(1, 0.5)
    rank.wait(60)
    assert len(rank.resets) == 2


@given(st.floats(0.1, 20.0))
def test_within_an_iteration_a_clock_stays_three_times_as_long_as_iterations_take(seconds):
    """A stage of a long pipeline may wait for seconds."""
    rank = Rank()
    rank.train(3, seconds)
    rank.memory.begin_iteration()
    begun_s = rank.now_s
    rank.wait(3 * seconds + 10)
    (reset_s,) = rank.resets
    assert max(2.0, 3 * seconds) - 0.5 < reset_s - begun_s < max(2.0, 3 * seconds) + 1.0


def test_short_iterations_are_known_although_each_look_comes_after_several_and_the_start_takes_long():
    rank = Rank()
    rank.may_be_locked = False
    rank.wait(30)
    rank.may_be_locked = True
    for _ in range(3):
        for _ in range(4):
            rank.memory.begin_iteration()
            rank.memory.end_iteration()
        rank.wait(0.1)
    rank.memory.begin_iteration()
    rank.wait(5)
    assert len(rank.resets) == 1


def test_the_first_iteration_may_take_a_minute():
    """The first iteration may include compilation."""
    rank = Rank()
    rank.memory.begin_iteration()
    rank.wait(59)
    assert rank.resets == []
    rank.wait(3)
    assert len(rank.resets) == 1


def test_only_a_locked_clock_is_reset_and_again_if_it_is_locked_again():
    rank = Rank()
    rank.train(3, 0.5)
    for resets in (1, 2):
        rank.may_be_locked = False
        rank.wait(60)
        rank.may_be_locked = True
        rank.wait(60)
        assert len(rank.resets) == resets
