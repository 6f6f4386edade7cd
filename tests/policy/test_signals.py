"""Signals as they are read from files, what is wrong with those that cannot be used, and files that change."""

import json
from datetime import datetime, timedelta, timezone

import pytest
from virtual.time import VirtualTime

from perseus_ds.errors import SignalError
from perseus_ds.policy import signals
from perseus_ds.policy.policies import PowerCapPolicy
from perseus_ds.policy.signals import Signal, SignalWatch, parse_signal, read_signal

UTC = timezone.utc


def seconds(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def own(*values, step_h=1.0, start="2026-11-22T00:00:00+00:00"):
    begin = datetime.fromisoformat(start)
    rows = [f"{(begin + timedelta(hours=step_h * n)).isoformat()},{value}" for n, value in enumerate(values)]
    return "\n".join(["time,value", *rows])


def entsoe(rows, column="MTU (CET/CEST)", price="Day-ahead Price (EUR/MWh)"):
    lines = [f'"{column}","Area","Sequence","{price}","Intraday Period (CET/CEST)","Intraday Price (EUR/MWh)"']
    return "\n".join(lines + [f'"{mtu}","BZN|FR","Without Sequence","{value}","",""' for mtu, value in rows])


def test_our_own_csv_has_time_stamps_and_values_each_of_which_holds_until_the_next_one():
    signal = parse_signal(own(10, 20.5, -3))
    begin_s = seconds("2026-11-22T00:00:00")
    assert [signal.at(begin_s + s) for s in (0, 3599, 3600, 7200, 10799)] == [10, 10, 20.5, -3, -3]
    assert signal.end_s == begin_s + 3 * 3600
    assert signal.at(signal.end_s) == pytest.approx(signal.mean) == pytest.approx(27.5 / 3)
    assert signal.held_at(signal.end_s + 1e6) == -3
    assert [signal.next_change_s(begin_s + s) - begin_s for s in (0, 3600, 9000)] == [3600, 7200, 10800]


def test_a_unit_offsets_and_another_delimiter_are_read():
    signal = parse_signal("time;value [EUR/MWh]\n2026-11-22T00:00+01:00;1\n2026-11-22T01:00+01:00;2\n")
    assert signal.unit == "EUR/MWh"
    assert signal.begins_s[0] == seconds("2026-11-21T23:00:00")


@pytest.mark.parametrize(
    ("key", "time", "value", "around", "unit"),
    [
        (None, "time", "value", {}, ""),
        ("forecast", "datetime", "carbonIntensity", {"zone": "DE", "updatedAt": "2026-11-22T00:10Z"}, "gCO2eq/kWh"),
        ("history", "datetime", "carbonIntensity", {"zone": "DE"}, "gCO2eq/kWh"),
        ("data", "datetime", "value", {"zone": "FR", "unit": "EUR/MWh"}, "EUR/MWh"),
    ],
)
def test_json_of_objects_and_answers_of_electricity_maps_are_read(key, time, value, around, unit):
    entries = [{time: f"2026-11-22T0{n}:00:00.000Z", value: 80.5 + n} for n in range(3)]
    signal = parse_signal(json.dumps({**around, key: entries} if key else entries))
    assert (signal.values, signal.unit) == ((80.5, 81.5, 82.5), unit)
    assert signal.begins_s[0] == seconds("2026-11-22T00:00:00")


def test_yearly_files_of_electricity_maps_are_read_by_their_life_cycle_column():
    text = (
        "Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),"
        "Carbon intensity gCO₂eq/kWh (Life cycle),Carbon-free energy percentage (CFE%)\n"
        "2026-01-01 00:00:00,Sweden,Sweden,SE,2.5,30.0,99\n2026-01-01 01:00:00,Sweden,Sweden,SE,2.6,31.0,99\n"
    )
    signal = parse_signal(text)
    assert signal.values == (30.0, 31.0)
    assert signal.unit == "gCO₂eq/kWh"
    assert signal.begins_s[1] == seconds("2026-01-01T01:00:00")


def test_prices_of_entso_e_are_read_in_both_of_its_forms():
    new = entsoe(
        [("01/01/2025 00:00:00 - 01/01/2025 01:00:00", 18.9), ("01/01/2025 01:00:00 - 01/01/2025 02:00:00", 9)]
    )
    old = '"MTU (CET/CEST)","Day-ahead Price [EUR/MWh]","Currency","BZN|DE-LU"\n'
    old += '"01.01.2025 00:00 - 01.01.2025 01:00","18.9","EUR",""\n"01.01.2025 01:00 - 01.01.2025 02:00","9","EUR",""\n'
    old += '"01.01.2025 02:00 - 01.01.2025 03:00","-","",""\n'
    assert parse_signal(new) == parse_signal(old)
    assert parse_signal(new).begins_s[0] == seconds("2024-12-31T23:00:00")
    assert parse_signal(new).unit == "EUR/MWh"
    utc = parse_signal(entsoe([("01/01/2025 00:00:00 - 01/01/2025 00:15:00", 1)], "MTU (UTC)"))
    assert (utc.begins_s[0], utc.end_s) == (seconds("2025-01-01T00:00:00"), seconds("2025-01-01T00:15:00"))


@pytest.mark.parametrize("marked", [False, True])
def test_the_hour_that_comes_twice_in_autumn_is_two_hours(marked):
    names = (" (CEST)", " (CET)") if marked else ("", "")
    twice = [f"26/10/2025 02:00:00{names[0]} - 26/10/2025 02:00:00{names[1]}"] if marked else []
    twice = twice or ["26/10/2025 02:00:00 - 26/10/2025 03:00:00"]
    rows = [
        ("26/10/2025 01:00:00 - 26/10/2025 02:00:00", 1),
        (twice[0], 2),
        (f"26/10/2025 02:00:00{names[1]} - 26/10/2025 03:00:00", 3),
        ("26/10/2025 03:00:00 - 26/10/2025 04:00:00", 4),
    ]
    signal = parse_signal(entsoe(rows))
    assert [b - seconds("2025-10-25T23:00:00") for b in signal.begins_s] == [0, 3600, 7200, 10800]


def test_the_hour_that_spring_leaves_out_is_no_gap():
    rows = [
        ("30.03.2025 01:00 - 30.03.2025 02:00", 1),
        ("30.03.2025 02:00 - 30.03.2025 03:00", ""),
        ("30.03.2025 03:00 - 30.03.2025 04:00", 2),
        ("30.03.2025 04:00 - 30.03.2025 05:00", 3),
    ]
    assert parse_signal(entsoe(rows)).values == (1, 2, 3)


def test_a_file_with_one_number_is_a_signal_that_does_not_change(tmp_path):
    (tmp_path / "cap").write_text("4500\n")
    signal = read_signal(tmp_path / "cap", "cap", datetime.now(UTC))
    assert signal.held_at(0.0) == signal.at(1e9) == signal.mean == 4500


BAD = {
    "": "the file is empty",
    "time,value": "it has no values",
    own(1): "one value only",
    own(1, "nan", 3): "row 3: expected a number .*, got 'nan'",
    own(1, "inf", 3): "row 3: expected a number .*, got 'inf'",
    own(1, "-1e10", 3): r"row 3: expected a number of at most 1e\+09, got '-1e10'",
    own(1, 2, 3) + "\n2026-11-22T01:00:00+00:00,4": "row 5: '2026-11-22T01:00:00.00:00' is not after .* Sort the rows",
    own(1, 2).replace("+00:00", ""): "row 2: '2026-11-22T00:00:00' has no time zone",
    own(1, 2).replace("2026-11-22T01", "midnight"): "row 3: expected a time such as .*, got 'midnight",
    own(1, 2, start="0001-01-01T00:00:00+14:00"): "row 2: expected a year from 1970 to 2200, got '0001",
    own(1, 2, start="2200-12-31T23:00:00+00:00"): "row 3: expected a year from 1970 to 2200, got '2201",
    entsoe([("01/01/0001 00:00 - 01/01/0001 01:00", 1)]): "row 2: expected a year from",
    entsoe([("31/12/9999 22:00 - 31/12/9999 23:00", 1)], "MTU (UTC)"): "row 2: expected a year from",
    entsoe([("02/01/2026 00:00 - 01/01/2026 00:00", 1)]): "row 2: expected an end after the begin",
    "hour,price\n1,2": "found the columns 'hour', 'price'",
    "[1, 2]": "expected a list of objects",
    '{"zone": "DE"}': "expected a list of objects",
    '[{"time": "2026-11-22T00:00:00Z"}]': "entry 1: expected .time. and .value., found 'time'",
    '[{"time": ': "not a complete JSON file",
    entsoe([("2025", 1)]): "row 2: expected two times",
    entsoe([("41/01/2025 00:00:00 - 01/01/2025 01:00:00", 1)]): "row 2: expected two times",
    "MTU (UTC),Area,Day-ahead Price (EUR/MWh)\nx,BZN|FR,1\ny,BZN|DE-LU,2": "Area.* differs, .*: 'BZN.DE-LU', 'BZN.FR'",
}


HOSTILE = "\x1b]0;PWNED\x07" + "A" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        f"time,value,area\n2026-11-22T00:00:00Z,1,{HOSTILE}\n2026-11-22T01:00:00Z,1,b",
        "time,value\n2026-11-22\x1b00:00,1\n2026-11-22T01:00:00Z,1",
        "time,value\n2026-11-22T01:00:00Z,1\n2026-11-22\x9b00:00+00:00,1",
        f"time,{HOSTILE}\n1,2",
        json.dumps([{HOSTILE: 1}]),
    ],
    ids=["area", "no time zone", "not sorted", "columns", "keys"],
)
def test_what_is_wrong_with_a_signal_is_said_in_few_and_printable_characters(text):
    with pytest.raises(SignalError) as raised:
        parse_signal(text)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 800


