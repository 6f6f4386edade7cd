"""Which plan each policy asks for, hour by hour."""

import random
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lone_selector import FRONTIER, PLANS
from pydantic import ValidationError

from perseus_ds.policy.decisions import MARGIN, Decision, PowerCap, RunStatistics, Situation, decide, stretched_plan
from perseus_ds.policy.policies import (
    POLICY,
    DeadlinePolicy,
    EnergyOptimalPolicy,
    PowerCapPolicy,
    SlowdownPolicy,
    in_force,
    signal_files,
)

NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


def test_slowdown_and_energy_optimal():
    situation = Situation(step=0, now=NOW)
    assert decide(SlowdownPolicy(), FRONTIER, situation).plan == 0
    assert decide(SlowdownPolicy(max_slowdown=0.05), FRONTIER, situation).plan == 5
    assert decide(EnergyOptimalPolicy(name="energy_optimal"), FRONTIER, situation).plan == 29


@given(st.integers(0, 99), st.floats(0.5, 3.0), st.floats(0.9, 1.3), st.floats(0, 0.3))
def test_a_deadline_takes_the_slowest_plan_that_still_makes_it(step, seconds_per_step, ratio, stopped_s):
    finish_by = NOW + timedelta(seconds=(100 - step) * seconds_per_step)
    policy = DeadlinePolicy(name="deadline", finish_by=finish_by, total_steps=100)
    decision = decide(policy, FRONTIER, Situation(step=step, now=NOW, time_ratio=ratio, stopped_s=stopped_s))
    step_s = PLANS[decision.plan].time_s * ratio + stopped_s
    in_reserve_s = seconds_per_step * (100 - step) / (101 - step)
    if decision.problem:
        assert decision.plan == 0
        assert step_s > seconds_per_step * (1 - 1e-5)
        assert "cannot be met" in decision.problem
    else:
        assert step_s <= (seconds_per_step if decision.plan == 0 else in_reserve_s) * (1 + 1e-5)
        if decision.plan < 29:
            assert PLANS[decision.plan + 1].time_s * ratio + stopped_s > in_reserve_s * (1 - 1e-5)


def test_a_deadline_that_is_over_or_a_training_that_is_done_is_no_error():
    policy = DeadlinePolicy(name="deadline", finish_by=NOW, total_steps=10)
    assert decide(policy, FRONTIER, Situation(step=5, now=NOW)).plan == 0
    assert decide(policy, FRONTIER, Situation(step=10, now=NOW)).plan == 29


@given(st.floats(50, 1000), st.integers(1, 8), st.floats(0.8, 1.2))
def test_a_power_cap_takes_the_fastest_plan_under_it(watts, gpus, ratio):
    situation = Situation(0, NOW, gpus_per_rank=gpus, power_ratio=ratio)
    decision = decide(PowerCapPolicy(name="power_cap", watts=watts), FRONTIER, situation)
    powers = [gpus * ratio * plan.energy_j / plan.time_s for plan in PLANS]
    if decision.problem:
        assert min(powers) > watts
    else:
        assert powers[decision.plan] <= watts
        assert decision.plan == 0 or powers[decision.plan - 1] > (1 - MARGIN) * watts


@given(st.integers(0, 29), st.floats(0.995, 1.005))
def test_a_plan_that_still_fits_is_kept_where_another_would_hardly_do_better(running, noise):
    time_s, power_w = PLANS[running].time_s * 1.001, PLANS[running].energy_j / PLANS[running].time_s * 1.001
    deadline = DeadlinePolicy(name="deadline", finish_by=NOW + timedelta(seconds=1001 * time_s), total_steps=1000)
    before = decide(deadline, FRONTIER, Situation(0, NOW, before=Decision(running))).plan
    assert abs(before - running) <= 1
    wavering = decide(deadline, FRONTIER, Situation(0, NOW, time_ratio=min(1.0, noise), before=Decision(before))).plan
    assert wavering == before
    situation = Situation(0, NOW, power_ratio=min(1.0, noise), before=Decision(running, cap=PowerCap(power_w)))
    assert decide(PowerCapPolicy(name="power_cap", watts=power_w), FRONTIER, situation).plan == running


def test_a_deadline_is_met_by_a_run_that_stops_slows_down_and_is_resumed_later():
    draw = random.Random(5)
    policy = DeadlinePolicy(name="deadline", finish_by=NOW + timedelta(seconds=500 * 1.2), total_steps=500)
    pace, now, decision, energy_j = RunStatistics(), NOW, None, 0.0
    for step in range(500):
        if step == 300:  # a checkpoint, resumed ten seconds later in a new process
            pace, now = RunStatistics.model_validate_json(pace.model_dump_json()), now + timedelta(seconds=10)
        situation = Situation(step, now, pace.time_ratio, 1.0, pace.stopped_s, before=decision)
        decision = decide(policy, FRONTIER, situation)
        plan = decision.plan
        time_s = PLANS[plan].time_s * draw.gauss(1.02 if step < 250 else 1.06, 0.02)
        stop_s = 2.0 if step % 50 == 49 else 0.01
        pace.add_iteration(
            time_s=time_s, energy_j=1.0, promised_time_s=PLANS[plan].time_s, promised_energy_j=PLANS[plan].energy_j
        )
        pace.add_stop(stop_s)
        done = now + timedelta(seconds=time_s)
        now = done + timedelta(seconds=stop_s)
        energy_j += PLANS[plan].energy_j
    early_s = (policy.finish_by - done).total_seconds()
    assert 0 <= early_s < 5, "on time, and no earlier than is of use"
    assert energy_j < 500 * PLANS[8].energy_j


