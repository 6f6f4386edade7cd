"""An iteration of the whole job: the run that a mode requests, and the reports of all ranks.

A mode is a coroutine. It awaits the iterations of the job one by one, and each time specifies what the following
iterations run::

    seen = await iteration(Run("default"))

This takes effect one or two iterations later. Therefore ``seen.run`` is what the iteration actually ran, or None if
not all ranks ran the same from its start to its end. Iterations without a known run are not used as evidence.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import coroutine
from typing import Any, TypeAlias

from perseus_ds.pipeline.schedule import Span, decode_spans
from perseus_ds.policy.plans import Plans
from perseus_ds.policy.reports import JobDrift, JobReport, RankReports
from perseus_ds.protocol.job_messages import RankReport, Times
from perseus_ds.savings import Size
from perseus_ds.server.job import Order


@dataclass(frozen=True)
class NextPhase:
    """The next phase, with an estimate of the time until it begins [s], or None if unknown."""

    phase: str
    in_s: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """Specification of the clocks and measurements of iterations.

    Attributes:
        phase: Name of the phase, as in ``run.jsonl``.
        clock_mhz: One clock for all instructions of all ranks in all orders [MHz]; None for default clocks or plans.
        plans: Plans by the number of an order. All other orders run at ``clock_mhz``.
        times: Times that ranks measure in iterations whose number is a multiple of ``every``.
        otherwise: Times that they measure in all other iterations.
        logs_energy: Whether ranks report each refresh of their energy counters.
        next_phase: None if no other phase is expected.
        status: Values for ``perseus-ds control status``.
    """

    phase: str
    clock_mhz: int | None = None
    plans: Mapping[int, Plans] = field(default_factory=dict)
    times: Times = "none"
    every: int = 1
    otherwise: Times = "none"
    logs_energy: bool = False
    next_phase: NextPhase | None = None
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """True if iterations run under plans."""
        return bool(self.plans)

    @property
    def is_at_default_clocks(self) -> bool:
        return not self.plans and self.clock_mhz is None

    def phase_of(self, order: int) -> str:
        """Return the phase of iterations of an order. Those without plans run at default clocks under the others'."""
        return "observe" if self.plans and order not in self.plans else self.phase

    def clocks(self, order: int) -> tuple[Any, ...]:
        """Return a key that identifies the clocks of an order."""
        plans = self.plans.get(order)
        return self.clock_mhz, None if plans is None else plans.key

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key that identifies everything that ranks or records need to distinguish."""
        plans = tuple((order, plans.key) for order, plans in self.plans.items())
        return self.phase, self.clock_mhz, plans, self.times, self.every, self.otherwise, self.logs_energy


@dataclass(eq=False)
class Seen:
    """An iteration that all ranks have reported.

    Attributes:
        number: Training step, starting at 1.
        iteration: Number of the iteration since the job started.
        run: What all ranks ran from its start to its end; None if they differ.
        ranks: The figures of the reports, each as an array over ranks.
        messages: The reports as received, by rank.
        contents: Its operations as received, by rank.
        streams: The operations of its order, by rank. Empty if unknown.
        ended: Time of its end [Unix seconds].
        order: Its order; None if its schedule is not known.
        drift: Deviation from the profile under plans; None if it was not measured in this iteration.
    """

    number: int
    iteration: int
    run: Run | None
    ranks: RankReports
    messages: Sequence[RankReport]
    contents: Mapping[int, bytes]
    streams: Sequence[Sequence[Any]]
    ended: float
    order: Order | None = None
    drift: JobDrift | None = None

    @cached_property
    def job_report(self) -> JobReport:
        return JobReport.of(self.ranks)

    @property
    def time_s(self) -> float:
        return self.job_report.time_s

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens of a micro-batch in the inputs of each pipeline. 0 if unknown."""
        micro_batches = self.order.job.schedule.micro_batches if self.order is not None else 1
        return [tokens / micro_batches for tokens in self.ranks.by_pipeline(self.ranks.tokens).tolist()]

    @property
    def size(self) -> Size | None:
        """Size of its inputs. None if it is unknown."""
        return Size.of(self.tokens)

    @property
    def plans(self) -> Plans | None:
        """Its plans; None if it ran at default clocks, or not all ranks ran the same."""
        if self.run is None or self.order is None:
            return None
        return self.run.plans.get(self.order.number)

    def spans(self, rank: int) -> list[Span]:
        """Return the operations of a rank, relative to the iteration's start. Empty if not measured."""
        if not self.streams:
            return []
        return decode_spans(self.contents.get(rank, b""), self.streams[rank])


@coroutine
def iteration(run: Run) -> Generator[Run, Seen, Seen]:
    """Request what the following iterations run, and wait for the next one, whatever it runs."""
    return (yield run)


async def iteration_of(run: Run) -> Seen:
    """Wait for the next iteration of a known order in which all ranks run ``run``."""
    while True:
        seen = await iteration(run)
        if seen.run is not None and seen.run.key == run.key and seen.streams:
            return seen


Mode: TypeAlias = Coroutine[Run, Seen, None]
"""A coroutine that awaits iterations."""
