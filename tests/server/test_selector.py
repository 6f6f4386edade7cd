"""The plans in force: decided after every iteration, changed by commands, and which programs ranks follow."""

import itertools
import math
import random
import statistics
from datetime import timedelta
from types import SimpleNamespace

import pytest
from frontiers import thirty_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import one_f_one_b
from seen import seen
from virtual.time import VirtualTime

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_events import GoalChanged, PlanChosen, PowerCapChanged
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.commands import parse_command
from perseus_ds.policy.goal import Goal
from perseus_ds.policy.plans import Plans
from perseus_ds.policy.stragglers import Straggler, StragglerWatch, straggler_of, with_reported
from perseus_ds.policy.trial import Pair
from perseus_ds.savings import Default
from perseus_ds.server.frontiers import Planner
from perseus_ds.server.iterations import Run
from perseus_ds.server.job import Place
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.orders import Orders
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.runs import programs_of
from perseus_ds.server.selector import PlanSelector
from perseus_ds.server.state import PlanState
from perseus_ds.units import duration, plain

FRONTIER = thirty_plans()
PLANS = FRONTIER.plans
DEFAULT_W = PLANS[0].mean_power_w


class Job:
    """Plan selector of a job of one rank."""

    def __init__(self, goal=Goal(max_slowdown=0.05), state=None):  # noqa: B008 - it is frozen
        self.time = VirtualTime()
        self.control = JobControl(goal, 1, timebase=self.time)
        self.events, self.said = [], []
        self.control.record = self.events.append
        self.state = PlanState()
        self.state.load(state or {})
        recorder = SimpleNamespace(event=self.events.append, say=self.said.append)
        place, facts = Place(pipeline=0, pipeline_rank=0), SimpleNamespace(key=7)
        job = SimpleNamespace(gpus_per_rank=1, places=(place,), facts=(facts,))
        orders = Orders(job, send_all=None, recorder=recorder, reads=False)
        self.order = orders.first
        context = ModeContext(job, orders, self.state, recorder, self.control, send=None, timebase=self.time)
        Planner(context).use(self.order, FRONTIER)
        self.order.dag = Dag.build(one_f_one_b(ranks=1, micro_batches=1))
        self.selector = PlanSelector(context)

    @property
    def in_force(self):
        """Plans of the following iterations."""
        return self.selector.plans()[0]

    def give(self, command, **keys):
        """Give the job a command, and return the answer."""
        return self.control.carry_out(parse_command({"command": command, **keys}))["done"]

    def iterate(self, time_ratio=1.0, power_ratio=1.0):
        """Run an iteration and return its plan, or None for default clocks."""
        ran = self.in_force
        plan = FRONTIER.plans[ran.plan]
        time_s = plan.time_s * time_ratio
        power_w = power_ratio * plan.energy_j / plan.time_s
        self.control.count_step(self.control.steps + 1)
        is_paused = self.selector.is_paused
        plans = {} if is_paused else {0: ran}
        fields = {"time_s": time_s, "energy_j": power_w * time_s}
        self.selector.learn(seen(fields, number=self.control.steps, run=Run("run", plans=plans), order=self.order))
        self.selector.decide()
        return None if is_paused else ran.plan


def test_a_decision_is_for_the_iterations_to_come():
    job = Job()
    assert [job.iterate() for _ in range(3)] == [5, 5, 5]
    job.give("set", goal={"max_slowdown": None})
    assert [job.iterate() for _ in range(4)] == [5, 29, 29, 29]
    job.control.paused = True
    assert [job.iterate() for _ in range(4)] == [29, None, None, None]
    assert [(event.plan, event.paused) for event in job.events if isinstance(event, PlanChosen)] == [
        (5, False),
        (29, False),
        (29, True),
    ]


def test_plans_that_take_many_times_as_long_as_promised_are_known_after_a_restart():
    job = Job()
    assert job.selector.speed_up(20.0)
    assert Job(state=job.state.dump()).state.lateness == 20.0


