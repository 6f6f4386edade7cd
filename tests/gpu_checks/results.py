"""The figures of one check, and whether it passed."""

import json
import statistics
import time
import traceback

import numpy as np

from perseus_ds.artifacts.evidence import CheckResult, Figure

UNFINISHED = "it did not come to its end"
"""Reason of a failed check of which only some parts were performed."""


class Results:
    """The figures of one check, which are written to a file after each of its parts."""

    def __init__(self, name, title, path=None):
        self.figures, self.notes, self.machine = [], [], None
        self._name, self._title, self._path = name, title, path
        self._began_s = time.perf_counter()

    def add(self, name, value, unit="", *, at_least=None, at_most=None):
        """Add a figure with its limits."""
        self.figures.append(Figure(name=name, value=float(value), unit=unit, at_least=at_least, at_most=at_most))

    def add_fact(self, name, is_so):
        """Add a fact that must hold, as a figure that must be 1."""
        self.add(name, is_so, at_least=1)

    def add_times(self, name, times_s, *, p99_at_most_ms=None):
        """Add the median, 99th percentile and maximum of times."""
        self.add(f"{name}, median", statistics.median(times_s) * 1e3, "ms")
        self.add(f"{name}, 99th percentile", percentile(times_s, 0.99) * 1e3, "ms", at_most=p99_at_most_ms)
        self.add(f"{name}, largest", max(times_s) * 1e3, "ms")

    def note(self, text):
        self.notes.append(text)

    def attempt(self, what, part):
        """Perform a part of the check. If it raises an error, the check fails but continues."""
        try:
            part()
        except Exception as error:
            self.add_fact(f"{what}: could be made", False)
            self.note(f"{what}: {_last_line(error)}")
        self.finish(UNFINISHED)

    def finish(self, reason):
        """Write and return the result: failed if there is a reason or a figure beyond its limits."""
        beyond = [
            f"{f.name}: {f.value:.6g} {f.unit}".rstrip() + f" ({f.limits})"
            for f in self.figures
            if not f.is_within_limits and reason != UNFINISHED
        ]
        reasons = [reason] * bool(reason) + beyond
        result = CheckResult(
            name=self._name,
            title=self._title,
            outcome="failed" if reasons else "passed",
            reason="; ".join(reasons) or None,
            took_s=round(time.perf_counter() - self._began_s, 3),
            figures=self.figures,
            notes=self.notes,
        )
        if self._path is not None:
            written = self._path.with_suffix(".part")
            written.write_text(json.dumps({"machine": self.machine, "result": result.model_dump()}))
            written.replace(self._path)
        return result


def performed(name, title, check, open_machine, path=None):
    """Perform a check on a machine and return its result, in which an error is the reason."""
    results, reason = Results(name, title, path), ""
    try:
        machine = open_machine()
        results.machine = machine.described().model_dump()
        check(machine, results)
        if not results.figures:
            reason = "it measured nothing"
    except Exception as error:
        reason = _last_line(error)
        results.note("".join(traceback.format_exception(error))[-3000:])
    return results.finish(reason)


def _last_line(error):
    return f"{type(error).__name__}: {error}".strip()[:1000]


def percentile(values, share):
    """Return the smallest value such that this share of the values is not above it."""
    return float(np.quantile(values, share, method="inverted_cdf"))
