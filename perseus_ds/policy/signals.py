"""Signals: a power cap or a fraction of power over time, from files that may change.

A file holds one number, or CSV with the columns ``time`` and ``value``. Rank 0 reads it again when it changes, on a
thread of its own.
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

MOST_SIGNAL_VALUES = 40_000
"""A year of quarter-hours."""
_MOST_BYTES = 8 * MIB
_MOST_VALUE = 1e9
_HEADER = ["time", "value"]
_FIRST_YEAR, _LAST_YEAR = 1970, 2200
_FIRST_S, _END_S = (datetime(year, 1, 1, tzinfo=timezone.utc).timestamp() for year in (_FIRST_YEAR, _LAST_YEAR + 1))
_LONGEST_MESSAGE = 600
_LOOK_EVERY_S = 1.0
_PATIENCE_S = 10.0
_Signature = tuple[int, int, int]
_NEVER: _Signature = (0, 0, 0)


@dataclass(frozen=True)
class Signal:
    """Values over time: each holds until the next one begins.

    Attributes:
        begins_s: When each value begins, ascending [Unix seconds].
        values: As many.
        end_s: When the last value ends [Unix seconds].
    """

    begins_s: tuple[float, ...]
    values: tuple[float, ...]
    end_s: float

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
        return self.end_s if time_s < self.end_s else math.inf


def read_signal(path: Path, use: SignalUse = "cap", now: datetime | None = None) -> Signal:
    """Read a signal; a file with nothing but one number is a signal that does not change.

    Args:
        path: The file.
        use: What its values are.
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
        return _from_csv(text)
    except SignalError as error:  # which repeats what the file holds
        raise SignalError(str(error)[:_LONGEST_MESSAGE]) from None


def _from_csv(text: str) -> Signal:
    try:
        header, *rows = csv.reader(text.splitlines())
    except csv.Error as error:
        raise SignalError(f"not a CSV file ({error}).") from None
    if [name.strip().lower() for name in header] != _HEADER:
        raise SignalError(f'expected one number, or the columns "time,value", found {",".join(header)!r}.')
    if len(rows) > MOST_SIGNAL_VALUES:
        raise SignalError(f"{len(rows)} values, at most {MOST_SIGNAL_VALUES} are read. Remove those of the past.")
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
        raise SignalError("it has one value only, so that it is not known how long it holds: give at least two.")
    return Signal(tuple(begins_s), tuple(values), begins_s[-1] + _usual_step_s(begins_s))


def _entry(row: Sequence[str]) -> tuple[float, float]:
    """Return when the value of a row begins [Unix seconds], and the value."""
    if len(row) != len(_HEADER):
        raise SignalError(f"expected time and value, got {','.join(row)!r}.")
    time, value = (cell.strip() for cell in row)
    if (number := _number(value)) is None:
        raise SignalError(f"expected a number of at most {_MOST_VALUE:g}, got {value!r}.")
    begin_s = _instant(time)
    if not _FIRST_S <= begin_s < _END_S:
        raise SignalError(f"expected a year from {_FIRST_YEAR} to {_LAST_YEAR}, got {time!r}.")
    return begin_s, number


def _usual_step_s(begins_s: Sequence[float]) -> float:
    return min(
        statistics.multimode(after_s - begin_s for begin_s, after_s in itertools.pairwise(begins_s)), default=0.0
    )


def _number(text: str) -> float | None:
    """Return a number that is not too large, or None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= _MOST_VALUE else None


def _instant(text: str) -> float:
    try:
        # Before Python 3.11, "Z" was not understood.
        time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        raise SignalError(f"expected a time such as 2026-11-22T08:00:00+01:00, got {text!r}.") from None
    if time.tzinfo is None:
        raise SignalError(f"{text!r} has no time zone. Write it as 2026-11-22T08:00:00+01:00, or with Z for UTC.")
    return time.timestamp()


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
            read = {file: signal for file, (_, signal) in found.items()}
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
                self.signals = {**self.signals, path: signal}


def _signature(path: str) -> _Signature | None:
    """Return what differs when a file has changed; None if it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name may hold characters that no name has
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
