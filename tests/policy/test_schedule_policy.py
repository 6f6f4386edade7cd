"""Which policy of a schedule is in force: by local time, weekday and clock changes."""

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from pydantic import TypeAdapter, ValidationError

from perseus_ds.policy.policies import EnergyOptimalPolicy, PolicyConfig, PowerCapPolicy, in_force, signal_files
from perseus_ds.policy.policies import SlowdownPolicy as Default

POLICY = TypeAdapter(PolicyConfig)
OPTIMAL = {"name": "energy_optimal"}


def schedule(*windows, zone="Europe/Berlin", **more):
    windows = [{"policy": OPTIMAL, **window} for window in windows]
    return POLICY.validate_python({"name": "schedule", "timezone": zone, "windows": windows, **more})


def is_within(policy, text, utc=False):
    now = datetime.fromisoformat(text).replace(tzinfo=timezone.utc if utc else ZoneInfo(policy.timezone))
    return in_force(policy, now) == EnergyOptimalPolicy(name="energy_optimal")


def test_a_window_counts_from_its_begin_until_its_end_and_the_default_outside():
    policy = schedule({"begin": "17:00", "end": "21:00"})
    times = ("16:59:59", "17:00:00", "20:59:59", "21:00:00")
    assert [is_within(policy, f"2026-11-23T{time}") for time in times] == [False, True, True, False]
    assert in_force(policy, datetime(2026, 11, 23, 12, tzinfo=timezone.utc)) == Default()


def test_the_zone_of_the_schedule_counts_whatever_zone_the_time_is_given_in():
    policy = schedule({"begin": "17:00", "end": "21:00"}, zone="America/New_York")
    assert is_within(policy, "2026-11-23T22:00:00", utc=True)
    assert not is_within(policy, "2026-11-23T17:00:00", utc=True)


def test_a_window_over_midnight_is_of_the_day_on_which_it_begins():
    policy = schedule({"begin": "22:00", "end": "06:00", "days": ["fri"]})  # 2026-11-27 is a Friday
    assert [is_within(policy, f"2026-11-{time}") for time in ("27T05:00", "27T22:00", "28T05:59", "28T06:00")] == [
        *(False, True, True, False)
    ]
    assert not is_within(policy, "2026-11-28T23:00")
    sunday = schedule({"begin": "22:00", "end": "06:00", "days": ["sun"]})
    assert is_within(sunday, "2026-11-30T01:00"), "Monday morning"


def test_a_window_that_ends_when_it_begins_is_a_whole_day():
    policy = schedule({"begin": "00:00", "end": "00:00", "days": ["sat", "sun"]})
    days = [is_within(policy, f"2026-11-{day}T{hour:02}:30") for day in (27, 28, 29, 30) for hour in (0, 12, 23)]
    assert days == [False] * 3 + [True] * 6 + [False] * 3


def test_the_first_of_windows_that_overlap_counts():
    cap = {"name": "power_cap", "watts": 500}
    policy = schedule({"begin": "08:00", "end": "20:00", "policy": cap}, {"begin": "10:00", "end": "22:00"})
    assert isinstance(in_force(policy, datetime(2026, 11, 23, 11, tzinfo=ZoneInfo(policy.timezone))), PowerCapPolicy)
    assert is_within(policy, "2026-11-23T21:00")


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
        ({"windows": []}, "expected at least one window"),
        ({"windows": [{"begin": "17:00+01:00", "end": "18:00", "policy": OPTIMAL}]}, "a time without zone"),
        ({"windows": [{"begin": "17:00", "end": "25:00", "policy": OPTIMAL}]}, "windows.0.end"),
        ({"windows": [{"begin": "17:00", "end": "18:00", "days": [], "policy": OPTIMAL}]}, "at least one day"),
        ({"windows": [{"begin": "17:00", "end": "18:00", "policy": {"name": "schedule"}}]}, "policy"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(wrong, message):
    windows = [{"begin": "01:00", "end": "02:00", "policy": OPTIMAL}]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        POLICY.validate_python({"name": "schedule", "timezone": "UTC", "windows": windows, **wrong})


def test_a_schedule_is_kept_by_a_checkpoint():
    policy = schedule({"begin": "22:00", "end": "06:00", "days": ["fri", "sat"]})
    assert POLICY.validate_python(policy.model_dump(mode="json")) == policy


def test_a_power_cap_has_either_watts_or_a_signal():
    for wrong in ({}, {"watts": 1, "signal": "cap.csv"}):
        with pytest.raises(ValidationError, match='either "watts" or "signal"'):
            POLICY.validate_python({"name": "power_cap", **wrong})


def test_the_signals_of_all_windows_are_known():
    cap = {"name": "power_cap", "signal": "cap.csv"}
    policy = schedule({"begin": "08:00", "end": "20:00", "policy": cap}, default={**cap, "signal": "night.csv"})
    assert signal_files(policy) == {"cap.csv", "night.csv"}
    assert signal_files(Default()) == frozenset()
