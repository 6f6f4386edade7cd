"""Kinds of iterations, such as orders or input shapes, each of which goes through its own phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from perseus_ds.policy.reports import JobReport, RankReports
from perseus_ds.runtime.iterations import UNPLANNED, IterationMeasurement, NextIteration, Phase

OFTEN, LAST = 5, 50
"""A kind gets plans if 5 of the last 50 iterations were of it: planning takes about twenty of its iterations."""
MOST_KINDS = 6
"""Number of kinds that have plans at a time."""
MOST_NUMBERS = 254
"""Number of kinds that get plans during a job, each with a folder of its own."""
MEASURING = ("warm-up", "profile")
"""The phases in which the profile of a kind is not complete."""
UNUSED = 500
"""A kind that was not seen in this number of iterations may be replaced by another one."""

K = TypeVar("K", bound=Hashable)


class KindOfIteration:
    """The phases of one kind of iterations, with the measurements and reports of that kind only.

    Attributes:
        number: Number in records.
        phases: The phases. None after they have been given up.
        wanted: Request for iterations of this kind.
        came: Number of the last iteration of this kind.
    """

    def __init__(self, number: int, phases: Phase[Any], came: int = 0) -> None:
        self.number = number
        self.phases: Phase[Any] | None = phases
        self.wanted: NextIteration = UNPLANNED
        self.came = came
        self._reports: tuple[JobReport | None, RankReports | None] = None, None

    def begin(self) -> None:
        """Start the phases, which decide on the first iteration of this kind."""
        assert self.phases is not None, "they are begun once"
        self.wanted = next(self.phases)

    def add_reports(self, following: IterationMeasurement) -> None:
        """Keep the reports of the last iteration of this kind, which arrive with the following iteration."""
        self._reports = following.reports, following.ranks

    def advance(self, received: IterationMeasurement | Mapping[str, Any]) -> None:
        """Pass a measurement or the progress of a checkpoint to the phases, which select the next request.

        Raises:
            PerseusError: Of the phases.
            StopIteration: They have ended.
        """
        assert self.phases is not None, "they have not been given up"
        (reports, ranks), self._reports = self._reports, (None, None)
        if isinstance(received, IterationMeasurement):
            received = replace(received, reports=reports, ranks=ranks)
        self.wanted = self.phases.send(received)

    def close(self) -> None:
        """End the phases, after which iterations of this kind run at default clocks."""
        if self.phases is not None:
            self.phases.close()
        self.phases, self.wanted = None, UNPLANNED


class FrequentKinds(Generic[K]):
    """Counts the kinds of the last iterations.

    Attributes:
        iterations: Number of iterations.
        last: The kinds of the last iterations.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.last: deque[K] = deque(maxlen=LAST)

    def add(self, kind: K) -> None:
        """Add an iteration."""
        self.iterations += 1
        self.last.append(kind)

    def is_frequent(self, kind: K) -> bool:
        """Return whether a kind is frequent enough for plans."""
        return self.last.count(kind) >= OFTEN

    def unused(self, planned: Mapping[K, KindOfIteration]) -> K | None:
        """Return the kind to be replaced by another one, or None if all are in use."""
        oldest = min(planned, key=lambda kind: planned[kind].came)
        return oldest if self.iterations - planned[oldest].came >= UNUSED else None
