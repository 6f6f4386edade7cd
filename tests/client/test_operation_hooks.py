"""What is marked around the operations of an iteration, and in which order."""

import pytest
from perseus_ds.runtime.clock_plan import ClockPlan
from perseus_ds.runtime.runtime import OperationHooks
from pipelines import one_f_one_b

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Load
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.protocol.messages import Program

SCHEDULE = one_f_one_b(ranks=1, micro_batches=2)
STREAM = tuple(i for i in SCHEDULE.instructions[0] if i.kind is not Kind.TAIL)
TAIL = next(i for i in SCHEDULE.instructions[0] if i.kind is Kind.TAIL)
PLAN = ClockPlan.of_rank(FrequencyPlan((STREAM,), ((1410, 1200, 1410, 1200),), 1.0, 100.0), 0)
ONE_CLOCK = ClockPlan.of_rank(FrequencyPlan((STREAM,), ((1200,) * 4,), 1.0, 100.0), 0)


class Calls:
    """Timers, clocks and communicator in one, which note what they are asked for."""

    needs_all = False
    replay = None

    def __init__(self):
        self.made = []
        self.programs = []

    def program(self, program):
        if program == Program(0):
            return DEFAULT_CLOCKS
        self.programs.append(program)
        return len(self.programs) - 1

    def begin_iteration(self, program):
        self.made.append(("iteration", program))
        return 1

    def change_program(self, program):
        self.made.append(("change", program))

    def mark(self, slot):
        self.made.append(slot)

    def start_iteration(self):
        self.made.append("start")

    def begin(self, operation):
        self.made.append(("begin", operation))

    def end(self, operation):
        self.made.append(("end", operation))

    def wait(self):
        self.made.append("wait")

    def all_max(self, value):
        self.made.append("all_max")
        return value


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def hooks(calls):
    return OperationHooks(calls, calls, calls)


def surround(hooks, operation):
    with hooks.around(operation):
        pass


def test_the_agent_knows_a_program_before_an_iteration_names_it_and_each_plan_is_sent_once(hooks, calls):
    for plan in (PLAN, PLAN, ONE_CLOCK, ClockPlan()):
        hooks.start_iteration(plan, "none")
    assert calls.programs == [Program(0, 1410, (1410, 1200, 1410, 1200), (), 1.0), Program(0, 1200)]
    assert [call for call in calls.made if call != "start"] == [
        ("iteration", 0), ("iteration", 0), ("iteration", 1), ("iteration", DEFAULT_CLOCKS)
    ]  # fmt: skip


def test_instructions_are_marked_at_their_positions_where_clocks_change(hooks, calls):
    hooks.start_iteration(PLAN, "passes")
    calls.made.clear()
    first = Compute(STREAM[0])
    surround(hooks, first)
    assert calls.made == [0, ("begin", first), ("end", first), 1]


def test_an_iteration_in_another_order_marks_each_instruction_at_its_own_position(hooks, calls):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        hooks.start_iteration(PLAN, "none")
        calls.made.clear()
        for position in order:
            surround(hooks, Compute(STREAM[position]))
        assert calls.made == [slot for position in order for slot in (2 * position, 2 * position + 1)]


@pytest.mark.parametrize("plan", [ONE_CLOCK, ClockPlan(), ClockPlan(first=1110)])
def test_nothing_is_marked_where_no_clock_changes_within_an_iteration(hooks, calls, plan):
    hooks.start_iteration(plan, "none")
    calls.made.clear()
    for instruction in STREAM:
        surround(hooks, Load(stage=0, micro_batch=0))
        surround(hooks, Compute(instruction))
    assert calls.made == []


def test_a_plan_that_is_dropped_within_an_iteration_ends_its_marks(hooks, calls):
    hooks.start_iteration(PLAN, "none")
    surround(hooks, Compute(STREAM[0]))
    calls.made.clear()
    hooks.change_plan(ClockPlan())
    surround(hooks, Compute(STREAM[1]))
    assert calls.made == [("change", DEFAULT_CLOCKS)]


def test_the_first_command_of_the_tail_waits_for_the_device_and_for_all_ranks(hooks, calls):
    hooks.start_iteration(ClockPlan(), "all", aligns_tail=True)
    calls.made.clear()
    for _ in range(2):
        surround(hooks, Compute(TAIL))
    assert calls.made[:3] == ["wait", "all_max", ("begin", Compute(TAIL))]
    assert calls.made.count("all_max") == 1