def test_a_condition_that_no_plan_meets_is_recorded_and_said_once():
    job = Job(Goal(watts=5.0))
    for iteration in range(20):
        job.iterate(power_ratio=1 + 0.01 * (iteration % 3))
    assert len(job.said) == 1
    assert [event.problem for event in job.events if isinstance(event, GoalChanged)] == job.said


def test_a_cap_at_the_edge_of_two_plans_hardly_changes_plans_and_is_kept_on_average():
    cap_w = sum(PLANS[n].energy_j / PLANS[n].time_s for n in (5, 6)) / 2
    job, draw = Job(Goal(watts=cap_w)), random.Random(1)
    ran, powers_w = [], []
    for _ in range(1000):
        plan = PLANS[job.in_force.plan]
        differs = 0.985 if ran and ran[-1] % 2 else 1.015  # from the profile, differently for each plan
        ratio = differs * (1 + draw.gauss(0, 0.01))
        ran.append(job.iterate(power_ratio=ratio))
        powers_w.append(ratio * plan.energy_j / plan.time_s)
    changed = [number for number, (before, after) in enumerate(itertools.pairwise(ran)) if before != after]
    assert len(changed) <= 12
    assert sum(number < 44 for number in changed) <= 5
    assert statistics.mean(powers_w[changed[-1] if changed else 0 :]) <= cap_w
    assert max(ran) <= 10, "must be nearly the fastest plan below the cap"


def test_a_faster_plan_is_taken_where_it_stays_below_the_cap_by_far_and_at_once_when_the_cap_changes():
    power_w = [plan.energy_j / plan.time_s for plan in PLANS]
    job = Job(Goal(watts=power_w[10]))
    assert [job.iterate() for _ in range(3)] == [11] * 3
    assert {job.iterate(power_ratio=0.995) for _ in range(30)} == {11}
    for _ in range(20):
        faster = job.iterate(power_ratio=0.9)
    assert power_w[faster] * 0.9 <= 0.98 * power_w[10] < power_w[faster - 1] * 0.9
    job.give("set", goal={"watts": 1.001 * power_w[10]})
    assert [job.iterate(power_ratio=0.9) for _ in range(4)][-1] < faster


def test_whether_default_clocks_would_exceed_a_cap_is_measured_or_else_by_the_profile():
    baseline_w = FRONTIER.baseline.energy_j / FRONTIER.baseline.time_s
    job = Job(Goal(watts=0.97 * baseline_w))
    assert job.selector.is_capped
    for relative, exceeds in ((0.964, False), (0.966, True), (0.969, True), (0.972, True)):  # with a margin of 0.5 %
        for _ in range(8):
            job.state.default.add(0, 1.0, relative * baseline_w)
        job.selector.decide()
        assert job.selector.is_capped is exceeds
    assert not Job().selector.is_capped


def test_a_power_limit_that_ends_gives_way_to_that_of_the_configuration():
    job = Job(Goal(watts=0.9 * DEFAULT_W))
    configured = [job.iterate() for _ in range(5)][-1]
    until = job.time.date() + timedelta(seconds=100)
    job.give("set", goal={"power_fraction": 0.75, "until": until.isoformat()})
    reduced = [job.iterate() for _ in range(5)][-1]
    job.time.sleep(100)
    after = [job.iterate() for _ in range(5)][-1]
    assert reduced > configured
    assert after == configured
    caps = [event.watts for event in job.events if isinstance(event, PowerCapChanged)]
    assert caps == pytest.approx([0.9 * DEFAULT_W, 0.75 * DEFAULT_W, 0.9 * DEFAULT_W])
    assert [event.goal for event in job.events if isinstance(event, GoalChanged)][-1] == {"watts": 0.9 * DEFAULT_W}
    assert "the power limit has ended: plan" in job.said[-1]
    job.give("set", goal={"max_slowdown": 0.28})
    job.iterate()
    assert "by control: plan 28" in job.said[-1]


