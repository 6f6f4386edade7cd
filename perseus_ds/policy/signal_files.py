"""Reads signals from files: CSV and JSON of time stamps and values, and exports of ENTSO-E and Electricity Maps."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from perseus_ds.artifacts.io import parse_json, read_text
from perseus_ds.artifacts.limits import MOST_SIGNAL_BYTES, MOST_SIGNAL_VALUE, MOST_SIGNAL_VALUES
from perseus_ds.errors import SignalError
from perseus_ds.policy.signal_values import Signal, signal_of

_EXPECTED = (
    'expected the columns "time" and "value" (also "value [EUR/MWh]"), an export of day-ahead prices of ENTSO-E '
    '("MTU (UTC)" or "MTU (CET/CEST)", "Day-ahead Price (EUR/MWh)"), or one of Electricity Maps ("Datetime (UTC)", '
    '"Carbon intensity gCO₂eq/kWh (Life cycle)")'
)
_TIME = re.compile(r"time|datetime \(utc\)|mtu \((utc|cet/cest|cet)\)", re.IGNORECASE)
_VALUES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"value(?: [\[(](.+)[\])])?",
        r"day-ahead price [\[(](.+)[\])]",
        r"carbon intensity (gco.*/kwh) \((?:life cycle|lca)\)",
        r"carbon intensity (gco.*/kwh) \(direct\)",
    )
]
# A file with values of several of these is not one signal.
_ONE_EACH = ("area", "sequence", "zone id")
# Characters of a time or of names that a message repeats.
_LONGEST = 200
_FIRST_YEAR, _LAST_YEAR = 1970, 2200
_FIRST_S, _END_S = (datetime(year, 1, 1, tzinfo=timezone.utc).timestamp() for year in (_FIRST_YEAR, _LAST_YEAR + 1))
_MOST_COLUMNS = 1000
_MISSING = ("", "-", "n/e", "n/a")
_DAY_FIRST = re.compile(r"(\d\d)[./](\d\d)[./](\d{4}) (\d\d):(\d\d)(?::(\d\d))?(?: \((CES?T)\))?")
_CENTRAL_EUROPE = ZoneInfo("Europe/Brussels")
_LISTS = ("forecast", "history", "data")
_JSON_VALUES = ("value", "carbonIntensity")


@dataclass(frozen=True)
class _Row:
    """A time stamp and a value as they stand in the file, and where."""

    where: str
    time: Any
    value: Any


def read_signal(path: Path, now: datetime | None = None) -> Signal:
    """Read a signal; a file with nothing but one number is a signal that does not change.

    Args:
        path: The file.
        now: The time that it must have a value for; None if any will do.

    Raises:
        SignalError: The file is missing, is of another form, or has values that cannot be used; the message names
            file and row.
    """
    text = read_text(path, SignalError, "file of a signal", MOST_SIGNAL_BYTES)
    try:
        signal = parse_signal(text.strip())
        if now is not None:
            signal.check_is_of(now)
    except SignalError as error:
        raise SignalError(f"{path}: {error}") from None
    return signal


def parse_signal(text: str) -> Signal:
    """Return the signal that the contents of a file describe.

    Raises:
        SignalError: They are of another form, or cannot be used; the message names the row.
    """
    if not text:
        raise SignalError("the file is empty.")
    if text[0] in "[{":
        return _from_json(text)
    constant = _number(text)
    if constant is not None:
        return Signal((-math.inf,), (constant,), math.inf)
    return _from_csv(text)


def _from_csv(text: str) -> Signal:
    lines = text.splitlines()
    _check_count(len(lines) - 1)
    delimiter = max(",;\t", key=lines[0].count)
    try:
        header, *rows = csv.reader(lines, delimiter=delimiter)
    except csv.Error as error:
        raise SignalError(f"not a CSV file ({error}).") from None
    header = [name.strip() for name in header[:_MOST_COLUMNS]]
    time = next((column for column, name in enumerate(header) if _TIME.fullmatch(name)), None)
    found = [(column, match) for p in _VALUES for column, name in enumerate(header) if (match := p.fullmatch(name))]
    if time is None or not found:
        raise SignalError(f"{_EXPECTED}, found the columns {', '.join(map(repr, header))[:_LONGEST]}.")
    value, match = found[0]
    for column, name in enumerate(header):
        if name.lower() in _ONE_EACH and len(kinds := {row[column] for row in rows if len(row) > column}) > 1:
            raise SignalError(
                f'"{name}" differs: {", ".join(map(repr, sorted(kinds)[:4]))[:_LONGEST]}. '
                "One signal is of one of them; remove the others."
            )
    shortest = max(time, value)
    given = [
        _Row(f"row {number}", row[time].strip()[:_LONGEST], row[value].strip())
        for number, row in enumerate(rows, start=2)
        if len(row) > shortest
    ]
    return _signal(given, _stamps_of(header[time]), match.group(1) or "")


def _from_json(text: str) -> Signal:
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise SignalError(f"not a complete JSON file ({error}).") from None
    entries, unit = raw, ""
    if isinstance(raw, Mapping):
        entries = next((raw[key] for key in _LISTS if key in raw), None)
        unit = str(raw.get("unit", ""))
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise SignalError(
            'expected a list of objects such as {"time": "2026-11-22T08:00:00+00:00", "value": 81.3}, or an answer of '
            "Electricity Maps with a list under " + ", ".join(f'"{key}"' for key in _LISTS) + "."
        )
    _check_count(len(entries))
    rows = []
    for number, entry in enumerate(entries, start=1):
        time = entry.get("time", entry.get("datetime"))
        key = next((key for key in _JSON_VALUES if key in entry), None)
        if time is None or key is None:
            raise SignalError(
                f'entry {number}: expected "time" and "value", found {", ".join(map(repr, entry))[:_LONGEST]}.'
            )
        unit = unit or ("gCO2eq/kWh" if key == "carbonIntensity" else str(entry.get("unit", "")))
        rows.append(_Row(f"entry {number}", str(time)[:_LONGEST], entry[key]))
    return _signal(rows, _with_zone, unit)


def _check_count(count: int) -> None:
    if count > MOST_SIGNAL_VALUES:
        raise SignalError(f"{count} values, at most {MOST_SIGNAL_VALUES} are read. Remove those of the past.")


def _signal(rows: Sequence[_Row], stamps: _Stamps, unit: str) -> Signal:
    """Return the signal of rows; those without a value are left out, such as an hour that a clock change skips."""
    begins_s: list[float] = []
    values: list[float] = []
    end_s: float | None = None
    for row in rows:
        if row.value is None or str(row.value).lower() in _MISSING:
            continue
        value = _number(row.value)
        if value is None:
            raise SignalError(
                f"{row.where}: expected a number of at most {MOST_SIGNAL_VALUE:g}, got {str(row.value)!r:.200}."
            )
        begin_s, end_s = stamps(row, begins_s[-1] if begins_s else -math.inf)
        if not _FIRST_S <= begin_s < _END_S:
            raise SignalError(f"{row.where}: expected a year from {_FIRST_YEAR} to {_LAST_YEAR}, got {row.time!r}.")
        if begins_s and begin_s <= begins_s[-1]:
            raise SignalError(f"{row.where}: {row.time!r} is not after the time of the row above. Sort the rows.")
        begins_s.append(begin_s)
        values.append(value)
    return signal_of(begins_s, values, end_s=end_s, unit=unit[:_LONGEST])


def _number(text: object) -> float | None:
    """Return a number that is not too large, or None if it is none."""
    try:
        value = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return value if abs(value) <= MOST_SIGNAL_VALUE and not isinstance(text, bool) else None


_Stamps = Callable[[_Row, float], tuple[float, "float | None"]]
"""Returns begin and, where known, end of a row's value; given the begin of the row above [Unix seconds]."""


