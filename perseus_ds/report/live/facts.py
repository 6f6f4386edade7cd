"""The facts of a job at one moment, for ``perseus-ds watch``, ``perseus-ds control status`` and metrics alike."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, computed_field

from perseus_ds.artifacts.run_records import PlanTotals
from perseus_ds.report.live.tally import Tally

_LONG_S = 60.0
_LONG_ITERATIONS = 10


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class PlanFacts(_Facts):
    """The plan in use, promised and as it runs."""

    plan: int
    plans: tuple[int, ...] = Field((), description="Of each pipeline.")
    iterations: int = Field(description="Iterations under it of which the figures are typical.")
    promised_slowdown: float | None = Field(description="As a fraction of the time at default clocks.")
    promised_saving: float | None = Field(description="As a fraction of the energy at default clocks.")
    slowdown: float | None = Field(description="Median of the last iterations.")
    saving: float | None = Field(description="Of an iteration of that time at the mean power.")


class PipelineFacts(_Facts):
    """Energy of one data-parallel pipeline [J]."""

    pipeline: int
    energy_j: float = Field(description="All iterations.")
    planned_j: float = Field(description="Iterations under plans.")
    default_j: float = Field(description="What these take at default clocks.")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def saved_j(self) -> float:
        """Energy saved under plans [J]."""
        return self.default_j - self.planned_j


class Happened(_Facts):
    """An event."""

    time: float = Field(description="When [Unix seconds].")
    text: str


class JobFacts(_Facts):
    """All of a job, over all its starts."""

    name: str = Field(description="The name of its output folder.")
    simulated: bool
    mode: str | None
    gpu: str | None
    policy: dict[str, Any] | None
    starts: int
    ended: bool = Field(description="Whether it has said that it ended.")
    silent_s: float | None = Field(description="Since its last record [s].")
    phase: str | None = Field(description="Of the last iteration, or what the job does outside of iterations.")
    next_phase: str | None
    next_in_s: float | None = Field(description="When that begins, as estimated [s].")
    step: int | None = Field(description="The last training step.")
    total_steps: int | None = Field(description="Where the policy names it.")
    remaining_s: float | None = Field(description="Until the last step is done, as estimated [s].")
    iterations: int
    time_s: float = Field(description="Of all iterations [s].")
    energy_j: float = Field(description="Of all iterations [J].")
    without_energy: int = Field(description="Iterations whose energy could not be read.")
    clock_changes: int
    clock_skips: int
    planned: int = Field(description="Iterations under plans that are known at default clocks.")
    planned_s: float
    planned_j: float
    default_s: float = Field(description="What these take at default clocks [s].")
    default_j: float = Field(description="What these take at default clocks [J].")
    default_measured: bool = Field(description="Whether this job measured that; otherwise by the profile.")
    profiling_s: float = Field(description="Additional time for profiling [s]; negative for less.")
    profiling_j: float = Field(description="Additional energy for profiling [J]; negative for less.")
    iteration_s: float | None = Field(description="Iteration time, median of the last ones [s].")
    power_w: float | None = Field(description="Of all GPUs, mean of the last iterations [W].")
    plan: PlanFacts | None
    plans: tuple[PlanTotals, ...] = Field(description="By plan of the frontier in use.")
    pipelines: tuple[PipelineFacts, ...]
    clocks_asked_mhz: tuple[int | None, ...]
    clocks_reached_mhz: tuple[int | None, ...]
    straggler: int | None = Field(description="The pipeline that the others wait for.")
    straggler_slowdown: float = Field(description="How many times as long it takes.")
    drift: float | None
    failed_ranks: tuple[int, ...]
    more_failed_ranks: int
    recent_times_s: tuple[float, ...]
    recent_powers_w: tuple[float | None, ...]
    events: tuple[Happened, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def saved_j(self) -> float:
        """Energy saved under plans, profiling not counted [J]; negative if they took more."""
        return self.default_j - self.planned_j

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gained_s(self) -> float:
        """Time gained under plans, profiling not counted [s]; negative if they took longer."""
        return self.default_s - self.planned_s

    @property
    def is_silent(self) -> bool:
        """Whether the job has been silent for long, and has not said that it ended."""
        if self.ended or self.silent_s is None or self.phase == "halt":
            return False
        expected_s = max(_LONG_ITERATIONS * (self.iteration_s or 0.0), self.next_in_s or 0.0, _LONG_S)
        return self.silent_s > expected_s

    @property
    def ranks_below_their_clock(self) -> list[int]:
        """Ranks whose GPU has not reached the clock that it was asked for."""
        pairs = zip(self.clocks_asked_mhz, self.clocks_reached_mhz, strict=False)
        return [rank for rank, (asked, reached) in enumerate(pairs) if is_below(asked, reached)]


def is_below(asked_mhz: int | None, reached_mhz: int | None) -> bool:
    """Return whether a GPU runs at a lower clock than it was asked for, by more than 2 %."""
    return asked_mhz is not None and reached_mhz is not None and reached_mhz < 0.98 * asked_mhz


def totals_of(tally: Tally) -> dict[str, Any]:
    """Return the totals, by the names that they have in facts and in the record of a job's end."""
    return {name: getattr(tally, name) for name in Tally.__dataclass_fields__}