def test_a_signal_has_at_most_as_many_values_as_a_year_has_quarter_hours(monkeypatch):
    monkeypatch.setattr(signals, "MOST_SIGNAL_VALUES", 3)
    assert len(parse_signal(own(1, 2, 3)).values) == 3
    with pytest.raises(SignalError, match=r"^4 values, at most 3 are read"):
        parse_signal(own(1, 2, 3, 4))


def test_a_file_that_is_too_large_for_a_signal_is_not_read(tmp_path):
    with (tmp_path / "prices.csv").open("wb") as file:
        file.truncate(8 * 2**20 + 1)
    with pytest.raises(SignalError, match=r"prices.csv: 8388609 bytes, at most 8388608 are read of a file of a signal"):
        read_signal(tmp_path / "prices.csv")


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=lambda text: text[:20])
def test_what_is_wrong_with_a_signal_is_said_with_its_place(text, message):
    with pytest.raises(SignalError, match=message):
        parse_signal(text)


def test_prices_have_no_gap_and_caps_may_have_one(tmp_path):
    (tmp_path / "prices.csv").write_text(own(1, 2, "", 4, 5))
    gap = "prices.csv: it has a gap between 2026-11-22T01:00:00Z and .*03:00:00Z: other values are 60 min apart"
    with pytest.raises(SignalError, match=gap):
        read_signal(tmp_path / "prices.csv")
    assert read_signal(tmp_path / "prices.csv", "cap").held_at(seconds("2026-11-22T02:30:00")) == 2


