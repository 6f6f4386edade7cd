"""Collects the figures of one check and decides whether it passed."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from perseus_ds.artifacts.evidence import CheckResult, Figure

UNFINISHED = "it did not come to its end"
"""Reason of a failed check of which only some parts were performed."""


class Results:
    """The figures of one check."""

    def __init__(self, after_part: Callable[[Results], None] = lambda results: None) -> None:
        """Start without figures.

        Args:
            after_part: Called after each part of the check.
        """
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self._after_part = after_part

    def add(
        self, name: str, value: float, unit: str = "", *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Add a figure with its limits."""
        figure = Figure(name=name, value=float(value), unit=unit, at_least=at_least, at_most=at_most)
        self.figures.append(figure)

    def add_fact(self, name: str, is_so: bool) -> None:
        """Add a fact that must hold, as a figure that must be 1."""
        self.add(name, is_so, at_least=1)

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(text)

    def attempt(self, what: str, part: Callable[[], None]) -> None:
        """Perform a part of the check. If it raises an error, the check fails but continues."""
        try:
            part()
        except Exception as error:
            self.add_fact(f"{what}: could be made", False)
            self.note(f"{what}: {last_line(error)}")
        self._after_part(self)


def performed(
    name: str,
    title: str,
    check: Callable[[Any, Results], None],
    machine: Callable[[], Any],
    after_part: Callable[[CheckResult], None] = lambda result: None,
) -> CheckResult:
    """Perform a check on a machine and return its result, in which an error is the reason."""
    began_s, reason = time.perf_counter(), ""

    def result_of(results: Results, reason: str) -> CheckResult:
        return CheckResult(
            name=name,
            title=title,
            outcome="failed" if reason else "passed",
            reason=reason or None,
            took_s=round(time.perf_counter() - began_s, 3),
            figures=results.figures,
            notes=results.notes,
        )

    results = Results(lambda results: after_part(result_of(results, UNFINISHED)))
    try:
        check(machine(), results)
        if not results.figures:
            reason = "it measured nothing"
    except Exception as error:
        reason = last_line(error)
        results.note("".join(traceback.format_exception(error))[-3000:])
    beyond = [
        f"{f.name}: {f.value:.6g} {f.unit}".rstrip() + f" ({f.limits})"
        for f in results.figures
        if not f.is_within_limits
    ]
    reason = "; ".join([reason] * bool(reason) + beyond)
    return result_of(results, reason)


def last_line(error: BaseException) -> str:
    """Return the type of an error and its message."""
    return f"{type(error).__name__}: {error}".strip()[:1000]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that this share of the values is not above it."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def add_times(results: Results, name: str, times_s: Sequence[float], *, p99_at_most_ms: float | None = None) -> None:
    """Add the median, 99th percentile and maximum of times."""
    results.add(f"{name}, median", statistics.median(times_s) * 1e3, "ms")
    results.add(f"{name}, 99th percentile", percentile(times_s, 0.99) * 1e3, "ms", at_most=p99_at_most_ms)
    results.add(f"{name}, largest", max(times_s) * 1e3, "ms")
