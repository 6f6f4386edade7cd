"""Signals: power caps or fractions of power over time, read from files that may change.

A file contains one number, or CSV with the columns ``time`` and ``value``. A thread of the job's server reads it again
when it changes.
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
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from perseus_ds.artifacts.io import read_text
from perseus_ds.artifacts.validation import MIB
from perseus_ds.errors import SignalError
from perseus_ds.policy.policies import PolicyConfig, SignalUse, signal_files
from perseus_ds.timebase import Flag, Timebase

# A year of values for each quarter of an hour.
_MOST_VALUES = 40_000
_MOST_BYTES = 8 * MIB
_MOST_VALUE = 1e9
_HEADER = ["time", "value"]
_FIRST_YEAR, _LAST_YEAR = 1970, 2200
_FIRST_S, _END_S = (datetime(year, 1, 1, tzinfo=timezone.utc).timestamp() for year in (_FIRST_YEAR, _LAST_YEAR + 1))
_LONGEST_MESSAGE = 600
_POLL_S = 1.0
# Agents return to default clocks after 2 s without messages from the server.
_READ_TIMEOUT_S = 1.0
_Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Signal:
    """Values over time, each valid until the next one begins. Begins and end are in ascending Unix seconds."""

    begins_s: tuple[float, ...]
    values: tuple[float, ...]
    end_s: float

    def held_at(self, time_s: float) -> float:
        """Return the value at a time [Unix seconds]. After the end it is the last value."""
        return self.values[max(0, bisect.bisect_right(self.begins_s, time_s) - 1)]

    def fraction_at(self, time_s: float) -> float:
        """Return the requested fraction of power at a time [Unix seconds]. It is 1 before begin and after end."""
        return self.held_at(time_s) if self.begins_s[0] <= time_s < self.end_s else 1.0

    def next_change_s(self, time_s: float) -> float:
        """Return when the next value begins or the last one ends [Unix seconds]. Infinite after the end."""
        following = bisect.bisect_right(self.begins_s, time_s)
        if following < len(self.begins_s):
            return self.begins_s[following]
        return self.end_s if time_s < self.end_s else math.inf


def read_signal(path: Path, use: SignalUse = "cap", now: datetime | None = None) -> Signal:
    """Read a signal. A file with a single number is a constant signal.

    If ``now`` is given, a cap must have a value for this time. Fractions are 1 at all times without a value.

    Raises:
        SignalError: The file is missing or invalid. The message names file and row.
    """
    text = read_text(path, SignalError, "file of a signal", _MOST_BYTES)
    try:
        signal = parse_signal(text.strip())
        if use == "fraction":
            if wrong := [value for value in signal.values if not 0 < value <= 1]:
                raise SignalError(
                    f"expected fractions of the power at default clocks, above 0 and at most 1 (1 for no reduction), "
                    f"got {wrong[0]:g}."
                )
        elif now is not None and now.timestamp() >= signal.end_s:
            raise SignalError(f"all its values are in the past: it ended at {_text(signal.end_s)}.")
        elif now is not None and now.timestamp() < signal.begins_s[0]:
            raise SignalError(f"it has no value for the current time: it begins at {_text(signal.begins_s[0])}.")
    except SignalError as error:  # its message may quote the file
        raise SignalError(f"{path}: {str(error)[:_LONGEST_MESSAGE]}") from None
    return signal


def parse_signal(text: str) -> Signal:
    """Parse the contents of a signal file. Raises SignalError, which names the row."""
    if not text:
        raise SignalError("the file is empty.")
    if (constant := _number(text)) is not None:
        return Signal((-math.inf,), (constant,), math.inf)
    try:
        header, *rows = csv.reader(text.splitlines())
    except csv.Error as error:
        raise SignalError(f"not a CSV file ({error}).") from None
    if [name.strip().lower() for name in header] != _HEADER:
        raise SignalError(f'expected one number, or the columns "time,value", found {",".join(header)!r}.')
    if len(rows) > _MOST_VALUES:
        raise SignalError(f"{len(rows)} values, expected at most {_MOST_VALUES}. Remove those in the past.")
    begins_s: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            begin_s, value = _entry(row)
            if begins_s and begin_s <= begins_s[-1]:
                raise SignalError(f"{row[0]!r} is not after the time of the row above. Sort the rows.")
        except SignalError as error:
            raise SignalError(f"row {number}: {error}") from None
        begins_s.append(begin_s)
        values.append(value)
    if not begins_s:
        raise SignalError("it has no values.")
    if len(begins_s) == 1:
        raise SignalError("it has only one value, so its end is unknown. Add a second row.")
    usual_step_s = min(statistics.multimode(after_s - begin_s for begin_s, after_s in itertools.pairwise(begins_s)))
    return Signal(tuple(begins_s), tuple(values), begins_s[-1] + usual_step_s)


def _entry(row: Sequence[str]) -> tuple[float, float]:
    """Return the begin [Unix seconds] and the value of a row."""
    if len(row) != len(_HEADER):
        raise SignalError(f"expected time and value, got {','.join(row)!r}.")
    time, value = (cell.strip() for cell in row)
    if (number := _number(value)) is None:
        raise SignalError(f"expected a number of at most {_MOST_VALUE:g}, got {value!r}.")
    begin_s = _instant(time)
    if not _FIRST_S <= begin_s < _END_S:
        raise SignalError(f"expected a year from {_FIRST_YEAR} to {_LAST_YEAR}, got {time!r}.")
    return begin_s, number


def _number(text: str) -> float | None:
    """Return the number in a text. None if it is not a number or too large."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= _MOST_VALUE else None


