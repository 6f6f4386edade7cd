"""Which plan a cheapest policy asks for, until the job is done: in time, and near the bound."""

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.decisions import RunStatistics, Situation, decide
from perseus_ds.policy.hourly_programme import CostAccount
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signals import Signal

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
NOW_S = NOW.timestamp()
INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),),)
PLANS = tuple(
    FrequencyPlan(INSTRUCTIONS, ((1400 - 10 * i,),), 10.0 + 0.1 * i, 6000 - 100 * i + 2 * i * i) for i in range(20)
)
FRONTIER = Frontier(
    PLANS, 10.0, PLANS[0], Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=80, solver="none")
)
FILE = "prices.csv"


def hourly(*values):
    return Signal(
        tuple(NOW_S + 3600.0 * n for n in range(len(values))), values, NOW_S + 3600.0 * len(values), "EUR/MWh"
    )


def policy(hours, steps, **more):
    finish_by = NOW + timedelta(hours=hours)
    return CheapestPolicy(name="cheapest", finish_by=finish_by, total_steps=steps, signal=FILE, **more)


def situation(signal, step=0, hours=0.0, **more):
    signals = {} if signal is None else {FILE: signal}
    now = NOW + timedelta(hours=hours)
    return Situation(step, now, idle_power_w=80, signals=signals, **{"iterations_ahead": 0, **more})


def test_a_job_whose_iterations_take_longer_than_profiled_is_still_in_time():
    draw, known = random.Random(5), RunStatistics()
    signal, asked = hourly(*(draw.uniform(20, 120) for _ in range(24))), policy(24, 7200)
    now_s, decision, costs = NOW_S, None, CostAccount()
    for step in range(asked.total_steps):
        here = situation(signal, step, (now_s - NOW_S) / 3600, before=decision)
        here = replace(here, time_ratio=known.time_ratio, stopped_s=known.stopped_s)
        decision = decide(asked, FRONTIER, here)
        plan = PLANS[decision.plan]
        time_s = plan.time_s * draw.gauss(1.03, 0.02)
        now_s += time_s
        costs.add_iteration(
            signal,
            ended_s=now_s,
            time_s=time_s,
            energy_j=plan.energy_j,
            fastest_time_s=PLANS[0].time_s,
            fastest_energy_j=PLANS[0].energy_j,
        )
        known.add_iteration(time_s=time_s, energy_j=1.0, promised_time_s=plan.time_s, promised_energy_j=1.0)
        known.add_stop(0.05)
        now_s += 0.05
    assert 0 <= asked.finish_by.timestamp() - now_s < 600
    assert costs.cost < costs.fastest_cost


def test_a_timetable_holds_until_the_next_value_a_new_signal_or_another_pace():
    signal = hourly(50, 20, 70)
    asked = policy(3, 900)
    first = decide(asked, FRONTIER, situation(signal))
    assert decide(asked, FRONTIER, situation(signal, 27, 0.09, before=first)).timetable is first.timetable
    for changed in (
        situation(signal, 330, 1.0, before=first),
        situation(hourly(50, 20, 90), 27, 0.09, before=first),
        situation(signal, 20, 0.09, before=first),
    ):
        assert decide(asked, FRONTIER, changed).timetable is not first.timetable
    longer = decide(policy(4, 900), FRONTIER, situation(signal, 27, 0.09, before=first))
    assert longer.timetable is not first.timetable


def test_the_mean_is_assumed_where_the_signal_ends_before_the_deadline_and_that_is_said():
    decision = decide(policy(10, 900), FRONTIER, situation(hourly(50, 20)))
    assert "ends at 2026-11-21T02:00:00Z, before the deadline: of the time after it, its mean 35" in decision.problem
    assert decision.timetable.mean_from_s == NOW_S + 7200
    assert decide(policy(2, 600), FRONTIER, situation(hourly(50, 20))).problem == ""


def test_without_a_signal_every_hour_costs_the_same_and_the_deadline_is_still_met():
    decision = decide(policy(3, 1000), FRONTIER, situation(None))
    assert "cannot be read" in decision.problem
    assert decision.timetable.edges_s[-1] <= NOW_S + 3 * 3600


def test_a_deadline_that_cannot_be_met_runs_the_fastest_plan_and_says_so():
    for hours in (2, 0, -1):
        decision = decide(policy(hours, 900), FRONTIER, situation(hourly(50, 20)))
        assert decision.plan == 0
        assert "cannot be met: 900 steps take 9000 s at the fastest" in decision.problem


def test_a_training_that_is_done_is_no_error():
    assert decide(policy(2, 100), FRONTIER, situation(hourly(50, 20), step=100)).plan == len(PLANS) - 1


def test_a_halt_begins_and_ends_with_the_hour():
    signal, asked = hourly(1, 99, 1), policy(3, 600, may_pause=True)
    first = decide(asked, FRONTIER, situation(signal))
    at = [decide(asked, FRONTIER, situation(signal, 300, h, before=first)).halts for h in (0.99, 1.01, 1.99, 2.0)]
    assert at == [False, True, True, False]
