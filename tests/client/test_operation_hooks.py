"""Marks and timers around the operations of an iteration, and their order."""

import pytest
from pipelines import one_f_one_b

from perseus_ds.client.operations import OperationHooks
from perseus_ds.pipeline.schedule import Compute, Load
from perseus_ds.protocol.job_messages import Follow, Program
from perseus_ds.protocol.layout import DEFAULT_CLOCKS

SCHEDULE = one_f_one_b(ranks=1, micro_batches=2)
STREAM = SCHEDULE.ranks[0]
INSTRUCTIONS = SCHEDULE.instructions[0]
PLAN = Program(3, 1410, (1410, 1200, 1410, 1200, 1200))
ONE_CLOCK = Program(3, 1200)
DEFAULT = Program(DEFAULT_CLOCKS)


def follow(program, *, awaited=None, **times):
    """Return a message to which the agent has added the slots that it awaits, all of a plan by default."""
    slots = tuple(range(2 * len(program.clocks_mhz))) if awaited is None else awaited
    return Follow(program, serial=1, from_iteration=0, shown_from=0, phase="run", slots=slots, **times)


class Calls:
    """Timers and clocks in one object, which records its calls."""

    replay = None

    def __init__(self):
        self.made = []

    def begin_iteration(self, order, positions):
        self.made.append(("iteration", order, positions))
        return 1

    def mark(self, slot):
        self.made.append(slot)

    def start_iteration(self):
        self.made.append("start")

    def begin(self, operation):
        self.made.append(("begin", operation))

    def end(self, operation):
        self.made.append(("end", operation))


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def hooks(calls):
    return OperationHooks(calls, calls)


def surround(hooks, operation):
    with hooks.around(operation):
        pass


FORWARD, LOAD = Compute(INSTRUCTIONS[0]), Load(stage=0, micro_batch=0)


def timed(*operations):
    return [(event, operation) for operation in operations for event in ("begin", "end")]


@pytest.mark.parametrize(
    ("program", "times", "positions", "made"),
    [
        (DEFAULT, "none", 0, []),
        (ONE_CLOCK, "none", 0, []),
        (DEFAULT, "ends", 0, timed(FORWARD)),
        (DEFAULT, "passes", 0, timed(FORWARD)),
        (DEFAULT, "all", 0, timed(LOAD, FORWARD)),
        (PLAN, "none", 5, [0, 1]),
        (PLAN, "passes", 5, [0, *timed(FORWARD), 1]),
    ],
)
def test_operations_are_timed_as_requested_and_marked_if_clocks_change_within_the_iteration(
    hooks, calls, program, times, positions, made
):
    hooks.start_iteration(follow(program, times=times), 1, STREAM)
    assert calls.made == ["start", ("iteration", program.number, positions)]
    calls.made.clear()
    for operation in (LOAD, FORWARD):
        surround(hooks, operation)
    assert calls.made == made


def test_an_iteration_in_another_order_marks_each_instruction_at_its_own_position(hooks, calls):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        hooks.start_iteration(follow(PLAN), 1, STREAM)
        calls.made.clear()
        for position in order:
            surround(hooks, Compute(INSTRUCTIONS[position]))
        assert calls.made == [slot for position in order for slot in (2 * position, 2 * position + 1)]


@pytest.mark.parametrize("times", ["none", "passes"])
@pytest.mark.parametrize("awaited", [(), (1,), (2, 7), (0, 1, 9), tuple(range(10))])
def test_only_what_the_agent_awaits_is_marked(hooks, calls, awaited, times):
    for _ in range(2):  # the second iteration remembers the first one
        hooks.start_iteration(follow(PLAN, awaited=awaited, times=times), 1, STREAM)
        calls.made.clear()
        for instruction in INSTRUCTIONS:
            surround(hooks, Compute(instruction))
        assert tuple(made for made in calls.made if isinstance(made, int)) == awaited


def test_the_agent_may_await_other_marks_of_the_same_program_later(hooks, calls):
    for awaited in ((1,), (2, 3), ()):
        hooks.start_iteration(follow(PLAN, awaited=awaited), 1, STREAM)
        calls.made.clear()
        for instruction in INSTRUCTIONS:
            surround(hooks, Compute(instruction))
        assert tuple(calls.made) == awaited


def test_more_is_measured_at_the_interval_that_the_server_sets(hooks, calls):
    requested = follow(DEFAULT, times="passes", every=10)
    for number in (9, 10, 11):
        hooks.start_iteration(requested, number, STREAM)
        calls.made.clear()
        surround(hooks, FORWARD)
        assert calls.made == (timed(FORWARD) if number == 10 else [])


def test_an_iteration_of_another_order_has_positions_of_its_own(hooks, calls):
    other = one_f_one_b(ranks=1, micro_batches=3).ranks[0]
    hooks.start_iteration(follow(PLAN), 1, STREAM)
    surround(hooks, Compute(INSTRUCTIONS[1]))
    hooks.start_iteration(follow(PLAN), 2, other[2:])
    calls.made.clear()
    passes = [operation for operation in other[2:] if isinstance(operation, Compute)]
    surround(hooks, passes[0])
    assert calls.made == [0, 1]
