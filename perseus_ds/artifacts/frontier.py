"""Files of the frontier of Pareto-optimal frequency plans.

Tables of several frontiers and plans in Zeus's format are here as well.

Zeus and lowtime store a plan in ``freqs_pipeline_%05d.py`` as one Python literal: a list with one list per pipeline
rank of ``(instruction, MHz)`` in program order. These files are parsed as data and never executed.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from perseus_ds.artifacts.io import (
    FileModel,
    check_json_size,
    parse_json,
    read_model,
    read_text,
    write_together,
)
from perseus_ds.artifacts.layout import Layout
from perseus_ds.artifacts.plan import ClockTimes, FrequencyPlan, InstructionStreams, PowerSwing
from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.artifacts.validation import (
    MIB,
    MOST_CLOCK_MHZ,
    MOST_PLANS,
    MOST_STAGES,
    Clock,
    Duration,
    Energy,
    Many,
    MicroBatch,
    MicroBatchCount,
    Power,
    Stage,
    StageCount,
    Text,
    Time,
    brief,
    explain,
)
from perseus_ds.errors import DeadlineError, FrontierError, ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule

# Deadlines are computed from measured times. A plan that is late only due to rounding meets its deadline.
_TOLERANCE = 1e-9
# Differences in time up to this fraction cannot be measured in a job.
NO_SLOWER = 0.001
_MOST_ALTERNATIVES = 20
_POWERS = ("mean_power_w", "highest_power_w", "lowest_power_w", "power_change_w")
SLOWDOWNS = (0.0, 0.01, 0.02, 0.05)
"""Relative increases over the time at the highest clock at which savings are compared."""
_AS_GOOD = 0.005
"""Savings that differ by less than this fraction of the energy count as equal."""


def time_limit_s(default_s: float, t_min_s: float, slowdown: float) -> float:
    """Return the longest iteration time that is slower than default clocks by at most ``slowdown`` [s].

    ``T_min`` is the fastest of noisy rows, so default clocks, which take ``default_s``, seldom reach it.
    """
    return max(default_s, t_min_s) * (1 + slowdown + NO_SLOWER)


class Provenance(FileModel):
    """The inputs from which a frontier was computed."""

    schedule: Text
    micro_batches: MicroBatchCount
    tokens_per_micro_batch: Annotated[float, Field(gt=0)] | None = None
    stages: StageCount
    blocking_power_w: Power
    least_dwell_s: Duration = 0.0
    reserve: Annotated[float, Field(ge=0, le=1)] = 0.0
    solver: Text
    simulated: bool | None = None
    gpu: Text | None = None
    settings: GpuSettings | None = None
    model: Text | None = None
    layout: Layout | None = None
    profile: Text | None = None


class AlternativePoint(NamedTuple):
    """An iteration of one pipeline, with one GPU per rank, under a setting other than a plan."""

    time_s: Time
    energy_j: Energy
    setting: Text


P = TypeVar("P", FrequencyPlan, AlternativePoint)


@dataclass(frozen=True)
class Alternative:
    """A simple setting that one could use instead of plans, with its points by ascending time and descending energy."""

    name: str
    points: tuple[AlternativePoint, ...]

    def within(self, deadline_s: float) -> AlternativePoint | None:
        """Return the point of least energy that meets the deadline, or None if none does."""
        in_time = [point for point in self.points if point.time_s <= deadline_s * (1 + _TOLERANCE)]
        return in_time[-1] if in_time else None


@dataclass(frozen=True)
class Frontier:
    """Plans by ascending time and descending energy.

    Attributes:
        plans: The plans, the fastest first. The last one is the energy optimum ``T*``.
        t_min_s: Makespan with every instruction at its fastest measured clock [s].
        baseline: The plan with every instruction at the highest measured clock, the cost without Perseus.
        instruction_times_s: The profile's duration of an instruction, by stage, kind and clock [s].
        schedule: The schedule for which the plans were made, or None if the file does not contain it.
        alternatives: Simple alternatives to the plans, computed for reports and not by jobs.
    """

    plans: tuple[FrequencyPlan, ...]
    t_min_s: float
    baseline: FrequencyPlan
    provenance: Provenance
    instruction_times_s: ClockTimes = field(default_factory=dict)
    schedule: Schedule | None = field(default=None, repr=False)
    alternatives: tuple[Alternative, ...] = ()

    @property
    def t_star_s(self) -> float:
        """Iteration time at which energy is lowest [s]."""
        return self.plans[-1].time_s

    @property
    def instructions(self) -> InstructionStreams:
        """The instructions of each rank in program order."""
        return self.plans[0].instructions

    @cached_property
    def _times_s(self) -> list[float]:
        return [plan.time_s for plan in self.plans]

    def lookup(self, deadline_s: float) -> FrequencyPlan:
        """Return the plan of least energy that finishes by the deadline.

        Args:
            deadline_s: Maximum iteration time [s], > 0.

        Returns:
            The slowest plan with ``time_s <= min(deadline_s, T*)``.

        Raises:
            DeadlineError: If no plan is that fast or the deadline is not positive. The message gives ``T_min``.
        """
        if not deadline_s > 0:
            raise DeadlineError(f"A deadline is a time above 0 s, got {deadline_s}.")
        plan = self._in_time(deadline_s)
        if plan is None:
            raise DeadlineError(
                f"No plan finishes an iteration in {deadline_s:.6g} s; the fastest takes {self.plans[0].time_s:.6g} s "
                f"(T_min is {self.t_min_s:.6g} s). Allow at least that."
            )
        return plan

    def within(self, max_slowdown: float) -> FrequencyPlan:
        """Return the plan of least energy with at most the given slowdown relative to default clocks.

        Args:
            max_slowdown: Slowdown as a fraction, >= 0, see :func:`time_limit_s`. If even the fastest plan is slower,
                which lowtime's may be, the fastest plan is returned.
        """
        return self.lookup(max(self.limit_s(max_slowdown), self.plans[0].time_s))

    def limit_s(self, slowdown: float) -> float:
        """Return the longest iteration with the given slowdown relative to default clocks [s]."""
        return time_limit_s(self.baseline.time_s, self.t_min_s, slowdown)

    def savings(self) -> dict[str, list[float | None]]:
        """Return the savings of plans and alternatives by name, ``Perseus`` first.

        Savings are relative to the highest clock: a fraction of the energy for each of :data:`SLOWDOWNS`, or None if no
        plan or point meets the deadline, which is that of :meth:`within`.
        """

        def saved(found: FrequencyPlan | AlternativePoint | None) -> float | None:
            return None if found is None else 1 - found.energy_j / self.baseline.energy_j

        deadlines_s = [self.limit_s(slowdown) for slowdown in SLOWDOWNS]
        plan_or_point = {"Perseus": self._in_time, **{one.name: one.within for one in self.alternatives}}
        savings = {}
        for name, within in plan_or_point.items():
            savings[name] = [saved(within(deadline_s)) for deadline_s in deadlines_s]
        return savings

    def comparison(self) -> list[str]:
        """Return the lines of a table of :meth:`savings` and a sentence about it, or none without alternatives."""
        if not self.alternatives:
            return []
        heads = "".join(f"{f'+{slowdown:.0%}':>9}" for slowdown in SLOWDOWNS)
        lines = [f"saved at additional time    {heads}"]
        for name, saved in self.savings().items():
            figures = ("-" if value is None else f"{max(value, 0.0):.1%}" for value in saved)
            lines.append(f"  {name:<26}{''.join(f'{figure:>9}' for figure in figures)}")
        return [*lines, self.best_alternative_in_words()]

    def best_alternative_in_words(self) -> str:
        """Return a sentence that compares plans with the best alternative at 1 % more time."""
        place = SLOWDOWNS.index(0.01)
        saved = {name: values[place] or 0.0 for name, values in self.savings().items()}
        plans = saved.pop("Perseus")
        name = max(saved, key=saved.__getitem__)
        more = plans - saved[name]
        if more < _AS_GOOD:
            verdict = "is as good" if more > -_AS_GOOD else "saves more"
            figures = f"it saves {100 * saved[name]:.1f} %, Perseus {100 * plans:.1f} %"
            return f"In 1 % more time, {name} {verdict}: {figures}."
        return f"In 1 % more time, Perseus saves {100 * more:.1f} percentage points more than the best of them, {name}."

    def _in_time(self, deadline_s: float) -> FrequencyPlan | None:
        index = bisect.bisect_right(self._times_s, deadline_s * (1 + _TOLERANCE))
        return self.plans[index - 1] if index else None

    def save(self, directory: Path | str) -> Path:
        """Write ``frontier.json`` and ``frontier.csv``, and return the path of the former.

        Raises:
            FrontierError: If a number is beyond the limits of the format, or the file would be too large.
            OSError: As :func:`write_together`.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "frontier.json"
        try:
            contents = (self._file().model_dump_json() + "\n").encode()
            check_json_size(contents)
        except ValidationError as error:
            raise FrontierError(explain(error, _FrontierFile, f"{path}: ")) from None
        except ValueError as error:
            raise FrontierError(f"{path}: it would have {error}. Compute fewer plans.") from None
        write_together([(directory / "frontier.csv", self._csv()), (path, contents)])
        return path

    @classmethod
    def load(cls, path: Path | str) -> Frontier:
        """Read ``frontier.json``, given its path or its folder.

        Raises:
            FrontierError: If the file is missing, truncated, of another format or inconsistent. The message names the
                key.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "frontier.json"
        what, remedy = "frontier.json, as written by perseus-ds optimize", 'Run "perseus-ds optimize" again.'
        file = read_model(_FrontierFile, path, FrontierError, what, remedy=remedy)
        try:
            return file.to_frontier()
        except (FrontierError, ScheduleError) as error:
            raise FrontierError(f"{path}: {error}") from None

    def _csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["plan", "time_s", "energy_j", "lower_bound_j", "gap", "clock_changes", *_POWERS, "simulated"])
        simulated = {True: "yes", False: "no", None: ""}[self.provenance.simulated]
        for number, plan in enumerate(self.plans):
            bound = ("", "") if plan.lower_bound_j is None else (repr(plan.lower_bound_j), f"{plan.gap:.6f}")
            swing = ("", "", "") if plan.power is None else (f"{value:.1f}" for value in plan.power)
            power_w = (f"{plan.mean_power_w:.1f}", *swing)
            row = [number, repr(plan.time_s), repr(plan.energy_j), *bound, plan.clock_changes, *power_w, simulated]
            writer.writerow(row)
        return text.getvalue()

    def _file(self) -> _FrontierFile:
        return _FrontierFile(
            provenance=self.provenance,
            t_min_s=self.t_min_s,
            t_star_s=self.t_star_s,
            instructions=[[(i.stage, i.kind, i.micro_batch) for i in stream] for stream in self.instructions],
            baseline=_PlanFile.of(self.baseline),
            plans=[_PlanFile.of(plan) for plan in self.plans],
            instruction_times_s=[(*key, time_s) for key, time_s in self.instruction_times_s.items()],
            streams=None if self.schedule is None else ScheduleStreams.of(self.schedule),
            alternatives={one.name: list(one.points) for one in self.alternatives},
        )


class _PlanFile(FileModel):
    time_s: Time
    energy_j: Energy
    lower_bound_j: Energy | None = None
    power_w: PowerSwing | None = None
    clocks_mhz: Many[Many[Clock]]

    @classmethod
    def of(cls, plan: FrequencyPlan) -> _PlanFile:
        return cls(
            time_s=plan.time_s,
            energy_j=plan.energy_j,
            lower_bound_j=plan.lower_bound_j,
            power_w=plan.power,
            clocks_mhz=[list(clocks) for clocks in plan.clocks_mhz],
        )

    def to_plan(self, instructions: InstructionStreams) -> FrequencyPlan:
        clocks = tuple(tuple(rank) for rank in self.clocks_mhz)
        if [len(c) for c in clocks] != [len(i) for i in instructions]:
            raise FrontierError("a plan does not have one clock per instruction; the file was edited or cut off.")
        return FrequencyPlan(instructions, clocks, self.time_s, self.energy_j, self.lower_bound_j, self.power_w)


_Stream = Annotated[Many[tuple[Stage, Kind, MicroBatch]], Field(min_length=1)]


class _FrontierFile(FileModel):
    format: Literal["perseus-ds frontier"] = "perseus-ds frontier"
    schema_version: Literal[1] = 1
    provenance: Provenance
    t_min_s: Time
    t_star_s: Time
    instructions: Many[_Stream] = Field(min_length=1)
    baseline: _PlanFile
    plans: Many[_PlanFile] = Field(min_length=1, max_length=MOST_PLANS)
    instruction_times_s: Many[tuple[Stage, Kind, Clock, Time]] = Field(default_factory=list)
    streams: ScheduleStreams | None = None
    alternatives: dict[Text, Many[AlternativePoint]] = Field(default_factory=dict, max_length=_MOST_ALTERNATIVES)

    def to_frontier(self) -> Frontier:
        instructions = tuple(tuple(Instruction(*entry) for entry in stream) for stream in self.instructions)
        plans = tuple(plan.to_plan(instructions) for plan in self.plans)
        for number, (faster, slower) in enumerate(itertools.pairwise(plans)):
            if not (faster.time_s < slower.time_s and faster.energy_j > slower.energy_j):
                raise FrontierError(f"plans {number} and {number + 1} are not ordered by time and energy.")
        times_s = {(stage, kind, clock): time_s for stage, kind, clock, time_s in self.instruction_times_s}
        schedule = None if self.streams is None else self.streams.to_schedule()
        baseline = self.baseline.to_plan(instructions)
        alternatives = tuple(Alternative(name, tuple(points)) for name, points in self.alternatives.items())
        return Frontier(plans, self.t_min_s, baseline, self.provenance, times_s, schedule, alternatives)


def drop_dominated(plans: Iterable[P]) -> list[P]:
    """Return the plans or points that are not dominated in time and energy, the fastest first."""
    kept: list[P] = []
    for plan in sorted(plans, key=lambda p: (p.time_s, p.energy_j)):
        if not kept or plan.energy_j < kept[-1].energy_j:
            kept.append(plan)
    return kept


Pairs = list[list[tuple[str, int]]]
"""For every rank, the kind and clock [MHz] of each instruction."""
_MOST_BYTES = 4 * MIB
# Python's own parser takes 100 times the time and memory for such a list.
_COMMENT, _TRAILING_COMMA, _TO_JSON = re.compile(r"#[^\n]*"), re.compile(r",\s*\]"), str.maketrans("()'", '[]"')


def export_zeus(frontier: Frontier, directory: Path) -> list[Path]:
    """Write every plan to a file for Zeus's server, numbered as in ``frontier.csv``, and return the paths.

    All files are written, or none. Clocks of tails are omitted, because Zeus has only forward and backward passes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"freqs_pipeline_{number:05d}.py" for number in range(len(frontier.plans))]
    plans = zip(paths, enumerate(frontier.plans), strict=True)
    write_together((path, _literal(number, plan)) for path, (number, plan) in plans)
    return paths


