"""Signals: a price, a carbon intensity, a power cap or a fraction of power over time, from files that may change.

Files are CSV or JSON of time stamps and values, or exports of ENTSO-E and Electricity Maps. Rank 0 reads them again
when they change, on a thread of its own.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone, tzinfo
from functools import cached_property
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.io import parse_json, read_text
from perseus_ds.artifacts.validation import MIB
from perseus_ds.errors import SignalError
from perseus_ds.policy.policies import PolicyConfig, SignalUse, signal_files
from perseus_ds.timebase import Flag, Timebase

Numbers = npt.NDArray[np.float64]

MOST_SIGNAL_VALUES = 40_000
"""A year of quarter-hours."""
_MOST_BYTES = 8 * MIB
_MOST_VALUE = 1e9
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
_FIRST_YEAR, _LAST_YEAR = 1970, 2200
_FIRST_S, _END_S = (datetime(year, 1, 1, tzinfo=timezone.utc).timestamp() for year in (_FIRST_YEAR, _LAST_YEAR + 1))
_MOST_COLUMNS = 1000
_LONGEST_UNIT, _LONGEST_MESSAGE = 200, 600
_MISSING = ("", "-", "n/e", "n/a")
_DAY_FIRST = re.compile(r"(\d\d)[./](\d\d)[./](\d{4}) (\d\d):(\d\d)(?::(\d\d))?(?: \((CES?T)\))?")
_CENTRAL_EUROPE = ZoneInfo("Europe/Brussels")
_LISTS = ("forecast", "history", "data")
_LOOK_EVERY_S = 1.0
_PATIENCE_S = 10.0
_Signature = tuple[int, int, int]
_NEVER: _Signature = (0, 0, 0)


@dataclass(frozen=True)
class Signal:
    """Values over time: each holds until the next one begins.

    Attributes:
        begins_s: When each value begins, ascending [Unix seconds].
        values: As many, in the signal's unit.
        end_s: When the last value ends [Unix seconds].
        unit: Such as ``EUR/MWh``; empty where the file names none.
    """

    begins_s: tuple[float, ...]
    values: tuple[float, ...]
    end_s: float
    unit: str = ""

    @cached_property
    def mean(self) -> float:
        """The mean over its time; what is assumed of the time after its end."""
        begins_s, values = self._arrays
        lengths_s = np.diff(begins_s, append=self.end_s)
        return float(np.average(values, weights=lengths_s)) if np.isfinite(lengths_s).all() else self.values[-1]

    @cached_property
    def _arrays(self) -> tuple[Numbers, Numbers]:
        return np.array(self.begins_s), np.array(self.values)

    def at(self, time_s: float) -> float:
        """Return the value at a time [Unix seconds]; the mean where the signal has ended or not begun."""
        return self.held_at(time_s) if self.begins_s[0] <= time_s < self.end_s else self.mean

    def held_at(self, time_s: float) -> float:
        """Return the value at a time [Unix seconds]; the last one where the signal has ended."""
        return self.values[max(0, bisect.bisect_right(self.begins_s, time_s) - 1)]

    def fraction_at(self, time_s: float) -> float:
        """Return the fraction of power asked for at a time [Unix seconds]; 1 before it begins and after its end."""
        return self.held_at(time_s) if self.begins_s[0] <= time_s < self.end_s else 1.0

    def next_change_s(self, time_s: float) -> float:
        """Return when the next value begins, or the last one ends [Unix seconds]; infinity after that."""
        following = bisect.bisect_right(self.begins_s, time_s)
        if following < len(self.begins_s):
            return self.begins_s[following]
        return self.end_s if time_s < self.end_s else np.inf

    def between(self, begin_s: float, end_s: float) -> tuple[Numbers, Numbers]:
        """Return the parts of a span of time in which the value is constant.

        Returns:
            Edges of the parts [Unix seconds], shape (parts + 1,), and values, shape (parts,).
        """
        first = bisect.bisect_right(self.begins_s, begin_s)
        after = max(first, bisect.bisect_left(self.begins_s, end_s))
        begins_s, values = (of_all[first:after] for of_all in self._arrays)
        end = [self.end_s] if begin_s < self.end_s < end_s else []
        edges_s = np.concatenate([[begin_s], begins_s, end, [end_s]])
        return edges_s, np.concatenate([[self.at(begin_s)], values, [self.mean for _ in end]])

    def mean_between(self, begin_s: float, end_s: float) -> float:
        """Return the mean over a span of time [Unix seconds]."""
        if end_s <= begin_s:
            return self.at(begin_s)
        edges_s, values = self.between(begin_s, end_s)
        return float((np.diff(edges_s) * values).sum() / (end_s - begin_s))

    def continuing(self, earlier: Signal | None) -> Signal:
        """Return this signal with the values of an earlier one for the time before it begins."""
        if earlier is None or earlier.begins_s[0] >= self.begins_s[0]:
            return self
        kept = bisect.bisect_left(earlier.begins_s, self.begins_s[0])
        return replace(
            self,
            begins_s=earlier.begins_s[:kept] + self.begins_s,
            values=earlier.values[:kept] + self.values,
        )


def read_signal(path: Path, use: SignalUse = "price", now: datetime | None = None) -> Signal:
    """Read a signal; a file with nothing but one number is a signal that does not change.

    Args:
        path: The file.
        use: What its values are. Prices are as far apart from each other; a cap or a fraction holds until the next one.
        now: The time that it must have a value for; None if any will do, as of a fraction, which is 1 at all others.

    Raises:
        SignalError: The file is missing, is of another form, or has values that cannot be used; the message names
            file and row.
    """
    text = read_text(path, SignalError, "file of a signal", _MOST_BYTES)
    try:
        signal = parse_signal(text.strip())
        _check(signal, use, now)
    except SignalError as error:
        raise SignalError(f"{path}: {error}") from None
    return signal


def _check(signal: Signal, use: SignalUse, now: datetime | None) -> None:
    """Check that a signal can be used as :func:`read_signal` says."""
    if use == "price":
        usual_s = _usual_step_s(signal.begins_s)
        for begin_s, after_s in itertools.pairwise(signal.begins_s):
            if after_s - begin_s > usual_s:
                raise SignalError(
                    f"it has a gap between {_text(begin_s)} and {_text(after_s)}: other values are "
                    f"{usual_s / 60:g} min apart."
                )
    if use == "fraction":
        if wrong := [value for value in signal.values if not 0 < value <= 1]:
            raise SignalError(
                f"expected fractions of the power at default clocks, above 0 and at most 1 (1 for no reduction), "
                f"got {wrong[0]:g}."
            )
    elif now is not None and now.timestamp() >= signal.end_s:
        raise SignalError(f"all its values are of the past: it ended at {_text(signal.end_s)}.")
    elif now is not None and now.timestamp() < signal.begins_s[0]:
        raise SignalError(f"it has no value for the present: it begins at {_text(signal.begins_s[0])}.")


def parse_signal(text: str) -> Signal:
    """Return the signal that the contents of a file describe.

    Raises:
        SignalError: They are of another form, or cannot be used; the message names the row.
    """
    if not text:
        raise SignalError("the file is empty.")
    constant = _number(text)
    if constant is not None:
        return Signal((-math.inf,), (constant,), math.inf)
    try:
        return _from_json(text) if text[0] in "[{" else _from_csv(text)
    except SignalError as error:  # which repeats what the file holds
        raise SignalError(str(error)[:_LONGEST_MESSAGE]) from None


def _from_csv(text: str) -> Signal:
    lines = text.splitlines()
    delimiter = max(",;\t", key=lines[0].count)
    try:
        header, *rows = csv.reader(lines, delimiter=delimiter)
    except csv.Error as error:
        raise SignalError(f"not a CSV file ({error}).") from None
    header = [name.strip() for name in header[:_MOST_COLUMNS]]
    time = next((column for column, name in enumerate(header) if _TIME.fullmatch(name)), None)
    found = [(column, match) for p in _VALUES for column, name in enumerate(header) if (match := p.fullmatch(name))]
    if time is None or not found:
        raise SignalError(f"{_EXPECTED}, found the columns {', '.join(map(repr, header))}.")
    value, match = found[0]
    for column, name in enumerate(header):
        if name.lower() in _ONE_EACH and len(kinds := {row[column] for row in rows if len(row) > column}) > 1:
            raise SignalError(
                f'"{name}" differs, and one signal is of one of them; remove the others: '
                f"{', '.join(map(repr, sorted(kinds)[:4]))}."
            )
    cells = [
        (f"row {number}", row[time].strip(), row[value].strip())
        for number, row in enumerate(rows, start=2)
        if len(row) > max(time, value)
    ]
    stamps = header[time].lower()
    zone = timezone.utc if "utc" in stamps else _CENTRAL_EUROPE if stamps.startswith("mtu") else None
    return _signal(cells, match.group(1) or "", zone, intervals=stamps.startswith("mtu"))


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
    rows = []
    for number, entry in enumerate(entries, start=1):
        time = entry.get("time", entry.get("datetime"))
        key = next((key for key in ("value", "carbonIntensity") if key in entry), None)
        if time is None or key is None:
            raise SignalError(f'entry {number}: expected "time" and "value", found {", ".join(map(repr, entry))}.')
        unit = unit or ("gCO2eq/kWh" if key == "carbonIntensity" else str(entry.get("unit", "")))
        rows.append((f"entry {number}", str(time), entry[key]))
    return _signal(rows, unit)


def _signal(
    rows: Sequence[tuple[str, str, Any]], unit: str, zone: tzinfo | None = None, *, intervals: bool = False
) -> Signal:
    """Return the signal of rows.

    Args:
        rows: Place in the file, time stamp and value of each. Those without a value are left out, such as an hour that
            a clock change skips.
        unit: Of the values.
        zone: Of time stamps that name none; None if each must name its own.
        intervals: Whether a time stamp gives begin and end of its value, as those of ENTSO-E do.
    """
    if len(rows) > MOST_SIGNAL_VALUES:
        raise SignalError(f"{len(rows)} values, at most {MOST_SIGNAL_VALUES} are read. Remove those of the past.")
    begins_s: list[float] = []
    values: list[float] = []
    end_s: float | None = None
    for where, time, value in rows:
        if value is None or str(value).lower() in _MISSING:
            continue
        above_s = begins_s[-1] if begins_s else -math.inf
        try:
            if (number := _number(value)) is None:
                raise SignalError(f"expected a number of at most {_MOST_VALUE:g}, got {str(value)!r}.")
            begin_s, end_s = _interval(time, zone, above_s) if intervals else (_instant(time, zone), None)
            if not _FIRST_S <= begin_s < _END_S:
                raise SignalError(f"expected a year from {_FIRST_YEAR} to {_LAST_YEAR}, got {time!r}.")
            if begin_s <= above_s:
                raise SignalError(f"{time!r} is not after the time of the row above. Sort the rows.")
        except SignalError as error:
            raise SignalError(f"{where}: {error}") from None
        begins_s.append(begin_s)
        values.append(number)
    if not begins_s:
        raise SignalError("it has no values.")
    if len(begins_s) == 1 and end_s is None:
        raise SignalError("it has one value only, so that it is not known how long it holds: give at least two.")
    end_s = begins_s[-1] + _usual_step_s(begins_s) if end_s is None else end_s
    return Signal(tuple(begins_s), tuple(values), end_s, unit[:_LONGEST_UNIT])


def _usual_step_s(begins_s: Sequence[float]) -> float:
    return min(
        statistics.multimode(after_s - begin_s for begin_s, after_s in itertools.pairwise(begins_s)), default=0.0
    )


def _number(text: object) -> float | None:
    """Return a number that is not too large, or None if it is none."""
    try:
        value = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return value if abs(value) <= _MOST_VALUE and not isinstance(text, bool) else None


def _instant(text: str, zone: tzinfo | None) -> float:
    try:
        # Before Python 3.11, "Z" was not understood.
        time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        raise SignalError(f"expected a time such as 2026-11-22T08:00:00+01:00, got {text!r}.") from None
    if zone is None and time.tzinfo is None:
        raise SignalError(f"{text!r} has no time zone. Write it as 2026-11-22T08:00:00+01:00, or with Z for UTC.")
    return (time if zone is None else time.replace(tzinfo=zone)).timestamp()


def _interval(text: str, zone: tzinfo | None, above_s: float) -> tuple[float, float]:
    """Return begin and end of ``01/01/2025 00:00:00 - 01/01/2025 01:00:00``, also with points and without seconds.

    Of the hour that comes twice in autumn, a time without the name of its zone is the first that is after ``above_s``.
    """
    ends_s = [above_s]
    try:
        for match in _DAY_FIRST.finditer(text):
            day, month, year, hour, minute, second = (int(number or 0) for number in match.groups()[:6])
            time = datetime(year, month, day, hour, minute, second, tzinfo=zone)
            summer_s, winter_s = time.timestamp(), time.replace(fold=1).timestamp()
            is_winter = match[7] == "CET" if match[7] else summer_s <= ends_s[-1]
            ends_s.append(winter_s if is_winter else summer_s)
        _, begin_s, end_s = ends_s
    except ValueError:
        raise SignalError(
            f"expected two times such as 01/01/2025 00:00:00 - 01/01/2025 01:00:00, got {text!r}."
        ) from None
    if end_s <= begin_s:
        raise SignalError(f"expected an end after the begin, got {text!r}.")
    return begin_s, end_s


def _text(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%FT%TZ}"


class SignalWatch:
    """Keeps the last good values of the signals of a policy.

    Training threads never read a file: they take the values that are there.

    Attributes:
        signals: The last good values, by file.
    """

    def __init__(self, timebase: Timebase, on_problem: Callable[[str], None]) -> None:
        """Watch nothing yet.

        Args:
            timebase: The rank's time.
            on_problem: Called with what is wrong with a file that has changed; on another thread.
        """
        self.signals: Mapping[str, Signal] = {}
        self._timebase = timebase
        self._on_problem = on_problem
        self._changed = timebase.condition()
        self._is_closed = False
        self._is_watching = False
        # The contents that are in use, or that a problem was reported of; and those found to be wrong once.
        self._known: dict[str, _Signature | None] = {}
        self._uses: Mapping[str, SignalUse] = {}
        self._suspects: dict[str, _Signature | None] = {}

    def follow(self, policy: PolicyConfig) -> None:
        """Read the signals of a policy, and watch their files from now on.

        Raises:
            SignalError: A file cannot be used; the signals are those from before.
        """
        uses = signal_files(policy)
        found = {file: self._read_beside(file, use) for file, use in uses.items()}
        with self._changed:
            self._known = {file: signature for file, (signature, _) in found.items()}
            # The policy from before may decide once more.
            self._uses = uses
            read = {file: self._after_earlier(file, signal) for file, (_, signal) in found.items()}
            self.signals = {**self.signals, **read}
            begins = bool(uses) and not self._is_watching and not self._is_closed
            self._is_watching = self._is_watching or begins
        if begins:
            self._timebase.thread(self._watch, "perseus-signals").start()

    def follow_if_possible(self, policy: PolicyConfig) -> None:
        """Do the same, but only report a file that cannot be used."""
        try:
            self.follow(policy)
        except SignalError as error:
            self._on_problem(str(error))

    def close(self) -> None:
        """Stop; harmless when called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _after_earlier(self, file: str, signal: Signal) -> Signal:
        """Return a file's signal after that of the file as it was before; a request that was replaced is over."""
        return signal if self._uses[file] == "fraction" else signal.continuing(self.signals.get(file))

    def _read_beside(self, file: str, use: SignalUse) -> tuple[_Signature | None, Signal]:
        """Read a file on another thread, since a file system may hang."""
        done = Flag(self._timebase)
        found: list[tuple[_Signature | None, Signal] | SignalError] = []

        def read() -> None:
            try:
                found.append((_signature(file), self._read(file, use)))
            except SignalError as error:
                found.append(error)
            finally:
                done.set()

        self._timebase.thread(read, "perseus-signal").start()
        done.wait(_PATIENCE_S)
        if not found:
            raise SignalError(f"{file}: the signal cannot be read: no answer for {_PATIENCE_S:.0f} s.")
        if isinstance(found[0], SignalError):
            raise found[0]
        return found[0]

    def _read(self, file: str, use: SignalUse) -> Signal:
        try:
            return read_signal(Path(file), use, self._timebase.date())
        except SignalError:
            raise
        except Exception as error:  # whatever a file holds, the thread goes on
            raise SignalError(f"{file}: the signal cannot be read ({error!r}).") from error

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)
                if self._is_closed:
                    return
                known, uses = self._known, self._uses
            for path, use in uses.items():
                self._look(path, use, known)

    def _look(self, path: str, use: SignalUse, known: dict[str, _Signature | None]) -> None:
        """Read a file that has changed; one that is wrong may be half written, and is reported if it stays so."""
        signature = _signature(path)
        if signature == known[path]:
            return
        try:
            signal = self._read(path, use)
        except SignalError as error:
            if signature == self._suspects.get(path, _NEVER):
                known[path] = signature
                self._on_problem(f"{error} The last good values stay in use")
            self._suspects[path] = signature
            return
        known[path] = signature
        with self._changed:
            if known is self._known and signal != self.signals[path]:
                self.signals = {**self.signals, path: self._after_earlier(path, signal)}


def _signature(path: str) -> _Signature | None:
    """Return what differs when a file has changed; None if it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name may hold characters that no name has
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
