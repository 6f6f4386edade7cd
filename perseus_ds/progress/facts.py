"""The facts of a job, as ``watch``, ``control status`` and metrics show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from perseus_ds.artifacts.profile import energy_note
from perseus_ds.artifacts.run_events import Ended, Limits, LimitsChanged, PlanChosen, PowerCapChanged, Started
from perseus_ds.artifacts.run_savings import OrderSummary, PlanSummary, SavingSummary, TokenSummary
from perseus_ds.progress.sums import JobSums
from perseus_ds.units import number

_LONG_S = 60.0
_LONG_ITERATIONS = 10


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class PlanFacts(_Facts):
    """The plan in use: its promise and its effect, as fractions of iterations at default clocks."""

    plan: int = Field(description="The plan in use: its index on the frontier, 0 for the fastest.")
    plans: tuple[int, ...] = Field((), description="Plan of each pipeline.")
    promised_slowdown: float | None = Field(description="Promised change of time; 0.01 is 1 % longer.")
    promised_saving: float | None = Field(description="Promised saving of energy; 0.1 is 10 % less.")
    real: SavingSummary = Field(description="Saving of the iterations since the trial of the plan began.")


class PipelineFacts(_Facts):
    """Energy of one data-parallel pipeline [J]."""

    pipeline: int = Field(description="Number of the pipeline.")
    energy_j: float = Field(description="Energy of all iterations.")
    saved_j: float = Field(description="Its share of the energy saved with plans so far, relative to default clocks.")


class Happened(_Facts):
    """An event."""

    time: float = Field(description="When [Unix seconds].")
    text: str = Field(description="What happened, in words.")


class JobFacts(_Facts):
    """Facts of a job over all its starts. Metrics have these descriptions too."""

    name: str = Field(description="The name of its output folder.")
    simulated: bool = Field(description="Whether GPUs are simulated.")
    mode: str | None = Field(description="The mode.")
    gpu: str | None = Field(description="Name of the GPU.")
    energy_note: str = Field(description="What energies include besides those of GPUs, or empty.")
    goal: dict[str, Any] | None = Field(description="Keys of the goal that differ from the defaults.")
    starts: int = Field(description="Number of starts of the job.")
    ended: bool = Field(description="Whether it has recorded its end.")
    killed: bool = Field(description="Whether a rank ended without closing Perseus, such as by SIGKILL.")
    silent_s: float | None = Field(description="Time since the last record of the job.")
    phase: str | None = Field(description="Phase of the last iteration, or activity outside of iterations.")
    next_phase: str | None = Field(description="The next phase.")
    next_in_s: float | None = Field(description="Estimated time until it begins.")
    step: int | None = Field(description="The last training step.")
    total_steps: int | None = Field(description="Steps of the whole training, if given by the goal.")
    remaining_s: float | None = Field(description="Estimated time until the last step is finished.")
    iterations: int = Field(description="Training iterations.")
    time_s: float = Field(description="Time of all iterations.")
    energy_j: float = Field(description="Energy of all iterations.")
    without_energy: int = Field(description="Iterations with an energy that could not be read.")
    clock_changes: int = Field(description="Clock changes of all GPUs.")
    clock_skips: int = Field(description="Clock changes that were omitted.")
    under_plans: SavingSummary | None = Field(description="Saving of all iterations under plans; none before one ran.")
    whole: SavingSummary | None = Field(
        description="Saving of all iterations, profiling and comparisons included; none before a plan ran."
    )
    tokens: TokenSummary | None = Field(description="Energy and throughput by token; none if their number is unknown.")
    profiling_s: float = Field(description="Additional time for profiling; negative for less.")
    profiling_j: float = Field(description="Additional energy for profiling; negative for less.")
    iteration_s: float | None = Field(description="Median time of the last iterations.")
    power_w: float | None = Field(description="Mean power of all GPUs in the last iterations.")
    present_power_w: float | None = Field(description="Power of all GPUs in the last iteration.")
    highest_power_w: float | None = Field(description="Power of all GPUs in the highest of the last 60 seconds.")
    lowest_power_w: float | None = Field(description="Power of all GPUs in the lowest of them.")
    power_change_w: float | None = Field(description="The largest difference from one of them to the next.")
    power_window_s: float | None = Field(description="Duration of such a second: whole iterations, at least one.")
    cap_w: float | None = Field(description="The power cap in force, of all GPUs.")
    limits: Limits = Field(description="GPUs with lower limits than during profiling.")
    more_limits: int = Field(description="Number of further GPUs.")
    pending: str | None = Field(description="A command that is not in force yet, in words.")
    unfinished: str | None = Field(description="Activity at its end, if it ended before it had a plan or a profile.")
    plan: PlanFacts | None = Field(description="The plan in use; null at default clocks.")
    plans: tuple[PlanSummary, ...] = Field(description="By plan of the frontier in use.")
    orders: tuple[OrderSummary, ...] = Field(description="By order of passes; none if all iterations are alike.")
    pipelines: tuple[PipelineFacts, ...] = Field(description="By data-parallel pipeline.")
    waits: tuple[float, ...] = Field(
        (), description="By rank of a pipeline, the share of an iteration in which it waits."
    )
    busy_s: tuple[float, ...] = Field((), description="By rank, the time of its passes, loads and tail in it.")
    powers_w: tuple[float, ...] = Field((), description="By rank, the power of its GPU in the last iterations.")
    clocks_asked_mhz: tuple[int | None, ...] = Field(
        description="By rank, the requested clock of its GPU when it was last read back [MHz]."
    )
    clocks_reached_mhz: tuple[int | None, ...] = Field(description="By rank, the clock that was read [MHz].")
    highest_temperature_c: float | None = Field(
        description="Temperature of the hottest GPU in the last iteration [°C]; none if no GPU reports one."
    )
    recent_highest_temperature_c: float | None = Field(description="The same in the last iterations [°C].")
    straggler: int | None = Field(description="Pipeline for which the others wait.")
    straggler_slowdown: float = Field(description="Time of the slowest pipeline relative to the others.")
    drift: float | None = Field(description="Deviation of instructions from the profile.")
    failed_ranks: tuple[int, ...] = Field(description="Ranks at default clocks after a failure.")
    more_failed_ranks: int = Field(description="Number of further ones.")
    recent_times_s: tuple[float, ...] = Field(description="Times of the last iterations [s].")
    recent_powers_w: tuple[float | None, ...] = Field(description="Mean powers of all GPUs in them [W].")
    events: tuple[Happened, ...] = Field(description="The last events.")

    @property
    def is_silent(self) -> bool:
        """True if the job has been silent for long without recording its end."""
        if self.ended or self.silent_s is None:
            return False
        expected_s = max(_LONG_ITERATIONS * (self.iteration_s or 0.0), self.next_in_s or 0.0, _LONG_S)
        return self.silent_s > expected_s

    @property
    def ranks_below_their_clock(self) -> list[int]:
        """Ranks with a GPU more than 2 % below the requested clock."""
        pairs = zip(self.clocks_asked_mhz, self.clocks_reached_mhz, strict=False)
        return [rank for rank, (asked, reached) in enumerate(pairs) if asked and reached and reached < 0.98 * asked]


def facts_of(job: JobSums, name: str, now: float) -> JobFacts:
    """Return the facts of a job with a name at a time [Unix seconds]."""
    present, profiled = job.present, job.profiled
    start, chosen = present.latest(Started()), present.latest(PlanChosen())
    limits, last, power = present.latest(LimitsChanged()), present.last, present.power.figures
    is_running = last is not None and not present.has_ended
    temperatures_c = [
        record.highest_temperature_c for record in present.recent if record.highest_temperature_c is not None
    ]
    return JobFacts(
        name=name,
        simulated=present.is_simulated,
        mode=start.mode,
        gpu=start.gpu,
        energy_note=energy_note(start.settings),
        goal=present.goal,
        starts=job.history.starts,
        ended=present.has_ended,
        killed=present.was_killed,
        silent_s=present.silent_s(now),
        phase=last.phase if last and is_running else None,
        next_phase=last.next_phase if last and is_running else None,
        next_in_s=present.next_in_s(now) if is_running else None,
        step=last.iteration if last else None,
        total_steps=present.total_steps,
        remaining_s=present.remaining_s(now),
        **_totals(asdict(job.total())),
        under_plans=job.under_plans,
        whole=job.whole,
        tokens=job.tokens,
        profiling_s=-profiled.gained_s,
        profiling_j=-profiled.saved_j,
        iteration_s=present.iteration_s,
        power_w=present.power_w,
        present_power_w=last.power_w if last else None,
        highest_power_w=power and power.highest_w,
        lowest_power_w=power and power.lowest_w,
        power_change_w=power and power.change_w,
        power_window_s=power and power.window_s,
        cap_w=present.latest(PowerCapChanged()).watts,
        limits=limits.limits,
        more_limits=limits.more,
        pending=present.pending,
        unfinished=present.unfinished,
        plan=_plan(job, chosen),
        plans=job.plans(),
        orders=job.orders(),
        pipelines=tuple(
            PipelineFacts(pipeline=number, energy_j=energy_j, saved_j=saved_j)
            for number, (energy_j, saved_j) in enumerate(job.pipelines_j())
        ),
        powers_w=present.powers_w,
        clocks_asked_mhz=present.clocks_asked_mhz,
        clocks_reached_mhz=present.clocks_reached_mhz,
        highest_temperature_c=last.highest_temperature_c if last else None,
        recent_highest_temperature_c=max(temperatures_c, default=None),
        straggler=chosen.straggler,
        straggler_slowdown=chosen.slowdown,
        drift=last.drift if last else None,
        failed_ranks=last.failed_ranks if last else (),
        more_failed_ranks=last.more_failed_ranks if last else 0,
        recent_times_s=tuple(record.time_s for record in present.recent),
        recent_powers_w=tuple(record.power_w for record in present.recent),
        events=tuple(Happened(time=event.time, text=event.in_words()) for event in present.events),
    )


class FigureInWords(NamedTuple):
    """A figure in words, as a row of ``watch`` and as a tile of the report."""

    label: str
    text: str
    title: str
    value: str
    note: str


def figures_in_words(facts: JobFacts) -> Iterator[FigureInWords]:
    """Yield the figures, if they are known, that are a row of ``watch`` (in ASCII) and a tile of the report."""
    if (tokens := facts.tokens) is not None:
        value, words = f"{number(tokens.energy_j)} J", tokens.in_words()
        yield FigureInWords("tokens", words, "Energy of a token", value, words)
    if (now_c := facts.highest_temperature_c) is not None and facts.recent_highest_temperature_c is not None:
        value = f"{facts.recent_highest_temperature_c:.0f} °C"
        note = f"highest temperature in the last {len(facts.recent_times_s)} iterations"
        yield FigureInWords("hottest", f"{now_c:.0f} C", "Hottest GPU", value, note)


def _plan(job: JobSums, chosen: PlanChosen) -> PlanFacts | None:
    last, real = job.present.last, job.of_trial
    if last is None or last.plan is None or last.phase != "run" or real is None:
        return None
    return PlanFacts(
        plan=last.plan,
        plans=chosen.plans,
        promised_slowdown=last.promised_slowdown,
        promised_saving=last.promised_saving,
        real=real,
    )


def end_of(job: JobSums) -> Ended:
    """Return the record of the end of a job, if it ends now."""
    return Ended(
        **_totals(asdict(job.since_start)),
        under_plans=job.under_plans,
        whole=job.whole,
        tokens=job.tokens,
        plans=job.plans(),
        orders=job.orders(),
    )


_TOTALS = ("iterations", "time_s", "energy_j", "without_energy", "clock_changes", "clock_skips")


def _totals(sums: dict[str, Any]) -> dict[str, Any]:
    return {name: sums[name] for name in _TOTALS}
