"""The jobs of a report, with all that is computed of them: what page and text show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.report.history import History
from perseus_ds.report.parts import Share
from perseus_ds.report.savings import Reference, Savings, reference_for, savings_of
from perseus_ds.report.sources import Sources
from perseus_ds.report.totals import RunTotals, shares_of, totals_of
from perseus_ds.report.trend import Trend, trend_of


@dataclass(frozen=True)
class Job:
    """A job of the report.

    Attributes:
        history: All that it did.
        totals: What the whole of it took.
        shares: Its energy by rank or by pipeline; empty where that is not known.
        reference: An iteration at default clocks; None where nothing says what that takes.
        savings: What it saved; None if it ran under no plan, or nothing says what default clocks take.
        trend: How that developed; None where it is too short to tell.
    """

    history: History
    totals: RunTotals
    shares: list[Share]
    reference: Reference | None
    savings: Savings | None
    trend: Trend | None


def jobs_of(found: Sources) -> list[Job]:
    """Return the jobs in the order they were started."""
    return [_job(history, found) for history in found.histories]


def main_job(jobs: Sequence[Job]) -> Job | None:
    """Return the job whose figures stand first: the last one that saved something, best against what was measured."""
    saved = [job for job in jobs if job.savings is not None]
    measured = [job for job in saved if job.reference is not None and job.reference.measured]
    candidates = measured or saved or [job for job in jobs if job.history.steps]
    return candidates[-1] if candidates else None


def _job(history: History, found: Sources) -> Job:
    reference = reference_for(history, found.histories, found.frontier)
    return Job(
        history=history,
        totals=totals_of(history, found.size),
        shares=shares_of(history),
        reference=reference,
        savings=savings_of(history, reference) if reference else None,
        trend=trend_of(history, reference) if reference else None,
    )