def _instant(text: str) -> float:
    try:
        # Python before 3.11 does not accept "Z".
        time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        raise SignalError(f"expected a time such as 2026-11-22T08:00:00+01:00, got {text!r}.") from None
    if time.tzinfo is None:
        raise SignalError(f"{text!r} has no time zone. Write it as 2026-11-22T08:00:00+01:00, or with Z for UTC.")
    return time.timestamp()


def _text(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%FT%TZ}"


@dataclass
class _File:
    """A file that is watched.

    Attributes:
        known: Signature of its contents when they were last used or reported. None if there was no file.
        suspect: Signature of contents that were found invalid once. They may have been half written.
    """

    use: SignalUse
    known: _Signature | None
    suspect: _Signature | None = (0, 0, 0)


class SignalWatch:
    """Keeps the last valid values of a policy's signals, so that decisions never wait for a file system.

    Attributes:
        signals: Last valid values, by file.
    """

    def __init__(self, timebase: Timebase, on_problem: Callable[[str], None]) -> None:
        """Create a watch without files. ``on_problem`` is called on another thread with what is wrong with a file."""
        self.signals: Mapping[str, Signal] = {}
        self._timebase = timebase
        self._on_problem = on_problem
        self._changed = timebase.condition()
        self._is_closed = False
        self._is_watching = False
        self._files: Mapping[str, _File] = {}

    def follow(self, policy: PolicyConfig, timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Read the signals of a policy, each within a time [s], and watch their files from now on.

        Raises:
            SignalError: A file cannot be used. The signals are unchanged.
        """
        found = {path: self._read_with_timeout(path, use, timeout_s) for path, use in signal_files(policy).items()}
        with self._changed:
            self._files = {path: file for path, (file, _) in found.items()}
            # Those of the previous policy are kept, because it may make one more decision.
            self.signals = {**self.signals, **{path: signal for path, (_, signal) in found.items()}}
            begins = bool(found) and not self._is_watching and not self._is_closed
            self._is_watching = self._is_watching or begins
        if begins:
            self._timebase.thread(self._watch, "perseus-signals").start()

    def follow_if_possible(self, policy: PolicyConfig) -> None:
        """Follow a policy, but only report files that cannot be used."""
        try:
            self.follow(policy)
        except SignalError as error:
            self._on_problem(str(error))

    def close(self) -> None:
        """Stop the thread. May be called repeatedly."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _read_with_timeout(self, path: str, use: SignalUse, timeout_s: float) -> tuple[_File, Signal]:
        """Read a file on another thread, because a file system may hang."""
        done = Flag(self._timebase)
        found: list[tuple[_File, Signal] | SignalError] = []

        def read() -> None:
            try:
                found.append((_File(use, _signature(path)), self._read(path, use)))
            except SignalError as error:
                found.append(error)
            finally:
                done.set()

        self._timebase.thread(read, "perseus-signal").start()
        done.wait(timeout_s)
        if not found:
            raise SignalError(f"{path}: the signal cannot be read: no answer for {timeout_s:.0f} s.")
        if isinstance(found[0], SignalError):
            raise found[0]
        return found[0]

    def _read(self, path: str, use: SignalUse) -> Signal:
        try:
            return read_signal(Path(path), use, self._timebase.date())
        except SignalError:
            raise
        except Exception as error:  # no content of a file may end the thread
            raise SignalError(f"{path}: the signal cannot be read ({error!r}).") from error

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_POLL_S)
                if self._is_closed:
                    return
                files = self._files
            for path, file in files.items():
                self._read_if_changed(path, file)

    def _read_if_changed(self, path: str, file: _File) -> None:
        signature = _signature(path)
        if signature == file.known:
            return
        try:
            signal = self._read(path, file.use)
        except SignalError as error:
            if signature == file.suspect:
                file.known = signature
                self._on_problem(f"{error} The last valid values stay in use")
            file.suspect = signature
            return
        file.known = signature
        with self._changed:
            if self._files.get(path) is file:
                self.signals = {**self.signals, path: signal}


def _signature(path: str) -> _Signature | None:
    """Return a signature of a file that changes with its contents. None if there is no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # the name may contain invalid characters
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