def _stamps_of(column: str) -> _Stamps:
    """Return how the times of a column are read."""
    if column.lower().startswith("mtu"):
        zone: tzinfo = timezone.utc if "UTC" in column.upper() else _CENTRAL_EUROPE
        return lambda row, above_s: _interval(row, above_s, zone)
    if "utc" in column.lower():
        return lambda row, _: (_iso(row).replace(tzinfo=timezone.utc).timestamp(), None)
    return _with_zone


def _with_zone(row: _Row, above_s: float) -> tuple[float, None]:
    time = _iso(row)
    if time.tzinfo is None:
        raise SignalError(
            f"{row.where}: {row.time!r} has no time zone. Write it as 2026-11-22T08:00:00+01:00, or with Z for UTC."
        )
    return time.timestamp(), None


def _iso(row: _Row) -> datetime:
    try:
        # Before Python 3.11, "Z" was not understood.
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", str(row.time)))
    except ValueError:
        raise SignalError(
            f"{row.where}: expected a time such as 2026-11-22T08:00:00+01:00, got {row.time!r}."
        ) from None


def _interval(row: _Row, above_s: float, zone: tzinfo) -> tuple[float, float]:
    """Return begin and end of ``01/01/2025 00:00:00 - 01/01/2025 01:00:00``, also with points and without seconds."""
    try:
        begin, end = _day_first(str(row.time))
    except ValueError:
        raise SignalError(
            f"{row.where}: expected two times such as 01/01/2025 00:00:00 - 01/01/2025 01:00:00, got {row.time!r}."
        ) from None
    begin_s = _in_zone(*begin, zone, above_s)
    end_s = _in_zone(*end, zone, begin_s)
    if end_s <= begin_s:
        raise SignalError(f"{row.where}: expected an end after the begin, got {row.time!r}.")
    return begin_s, end_s


def _day_first(text: str) -> Iterator[tuple[datetime, str]]:
    """Yield each time with the name of its zone, where that is given."""
    for match in _DAY_FIRST.finditer(text):
        day, month, year, hour, minute, second = (int(number or 0) for number in match.groups()[:6])
        yield datetime(year, month, day, hour, minute, second), match.group(7) or ""


def _in_zone(time: datetime, name: str, zone: tzinfo, after_s: float) -> float:
    """Return a local time as Unix seconds; of the hour that comes twice in autumn, the first that is after another."""
    summer_s = time.replace(tzinfo=zone, fold=0).timestamp()
    winter_s = time.replace(tzinfo=zone, fold=1).timestamp()
    if name:
        return winter_s if name == "CET" else summer_s
    return summer_s if summer_s > after_s else winter_s