def test_a_limit_of_time_and_a_limit_of_power_combine_and_are_cleared_one_by_one():
    job = Job(Goal(max_slowdown=0.05))
    watts = PLANS[10].mean_power_w * 1.006
    job.give("set", goal={"watts": watts})
    assert [job.iterate() for _ in range(3)][-1] == 10
    job.give("set", goal={"max_slowdown": 0.2})
    assert [job.iterate() for _ in range(3)][-1] == 20
    assert job.control.goal == Goal(max_slowdown=0.2, watts=watts)
    job.give("clear", limit="time")
    assert [job.iterate() for _ in range(3)][-1] == 11, "a faster plan must stay below the limit by 2 %"
    job.give("clear")
    assert [job.iterate() for _ in range(3)][-1] == 5
    assert job.control.goal == Goal(max_slowdown=0.05)


def test_changes_by_control_are_in_the_log_with_their_effect():
    job = Job(Goal())
    job.control.steps = 150
    job.give("set", goal={"max_slowdown": 0.1})
    job.iterate()
    job.give("pause")
    job.iterate()
    job.give("resume")
    job.iterate()
    assert job.said == [
        "max_slowdown 0.1 by control: plan 10 from step 153, about 10.0 % slower, -10.0 % energy",
        "paused by control: default clocks from step 154",
        "resumed by control: under plans again from step 155",
    ]


@pytest.mark.parametrize(("late", "plan"), [(0.0, 5), (0.008, 4), (-0.008, 6)])
def test_the_allowed_slowdown_is_relative_to_default_clocks_as_measured_in_the_job(late, plan):
    """Plans take longer than the profile says, or less long, but by less than what counts as late."""
    job = Job(Goal(max_slowdown=0.0555))
    promised = math.log1p(0.05)
    for noise in (-1e-4, 0.0, 1e-4) * 4:
        job.state.trial.add(Pair(slowdown=promised + math.log1p(late) + noise, promised=promised, energy=-0.05))
    job.selector.decide()
    assert job.in_force.plan == plan


def test_plans_at_the_limit_are_not_replaced_because_they_are_late_by_a_thousandth():
    job = Job(Goal(max_slowdown=0.05))
    promised = math.log1p(0.05)
    for noise in (-1e-5, 0.0, 1e-5) * 4:
        job.state.trial.add(Pair(slowdown=promised + 0.0015 + noise, promised=promised, energy=-0.05))
    job.selector.decide()
    assert job.in_force.plan == 5


def test_changes_of_plan_are_in_the_log_and_two_that_take_turns_once():
    job = Job(Goal(max_slowdown=0.045))
    plans = [job.iterate() for _ in range(200)]
    assert set(plans) == {4, 5}
    assert job.said == ["plan 5 from step 23, about 5.0 % slower, -5.0 % energy"]
    job.give("straggler", pipeline=0, slowdown=1.2)
    job.iterate()
    assert len(job.said) == 1, "a single pipeline has no others that wait for it"


def test_the_answer_says_what_a_goal_costs():
    job = Job(Goal())
    until = (job.time.date() + timedelta(hours=1)).isoformat()
    answer = job.give("set", goal={"power_fraction": 0.75, "until": until})
    plan = next(number for number, plan in enumerate(PLANS) if plan.mean_power_w <= 0.995 * 0.75 * DEFAULT_W)
    late_s = 3600 * (1 - PLANS[0].time_s / PLANS[plan].time_s)
    assert f": plan {plan} in at most 2.000 s, about {plan:.1f} % slower, -{plan:.1f} % energy" in answer
    assert f"of 75.00 W, which makes the job {plain(duration(late_s))} later" in answer
    assert "cannot be kept: the plan with the lowest power draws" in job.give("set", goal={"power_fraction": 0.1})
    job.give("pause")
    assert "paused, and runs at default clocks until it is resumed" in job.give("set", goal={"power_fraction": 0.9})


