"""Iterations at default clocks of this job, with which plans and predictions are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from perseus_ds.device.timers import Span
from perseus_ds.policy.plan_proof import IterationSample
from perseus_ds.profiler.fixed_durations import without_gaps
from perseus_ds.runtime.phases import IterationMeasurement, NextIteration, Outlook, Phase, one_iteration

# The first iteration after a change of clocks begins at the clocks before.
_SETTLED = 2
_KEPT = 4


class DefaultIterations:
    """Iterations at default clocks, one right after the other.

    Args:
        counter_period_s: How often energy counters are refreshed [s].

    Their times are those that all ranks have reported, an iteration later: asking for the last one's would wait for the
    device, which iterations under a plan do not.

    Attributes:
        sample: Time and energy of the whole job.
    """

    def __init__(self, counter_period_s: float) -> None:
        self.sample = IterationSample(counter_period_s)
        self._latest: deque[IterationMeasurement] = deque(maxlen=_KEPT)
        self._iterations = 0
        self._last_s: float | None = None

    @property
    def remaining_s(self) -> float | None:
        """About how long it takes until they are enough [s]; None before the first report of one."""
        unsettled = max(0, _SETTLED + 1 - self._iterations)
        return self.sample.remaining_s(self._last_s, unsettled) if self._last_s else None

    def spans(self) -> list[list[Span]]:
        """Return the operations of this rank in the last of them; waits until the device has done them."""
        return [without_gaps(seen.spans(), seen.time_s) for seen in self._latest]

    def add(self, seen: IterationMeasurement) -> None:
        """Add an iteration, and the reports of the one before it."""
        self._iterations += 1
        if self._iterations >= _SETTLED:
            self._latest.append(seen)
        if seen.reports is not None and self._iterations > 1:
            self._last_s = seen.reports.time_s
        if seen.reports is not None and self._iterations > _SETTLED:
            self.sample.add_reports(seen.reports)


def measure_default(default: DefaultIterations) -> Phase[None]:
    """Run iterations at default clocks until time and energy are known well enough to compare plans with."""
    return run_at_default_clocks(
        "default",
        default,
        goes_on=lambda _: not default.sample.is_enough,
        outlook=lambda: Outlook("run", default.remaining_s),
    )


def run_at_default_clocks(
    phase: str,
    default: DefaultIterations,
    *,
    goes_on: Callable[[IterationMeasurement | None], bool],
    outlook: Callable[[], Outlook],
    vote: Callable[[], bool] = lambda: False,
) -> Phase[None]:
    """Run iterations at default clocks.

    Args:
        phase: As it is called in ``run.jsonl``.
        default: The iterations are added to it.
        goes_on: Returns whether to run one more, from what was seen of the last one, if any; the same on all ranks.
        outlook: Returns what follows.
        vote: Returns what this rank reports with each iteration.
    """
    seen: IterationMeasurement | None = None
    while goes_on(seen):
        seen = yield from one_iteration(NextIteration(phase, outlook=outlook(), reported={"vote": vote()}))
        default.add(seen)