def _literal(number: int, plan: FrequencyPlan) -> str:
    ranks = []
    for instructions, clocks_mhz in zip(plan.instructions, plan.clocks_mhz, strict=True):
        pairs = zip(instructions, clocks_mhz, strict=True)
        ranks.append([(each.kind.value, clock_mhz) for each, clock_mhz in pairs if each.kind is not Kind.TAIL])
    lines = ["[", *(f"{rank}," for rank in ranks), "]"]
    return "\n".join([*lines, f"# Plan {number}: {plan.time_s!r} s, {plan.energy_j!r} J"]) + "\n"


def read_zeus(path: Path) -> Pairs:
    """Read one plan file without executing it. If it has another form, the error names rank and position."""
    text = read_text(path, FrontierError, "file of a plan", _MOST_BYTES)
    try:
        value = parse_json(_TRAILING_COMMA.sub("]", _COMMENT.sub("", text).translate(_TO_JSON)))
    except ValueError as error:
        raise FrontierError(
            f"{path}: not a list ({brief(error)}). Expected one list per rank of (instruction, MHz)."
        ) from None
    if not isinstance(value, list) or not 0 < len(value) <= MOST_STAGES:
        raise FrontierError(f"{path}: expected one list per rank, at most {MOST_STAGES}, found {shortened(value)}.")
    for rank, entries in enumerate(value):
        if not isinstance(entries, list):
            raise FrontierError(f"{path}: rank {rank}: expected a list, found {shortened(entries)}.")
        for position, entry in enumerate(entries):
            match entry:
                case [str(kind), int(clock)] if len(kind) <= 80 and 0 < clock <= MOST_CLOCK_MHZ and clock is not True:
                    entries[position] = kind, clock
                case _:
                    raise FrontierError(
                        f"{path}: rank {rank}, instruction {position}: expected (instruction, MHz) such as "
                        f"('forward', 1410), found {shortened(entry)}."
                    )
    return value


def read_plans(directory: Path) -> Iterator[tuple[Path, Pairs]]:
    """Return an iterator that reads the plan files of a folder in the order of their names."""
    paths = sorted(directory.glob("freqs_pipeline_*.py"))
    if not paths:
        raise FrontierError(f"{directory}: no freqs_pipeline_*.py in this folder. Give the folder that lowtime wrote.")
    return ((path, read_zeus(path)) for path in paths)