@pytest.mark.parametrize(
    "damage",
    [
        {"plans": {0: math.inf}},
        {"stretch_factors": [math.nan]},
        {"statistics": {"stopped_s": 0.0, "stops": 10**400, "times": [1.0], "powers": []}},
    ],
)
def test_a_damaged_state_of_an_earlier_start_is_ignored_as_a_whole(damage, caplog):
    fresh = Job().state.dump()
    good = {**fresh, "next_rest": 800, "stretch_factors": [1.2]}
    assert Job(state=good).state.next_rest == 800
    job = Job(state={**good, **damage})
    assert "cannot be read" in caplog.text
    assert job.state.dump() == fresh


# Stragglers among data-parallel pipelines of two stages.
INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),), (Instruction(1, Kind.FORWARD, 0),))
OF_TWO = Frontier(
    tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - i,),) * 2, 1.0 + 0.005 * i, 100.0 - 0.5 * i) for i in range(61)),
    t_min_s=1.0,
    baseline=FrequencyPlan(INSTRUCTIONS, ((1400,),) * 2, 1.0, 100.0),
    provenance=FRONTIER.provenance.model_copy(update={"stages": 2, "blocking_power_w": 10.0}),
)


def run_job(slowness_at, iterations, noise=0.0, seed=0):
    """Simulate pipelines that follow stragglers, and return the assignments and each pipeline's times [s]."""
    draw = random.Random(seed)
    watch = StragglerWatch(len(slowness_at(0)))
    assignment = Plans.of(OF_TWO, None, 0, watch.stretch_factors)
    assignments, times = [], []
    before = None
    for iteration in range(iterations):
        own_s = [
            OF_TWO.plans[plan].time_s * slow * draw.gauss(1.03, noise)
            for plan, slow in zip(assignment.plans, slowness_at(iteration), strict=True)
        ]
        assignments.append(assignment)
        times.append(own_s)
        if before is not None:  # the times reported at the last boundary
            watch.update([s / OF_TWO.plans[plan].time_s for s, plan in zip(*before, strict=True)])
        before = own_s, assignment.plans
        assignment = Plans.of(OF_TWO, None, 0, watch.stretch_factors)
    return assignments, times


def test_others_follow_within_eight_iterations_and_come_back():
    assignments, times = run_job(lambda i: (1.0, 1.2 if 20 <= i < 60 else 1.0), 80)
    assert [a.plans for a in assignments[:20]] == [(0, 0)] * 20
    assert all(a.plans[0] > 30 and a.plans[1] == 0 for a in assignments[27:60])
    assert all(max(own) <= 1.2 * 1.03 + 1e-9 for own in times), "no pipeline may wait for one that follows"
    assert [a.plans for a in assignments[65:]] == [(0, 0)] * 15


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1.0, 1.4), min_size=2, max_size=8), st.integers(0, 1000), st.floats(0, 0.006))
def test_the_job_is_no_slower_than_its_slowest_pipeline_however_many_are_slow(slowness, seed, noise):
    assignments, times = run_job(lambda i: slowness if i >= 5 else [1.0] * len(slowness), 60, noise, seed)
    job_s = [max(own) for own in times[12:]]
    assert sum(job_s) / len(job_s) <= max(slowness) * 1.03 * (1 + 4 * noise + 0.001)
    changes = sum(a.plans != b.plans for a, b in itertools.pairwise(assignments[12:]))
    assert changes <= 8, "no flapping"


def test_one_slow_iteration_and_noise_change_nothing():
    spikes = {5: (1.0, 1.5), 9: (1.5, 1.0), 10: (1.0, 1.5), 14: (1.3, 1.3)}
    assignments, _ = run_job(lambda i: spikes.get(i, (1.0, 1.0)), 30, noise=0.008)
    assert {a.plans for a in assignments} == {(0, 0)}


def test_a_pipeline_at_the_border_does_not_flap():
    watch = StragglerWatch(2)
    for _ in range(5):
        watch.update((1.0, 1.08))
    given_rooms = [watch.update((1.0, 1.08 + 0.01 * (i % 2))) for i in range(20)]
    assert set(given_rooms) == {(1.08, 1.0)}
    assert watch.update((1.0, 1.04)) == (1.08, 1.0)
    assert watch.update((1.0, 1.04)) == (1.04, 1.0), "reduced so that no pipeline waits, but still a straggler"
    for _ in range(2):
        watch.update((1.0, 1.02))
    assert watch.stretch_factors == (1.0, 1.0)


