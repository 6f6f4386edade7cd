"""A signal: a price, a carbon intensity or a power cap over time."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perseus_ds.errors import SignalError

Numbers = npt.NDArray[np.float64]


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
        if not self.begins_s[0] <= time_s < self.end_s:
            return self.mean
        return self.values[bisect.bisect_right(self.begins_s, time_s) - 1]

    def held_at(self, time_s: float) -> float:
        """Return the value at a time [Unix seconds]; the last one where the signal has ended."""
        return self.values[max(0, bisect.bisect_right(self.begins_s, time_s) - 1)]

    def next_change_s(self, time_s: float) -> float:
        """Return when the next value begins, or the last one ends [Unix seconds]; infinity after that."""
        following = bisect.bisect_right(self.begins_s, time_s)
        if following < len(self.begins_s):
            return self.begins_s[following]
        return self.end_s if time_s < self.end_s else np.inf

    def between(self, begin_s: float, end_s: float) -> tuple[Numbers, Numbers]:
        """Return the parts of a span of time in which the value is constant.

        Args:
            begin_s: Begin of the span [Unix seconds].
            end_s: Its end, > begin_s [Unix seconds].

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

    def check_is_of(self, now: datetime) -> None:
        """Check that it has a value for a time.

        Raises:
            SignalError: It has ended, or not begun.
        """
        if now.timestamp() >= self.end_s:
            raise SignalError(f"all its values are of the past: it ended at {_text(self.end_s)}.")
        if now.timestamp() < self.begins_s[0]:
            raise SignalError(f"it has no value for the present: it begins at {_text(self.begins_s[0])}.")


def signal_of(begins_s: Sequence[float], values: Sequence[float], *, end_s: float | None = None, unit: str) -> Signal:
    """Return the signal of consecutive values, equally far apart.

    Args:
        begins_s: When each begins, ascending [Unix seconds].
        values: The values.
        end_s: When the last one ends [Unix seconds]; None if it is as long as most others.
        unit: Of the values.

    Raises:
        SignalError: There are none, or values between them are missing.
    """
    if not begins_s:
        raise SignalError("it has no values.")
    if len(begins_s) == 1 and end_s is None:
        raise SignalError("it has one value only, so that nobody knows how long it holds: give at least two.")
    steps_s = np.diff(begins_s)
    usual_s = _most_common(steps_s) if len(steps_s) else 0.0
    gaps = np.flatnonzero(steps_s > usual_s)
    if gaps.size:
        begin_s, after_s = begins_s[gaps[0]], begins_s[gaps[0] + 1]
        raise SignalError(
            f"it has a gap between {_text(begin_s)} and {_text(after_s)}: other values are {usual_s / 60:g} min apart."
        )
    return Signal(tuple(begins_s), tuple(values), begins_s[-1] + usual_s if end_s is None else end_s, unit)


def _most_common(steps_s: Numbers) -> float:
    found, counts = np.unique(steps_s, return_counts=True)
    return float(found[counts.argmax()])


def _text(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc):%FT%TZ}"
