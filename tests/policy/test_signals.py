"""Signals read from files, errors of unusable ones, and files that change."""

from datetime import datetime, timedelta, timezone

import pytest
from virtual.time import VirtualTime

from perseus_ds.errors import SignalError
from perseus_ds.policy.policies import PowerCapPolicy
from perseus_ds.policy.signals import SignalWatch, parse_signal, read_signal

UTC = timezone.utc


def seconds(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def own(*values, step_h=1.0, start="2026-11-22T00:00:00+00:00"):
    begin = datetime.fromisoformat(start)
    rows = [f"{(begin + timedelta(hours=step_h * n)).isoformat()},{value}" for n, value in enumerate(values)]
    return "\n".join(["time,value", *rows])


def test_our_own_csv_has_time_stamps_and_values_each_of_which_holds_until_the_next_one():
    signal = parse_signal(own(10, 20.5, -3))
    begin_s = seconds("2026-11-22T00:00:00")
    assert [signal.held_at(begin_s + s) for s in (0, 3599, 3600, 7200, 10799)] == [10, 10, 20.5, -3, -3]
    assert signal.end_s == begin_s + 3 * 3600
    assert signal.held_at(signal.end_s + 1e6) == -3
    assert [signal.next_change_s(begin_s + s) - begin_s for s in (0, 3600, 9000)] == [3600, 7200, 10800]


HOSTILE = "\x1b]0;PWNED\x07" + "A" * 100_000
BAD = {
    "": "the file is empty",
    "time,value": "it has no values",
    own(1): "only one value",
    own(1, "nan", 3): r"row 3: expected a number of at most 1e\+09, got 'nan'",
    own(1, "-1e10", 3): "row 3: expected a number .*, got '-1e10'",
    own(1, HOSTILE, 3): "row 3: expected a number .*, got",
    own(1, 2, 3) + "\n2026-11-22T02:00:00+00:00,4": "row 5: '2026-11-22T02:00:00.00:00' is not after .* Sort the rows",
    own(1, 2).replace("+00:00", ""): "row 2: '2026-11-22T00:00:00' has no time zone",
    own(1, 2).replace("2026-11-22T01", "midnight"): "row 3: expected a time such as .*, got 'midnight",
    own(1, 2, start="0001-01-01T00:00:00+14:00"): "row 2: expected a year from 1970 to 2200, got '0001",
    own(1, 2, start="2200-12-31T23:00:00+00:00"): "row 3: expected a year from 1970 to 2200, got '2201",
    "hour,price\n1,2": "expected one number, or the columns .time,value., found 'hour,price'",
    "time,value\n2026-11-22T00:00:00Z": "row 2: expected time and value, got '2026",
    f"time,{HOSTILE}\n1,2": "expected one number, or the columns",
    "time,value\n" * 40_002: "40001 values, expected at most 40000",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_what_is_wrong_with_a_signal_is_said_with_its_place_in_few_and_printable_characters(tmp_path, text, message):
    (tmp_path / "signal.csv").write_text(text)
    with pytest.raises(SignalError, match=message) as raised:
        read_signal(tmp_path / "signal.csv")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 800


def test_a_cap_needs_a_value_for_now_and_a_fraction_is_no_percentage(tmp_path):
    (tmp_path / "signal.csv").write_text(own(1, 2))
    with pytest.raises(SignalError, match=r"expected fractions .* above 0 and at most 1 .*, got 2"):
        read_signal(tmp_path / "signal.csv", "fraction")
    with pytest.raises(SignalError, match=r"in the past: it ended at 2026-11-22T02:00:00Z"):
        read_signal(tmp_path / "signal.csv", "cap", datetime(2026, 11, 22, 2, tzinfo=UTC))
    with pytest.raises(SignalError, match=r"begins at 2026-11-22T00:00:00Z"):
        read_signal(tmp_path / "signal.csv", "cap", datetime(2026, 11, 21, 23, tzinfo=UTC))


def test_a_file_system_that_hangs_is_an_error_soon(monkeypatch):
    time = VirtualTime()
    monkeypatch.setattr("perseus_ds.policy.signals.read_signal", lambda *_: time.sleep(60.0))
    with pytest.raises(SignalError, match=r"a: the signal cannot be read: no answer for 1 s"):
        SignalWatch(time, pytest.fail).follow(PowerCapPolicy(name="power_cap", signal="a"))
    assert time.seconds == 101.0


@pytest.mark.parametrize("name", ["a\0b", "/dev/zero"])
def test_a_name_that_no_file_has_is_an_error_at_once(name):
    time = VirtualTime()
    with pytest.raises(SignalError, match=r"cannot be read \(|not a regular file"):
        SignalWatch(time, pytest.fail).follow(PowerCapPolicy(name="power_cap", signal=name))
    assert time.seconds == 100.0