def test_who_is_told_of_a_straggler_believes_it_and_counts_nothing_twice():
    reported = Straggler(1, 1.2)
    assert with_reported((1.0, 1.0, 1.0), reported) == (1.2, 1.0, 1.2)
    assert with_reported((1.2, 1.0, 1.2), reported) == pytest.approx((1.2, 1.0, 1.2))
    stretch_factors = with_reported((1.5, 1.5, 1.0), reported)  # another one is even slower
    assert stretch_factors == pytest.approx((1.5, 1.25, 1.0))
    assert straggler_of(stretch_factors) == Straggler(2, 1.5)
    assert straggler_of((1.0, 1.0)) is None
    assert with_reported((1.0,), Straggler(0, 1.3)) == (1.0,), "a single pipeline has no stretch factor"


def test_the_forecast_accounts_as_the_papers_emulation_does():
    plans = Plans.of(OF_TWO, None, 0, (1.2, 1.0))
    plan, default_j = OF_TWO.plans[plans.plans[0]], OF_TWO.baseline.energy_j
    assert 1.18 < plan.time_s < 1.2
    default = Default(1.2, default_j + 1.2 * default_j + 10 * 2 * 0.2, is_measured=False)
    forecast = plans.forecast_from(default)
    assert forecast.time_s == pytest.approx(1.2)
    assert forecast.energy_j == pytest.approx(plan.energy_j + 1.2 * 100 + 10 * 2 * (1.2 - plan.time_s))
    slower = plans.forecast_from(Default(2.4, 4 * default.energy_j, is_measured=True))
    assert (slower.slowdown, slower.saved) == pytest.approx((forecast.slowdown, forecast.saved))


TIMES_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}
SCHEDULE = one_f_one_b(ranks=2, micro_batches=1)
STREAMS = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in SCHEDULE.instructions)


def program(rank, *known_mhz):
    """Return the program of a rank under a plan, with a profile of some clocks."""
    times_s = {(stage, kind, clock): s for stage in (0, 1) for clock in known_mhz for kind, s in TIMES_S.items()}
    plan = FrequencyPlan(STREAMS, ((1110, 1200), (1410, 1410)), 0.7, 1.0)
    plans = Plans(
        SimpleNamespace(instruction_times_s=times_s, plans=(plan,), instructions=STREAMS),
        Dag.build(SCHEDULE),
        0,
        (1.0,),
        (0,),
    )
    return programs_of(plans.of_pipeline(0), plans, 5, SCHEDULE)[rank]


def test_a_program_has_the_clock_of_each_instruction_and_when_it_begins_after_the_ranks_before():
    found = program(0, 1110, 1200, 1410)
    assert (found.number, found.time_s, found.first_mhz) == (5, 0.7, 1110)
    assert found.clocks_mhz == (1110, 1200, 1110), "during a tail without a choice, the clock of the next iteration"
    assert found.spans_s[:2] == ((0.0, 0.1), pytest.approx((0.4, 0.6)))
    assert program(0, 1110, 1410).spans_s == (), "a time is unknown"
    one_clock = program(1, 1110, 1200, 1410)
    assert (one_clock.first_mhz, one_clock.clocks_mhz, one_clock.spans_s) == (1410, (), ()), "nothing to mark"


def test_power_that_varies_slowly_leaves_no_slower_plan_than_before():
    """As over a day. Faster plans are chosen while the power is low, which is right until it rises."""
    job, period, fastest = Job(Goal(watts=90.0)), 1000, []
    for wave in range(5):
        ran = [job.iterate(power_ratio=1 + 0.03 * math.sin(2 * math.pi * n / period)) for n in range(period)]
        fastest.append(min(ran) if wave else 0)
    assert len(set(fastest[1:])) == 1