def test_others_run_as_slow_as_a_straggler_but_never_slower_than_is_worth_it():
    assert stretched_plan(FRONTIER, 3, 1.0) == 3
    assert stretched_plan(FRONTIER, 3, 1.1) == 12
    assert stretched_plan(FRONTIER, 3, 9.0) == 29


OPTIMAL = {"name": "energy_optimal"}


def schedule(*windows, zone="Europe/Berlin", **more):
    windows = [{"policy": OPTIMAL, **window} for window in windows]
    return POLICY.validate_python({"name": "schedule", "timezone": zone, "windows": windows, **more})


def is_within(policy, text, utc=False):
    now = datetime.fromisoformat(text).replace(tzinfo=timezone.utc if utc else ZoneInfo(policy.timezone))
    return in_force(policy, now) == EnergyOptimalPolicy(name="energy_optimal")


EVENING = {"begin": "17:00", "end": "21:00"}
CAP = {"begin": "08:00", "end": "20:00", "policy": {"name": "power_cap", "watts": 500}}
NIGHT, WHOLE_DAY = {"begin": "22:00", "end": "06:00"}, {"begin": "00:00", "end": "00:00"}


@pytest.mark.parametrize(
    ("windows", "inside", "outside"),  # 2026-11-27 is a Friday
    [
        ([EVENING], ["23T17:00:00", "23T20:59:59"], ["23T16:59:59", "23T21:00:00"]),
        ([{**NIGHT, "days": ["fri"]}], ["27T22:00", "28T05:59"], ["27T05:00", "28T06:00", "28T23:00"]),
        ([{**NIGHT, "days": ["sun"]}], ["30T01:00"], ["29T01:00"]),
        ([{**WHOLE_DAY, "days": ["sat", "sun"]}], ["28T00:30", "29T23:30"], ["27T23:30", "30T00:30"]),
        ([CAP, {"begin": "10:00", "end": "22:00"}], ["23T21:00"], ["23T11:00"]),  # the first one counts
    ],
    ids=["a day", "over midnight", "over midnight into the next week", "whole days", "overlapping"],
)
def test_a_window_counts_from_its_begin_until_its_end_on_the_days_on_which_it_begins(windows, inside, outside):
    policy = schedule(*windows)
    assert all(is_within(policy, f"2026-11-{time}") for time in inside)
    assert not any(is_within(policy, f"2026-11-{time}") for time in outside)


def test_outside_of_all_windows_the_default_counts_and_the_zone_is_that_of_the_schedule():
    policy = schedule(EVENING, zone="America/New_York")
    assert is_within(policy, "2026-11-23T22:00:00", utc=True)
    assert in_force(policy, datetime(2026, 11, 23, 17, tzinfo=timezone.utc)) == SlowdownPolicy()


def hours_within(policy, day):
    """How many hours of a local day, by the clock of the universe, the window is in force."""
    begin = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(policy.timezone)).astimezone(timezone.utc)
    return sum(is_within(policy, (begin + timedelta(minutes=15 * n)).isoformat()[:19], utc=True) for n in range(96)) / 4


def test_windows_follow_local_clocks_when_daylight_saving_begins_and_ends():
    night = schedule({"begin": "01:00", "end": "04:00"})
    assert hours_within(night, "2026-03-28") == 3
    assert hours_within(night, "2026-03-29") == 2, "02:00 to 03:00 does not exist"
    assert hours_within(night, "2026-10-25") == 4, "02:00 to 03:00 comes twice"
    assert hours_within(schedule({"begin": "02:00", "end": "03:00"}), "2026-03-29") == 0
    assert hours_within(schedule({"begin": "02:00", "end": "03:00"}), "2026-10-25") == 2
    assert hours_within(schedule({"begin": "17:00", "end": "21:00"}), "2026-03-29") == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"timezone": "Europe/Atlantis"}, "name of a time zone such as Europe/Berlin, got 'Europe/Atlantis'"),
        ({"timezone": "/etc/passwd"}, "name of a time zone"),
        ({"windows": []}, "windows"),
        ({"windows": [{"begin": "17:00+01:00", "end": "18:00", "policy": OPTIMAL}]}, "a time without zone"),
        ({"windows": [{"begin": "17:00", "end": "25:00", "policy": OPTIMAL}]}, "windows.0.end"),
        ({"windows": [{"begin": "17:00", "end": "18:00", "days": [], "policy": OPTIMAL}]}, "days"),
        ({"windows": [{"begin": "17:00", "end": "18:00", "policy": {"name": "schedule"}}]}, "policy"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(wrong, message):
    windows = [{"begin": "01:00", "end": "02:00", "policy": OPTIMAL}]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        POLICY.validate_python({"name": "schedule", "timezone": "UTC", "windows": windows, **wrong})


def test_the_signals_of_all_windows_are_known():
    cap = {"name": "power_cap", "signal": "cap.csv"}
    policy = schedule({"begin": "08:00", "end": "20:00", "policy": cap}, default={**cap, "signal": "night.csv"})
    assert signal_files(policy) == {"cap.csv": "cap", "night.csv": "cap"}
    assert not signal_files(SlowdownPolicy())
