"""What is asked of the clock around the operations of an iteration, and in which order."""

import pytest
from pipelines import one_f_one_b

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.clocks.readback import LatencyTable
from perseus_ds.clocks.transitions import ClockPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Load
from perseus_ds.runtime.runtime import OperationHooks

SCHEDULE = one_f_one_b(ranks=1, micro_batches=2)
STREAM = tuple(i for i in SCHEDULE.instructions[0] if i.kind is not Kind.TAIL)
TAIL = next(i for i in SCHEDULE.instructions[0] if i.kind is Kind.TAIL)
CLOCKS = (1410, 1200, 1410, 1200)
LATE = LatencyTable({(1410, True): (0.02, 0.02, 0.02)})
PLAN = FrequencyPlan((STREAM,), (CLOCKS,), 1.0, 100.0)


class Calls:
    """Timers, clocks and communicator in one, which note what they are asked for."""

    needs_all = False
    latencies = LatencyTable()

    def __init__(self):
        self.made = []
        self.readback = self

    def request(self, clock_mhz, after=None):
        self.made.append(("request", clock_mhz, after))

    def request_early(self, clock_mhz, begun, delay_s):
        self.made.append(("early", clock_mhz, begun, pytest.approx(delay_s)))

    def start_iteration(self):
        return "iteration begun"

    def begin(self, operation):
        self.made.append(("begin", operation))
        return ("begun", operation)

    def end(self, operation):
        self.made.append(("end", operation))
        return ("ended", operation)

    def event(self):
        return "all of it"

    def wait(self):
        self.made.append("wait")

    def barrier(self):
        self.made.append("barrier")


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def hooks(calls):
    return OperationHooks(calls, calls, calls)


def begin(hooks, plan, **settings):
    hooks.start_iteration()
    hooks.change_plan(plan, **settings)


def surround(hooks, operation, during=lambda: None):
    with hooks.around(operation):
        during()


def test_the_first_clock_is_asked_for_once_the_device_has_done_the_iteration_before(hooks, calls):
    assert hooks.start_iteration() == "iteration begun"
    hooks.change_plan(ClockPlan.of_rank(PLAN, 0))
    hooks.change_plan(ClockPlan(first=1110))
    assert calls.made == [("request", 1410, "iteration begun"), ("request", 1110, "iteration begun")]


def test_an_instruction_asks_for_its_clock_before_it_and_for_the_next_one_when_it_is_over(hooks, calls):
    begin(hooks, ClockPlan.of_rank(PLAN, 0))
    first = Compute(STREAM[0])
    surround(hooks, first)
    assert calls.made == [
        ("request", 1410, "iteration begun"),
        ("request", 1410, None),
        ("begin", first),
        ("end", first),
        ("request", 1200, ("ended", first)),
    ]


def test_a_higher_clock_is_asked_for_one_latency_early(hooks, calls):
    calls.latencies = LATE
    times = {(i.stage, i.kind, clock): 0.1 for i in STREAM for clock in CLOCKS}
    begin(hooks, ClockPlan.of_rank(PLAN, 0, times, Dag.build(SCHEDULE)))
    second = Compute(STREAM[1])
    surround(hooks, second)
    assert ("early", 1410, ("begun", second), 0.08) in calls.made


def test_the_first_command_of_the_tail_waits_for_the_device_and_for_all_ranks(hooks, calls):
    begin(hooks, ClockPlan(), aligns_tail=True)
    calls.made.clear()
    for _ in range(2):
        surround(hooks, Compute(TAIL))
    assert calls.made[:3] == ["wait", "barrier", ("begin", Compute(TAIL))]
    assert calls.made.count("barrier") == 1


def test_where_nothing_is_timed_only_a_change_of_clock_is_asked_for(hooks, calls):
    plan = FrequencyPlan((STREAM,), ((1410, 1410, 1200, 1200),), 1.0, 100.0)
    hooks.start_iteration("none")
    hooks.change_plan(ClockPlan.of_rank(plan, 0))
    for instruction in STREAM:
        surround(hooks, Load(stage=0, micro_batch=0))
        surround(hooks, Compute(instruction))
    assert [call[1] for call in calls.made] == [1410, 1410, 1200, 1200, 1410]
