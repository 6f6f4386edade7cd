"""The client marks only what the agent awaits, which is enough for the same clocks at the same times."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual.time import VirtualTime

from perseus_ds.agent.timeline import Timeline
from perseus_ds.protocol.job_messages import ClockStatus, Follow, LatencyTable, Program
from perseus_ds.protocol.layout import RankMemory

PASS_S = 0.01
CLOCKS_MHZ = st.lists(st.sampled_from([1410, 1200, 1110]), min_size=2, max_size=12).map(tuple)
LATENCIES = st.sampled_from([0.0, 0.002, 0.015, 0.034]).map(
    lambda s: LatencyTable({(mhz, rises): (s,) * 3 for mhz in (1410, 1200, 1110) for rises in (False, True)})
)


class Requests:
    """An actor that records the requests for clocks, and their times."""

    def __init__(self, time, latencies):
        self.made = []
        self.readback = SimpleNamespace(latencies=latencies)
        self._time = time

    def request(self, clock_mhz, owner):
        self.made.append((clock_mhz, round(self._time.now_s(), 6)))

    def call(self, function):
        return True

    def status(self):
        return ClockStatus()


class RankAndAgent:
    """A rank that marks passes of 10 ms, and the timeline of its agent, which looks every millisecond."""

    def __init__(self, latencies):
        self.time = VirtualTime()
        self.memory = RankMemory.create()
        self.actor = Requests(self.time, latencies)
        self.timeline = Timeline(self.memory, self.actor, lambda: None, self.time)

    def iterate(self, passes, slots):
        """Run an iteration that marks some slots, and return the requested clocks and their times after its begin."""
        first, begun_s = len(self.actor.made), self.time.now_s()
        number = self.memory.begin_iteration(0)
        self.memory.mark_begun(number, begun_s, passes)
        for slot in range(2 * passes):
            if slot in slots:
                self.memory.slots[slot] = self.time.now_s()
            for _ in range(round(1000 * PASS_S) if slot % 2 == 0 else 0):
                self.timeline.advance()
                self.time.sleep(0.001)
        self.memory.mark_ended(number, self.time.now_s())
        self.memory.end_iteration()
        self.timeline.advance()
        return [(clock_mhz, round(at_s - begun_s, 6)) for clock_mhz, at_s in self.actor.made[first:]]


def followed(clocks_mhz):
    spans_s = tuple((PASS_S * number, PASS_S * number + PASS_S) for number in range(len(clocks_mhz)))
    return Follow(Program(0, clocks_mhz[0], clocks_mhz, spans_s, PASS_S * len(clocks_mhz)), 1, 0, 0, "run")


@settings(deadline=None, max_examples=20)
@given(CLOCKS_MHZ, LATENCIES)
def test_the_same_clocks_are_requested_as_if_everything_were_marked(clocks_mhz, latencies):
    requested, passes = [], len(clocks_mhz)
    for marks_all in (True, False):
        rank = RankAndAgent(latencies)
        slots = rank.timeline.add(followed(clocks_mhz)).slots
        requested.append([rank.iterate(passes, range(2 * passes) if marks_all else slots) for _ in range(3)])
    assert requested[0] == requested[1]


@settings(deadline=None, max_examples=20)
@given(CLOCKS_MHZ, LATENCIES, LATENCIES)
def test_other_latencies_apply_from_the_iteration_in_which_the_client_marks_their_slots(clocks_mhz, before, after):
    passes, rank = len(clocks_mhz), RankAndAgent(before)
    slots = rank.timeline.add(followed(clocks_mhz)).slots
    first = rank.iterate(passes, slots)
    rank.actor.readback.latencies = after
    (again,) = rank.timeline.add_again()
    assert again.from_iteration == 3, "the client may be about to begin the second one"
    assert rank.iterate(passes, slots)[-1:] == first[-1:]
    expected = RankAndAgent(after)
    expected_slots = expected.timeline.add(followed(clocks_mhz)).slots
    assert again.slots == expected_slots
    steps = [rank.iterate(passes, again.slots) for _ in range(2)][1]
    assert steps == [expected.iterate(passes, expected_slots) for _ in range(2)][1]


def test_a_plan_of_two_clocks_awaits_few_of_its_passes():
    rank = RankAndAgent(LatencyTable())
    assert rank.timeline.add(followed((1410,) * 5 + (1200,) * 5)).slots == (9, 19)
    assert rank.timeline.add(followed((1410,) * 10)).slots == ()