@pytest.mark.parametrize("use", ["price", "cap"])
def test_a_signal_of_the_past_or_of_the_future_has_no_value_for_now(tmp_path, use):
    (tmp_path / "signal.csv").write_text(own(1, 2))
    with pytest.raises(SignalError, match=r"of the past: it ended at 2026-11-22T02:00:00Z"):
        read_signal(tmp_path / "signal.csv", use, datetime(2026, 11, 22, 2, tzinfo=UTC))
    with pytest.raises(SignalError, match=r"begins at 2026-11-22T00:00:00Z"):
        read_signal(tmp_path / "signal.csv", use, datetime(2026, 11, 21, 23, tzinfo=UTC))


def test_the_time_before_a_new_file_begins_keeps_the_values_of_the_file_before():
    old, new = parse_signal(own(1, 2, 3)), parse_signal(own(7, 8, start="2026-11-22T02:00:00+00:00"))
    assert new.continuing(old).values == (1, 2, 7, 8)
    assert new.continuing(new) == new == new.continuing(None)


def test_a_span_of_time_is_cut_where_values_change_and_the_mean_follows_the_end():
    signal = Signal((0.0, 10.0, 20.0), (1.0, 2.0, 6.0), 30.0)
    for begin_s, end_s, edges_s, values in (
        (5, 50, [5, 10, 20, 30, 50], [1, 2, 6, 3]),
        (10, 20, [10, 20], [2]),
        (-5, 30, [-5, 0, 10, 20, 30], [3, 1, 2, 6]),
        (31, 32, [31, 32], [3]),
    ):
        found = signal.between(begin_s, end_s)
        assert [part.tolist() for part in found] == [edges_s, values]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "/dev/zero"])
def test_a_name_that_no_file_has_is_an_error_at_once(name):
    time = VirtualTime()
    with pytest.raises(SignalError, match=r"cannot be read \(|no regular file"):
        SignalWatch(time, pytest.fail).follow(PowerCapPolicy(name="power_cap", signal=name))
    assert time.seconds == 100.0
