"""Finds better layouts for the model of a job, also for other pipeline sizes.

Everything is predicted from the costs of each *kind* of part, which follow from the costs of stages by least squares.
The cost of a stage is the sum of its parts' costs. With N the number of parts of each kind on each measured stage and y
the costs of the stages, the costs x of the kinds minimise ``|(N x - y) / errors|²`` with x >= 0. A kind can be
distinguished from the others if no change of the costs that keeps the costs of all stages changes its cost.

Loads, transfers and tails keep their measured durations. For other pipeline sizes, a transfer takes the mean of the
measured ones, and a tail the mean scaled by the rank's share of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from scipy.sparse.csgraph import connected_components

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, MTP, Layout
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.layouts.notations import spelled
from perseus_ds.layouts.partition import Cut, EvaluatedCut, LayerCosts, Partition, best_partition
from perseus_ds.layouts.schedule_comparison import held_by_stage
from perseus_ds.optimizer.problem import Floats, check_powers
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule

_LEAST_ERROR, _UNKNOWN_ERROR = 1e-3, 0.02
"""Minimum relative error of a row, and relative error of a row with unknown error."""


class MemoryUse(NamedTuple):
    """Memory of a rank in all cases, for each parameter, and for each layer with a held micro-batch [bytes]."""

    of_rank: float
    of_parameter: float
    of_held_layer: float


@dataclass(frozen=True)
class MeasuredJob:
    """A job that has trained under Perseus.

    Attributes:
        time_s: Measured time of its iterations at default clocks [s], or None if unknown.
        memory_bytes: Maximum memory of each rank, empty if unknown.
    """

    layout: Layout
    profile: StageProfile
    schedule: Schedule
    time_s: float | None = None
    memory_bytes: Sequence[int] = ()

    @property
    def ranks(self) -> int:
        return len(self.schedule.ranks)

    @property
    def has_energy(self) -> bool:
        """True if energies were measured or can be derived from measurements."""
        return self.profile.info.blocking_power_w is not None


@dataclass(frozen=True)
class OtherSize:
    """The best layout for another size of the pipeline on the same GPUs, or the problem if there is none.

    ``micro_batches`` and ``found``, the predicted costs of an iteration, are those of one pipeline.
    """

    ranks: int
    stages_per_rank: int
    pipelines: int
    micro_batches: int
    layout: Layout | None = None
    found: EvaluatedCut | None = None
    problem: str = ""


class Balance:
    """The current layout of a job, and better ones."""

    def __init__(self, job: MeasuredJob, others: Sequence[MeasuredJob] = (), *, tied_on_one_rank: bool = False) -> None:
        """Estimate the costs of each kind of part from a job and others of the same model.

        Raises:
            ConfigError: If the costs of kinds cannot be distinguished from these stages.
            ProfileError: If most rows of a profile do not exceed its blocking power.
        """
        for each in (job, *others):
            if each.profile.info.blocking_power_w is not None:
                check_powers(each.profile, each.profile.info.blocking_power_w)
        self.job = job
        self.tied_on_one_rank = tied_on_one_rank
        self.kinds: KindCosts = kind_costs([(each.layout, each.profile) for each in (job, *others)])

    @cached_property
    def costs(self) -> LayerCosts:
        """The costs of the parts, with the job's own transfers and tails."""
        kinds, parts, profile = self.kinds, self.job.layout.parts, self.job.profile
        number = [kinds.kinds.index(part.kind) for part in parts]
        parameters = np.array([float(part.parameters) for part in parts])
        layers = np.array([float(_is_layer(part.kind)) for part in parts])
        memory = self.memory or MemoryUse(0.0, 0.0, 0.0)
        return LayerCosts(
            clocks_mhz=kinds.clocks_mhz,
            time_s={kind: values[number] for kind, values in kinds.time_s.items()},
            energy_j={kind: values[number] for kind, values in kinds.energy_j.items()},
            parameters=parameters,
            fixed_bytes=memory.of_parameter * parameters,
            held_bytes=memory.of_held_layer * layers,
            blocking_power_w=profile.info.blocking_power_w or 0.0,
            gpu=profile.info.gpu or "unknown GPU",
            simulated=bool(profile.info.simulated),
            fixed=profile.info.fixed_durations,
            tails=tuple(row for row in profile.measurements if row.kind is Kind.TAIL),
        )

    @cached_property
    def memory(self) -> MemoryUse | None:
        """What the memory is used for. None if it is unknown."""
        job = self.job
        if len(job.memory_bytes) != job.ranks:
            return None
        uses = self._memory_uses(job.layout)
        if np.linalg.matrix_rank(uses) < 3:
            return None
        found, _ = nnls(uses, np.array(job.memory_bytes, float))
        return MemoryUse(*found.tolist())

    def _memory_uses(self, layout: Layout) -> Floats:
        """Return, for each rank, 1, its number of parameters, and of its layers times micro-batches held."""
        held = held_by_stage(self.job.schedule)
        uses = []
        for stages in self.job.schedule.stages_of_ranks:
            parameters = layers = 0.0
            for stage in stages:
                parts = layout.stages[stage]
                parameters += sum(part.parameters for part in parts)
                layers += held[stage] * sum(_is_layer(part.kind) for part in parts)
            uses.append([1.0, parameters, layers])
        return np.array(uses)

    def memory_bytes(self, layout: Layout) -> list[float]:
        """Return the memory of each rank, measured for the current layout, otherwise predicted.

        The list is empty if the memory is unknown.
        """
        if layout.cut == self.job.layout.cut:
            return [float(needed) for needed in self.job.memory_bytes]
        return [] if self.memory is None else (self._memory_uses(layout) @ self.memory).tolist()

    def partition(self, known: Mapping[str, Cut], *, memory_bytes: float | None = None) -> Partition:
        """Return the best cut for the job's own pipeline, with known cuts to compare with.

        Raises:
            ConfigError: If there is no cut that the engine supports or that fits into the memory.
        """
        job = self.job
        if memory_bytes is not None:
            if self.memory is None or job.schedule.num_stages != job.ranks:
                raise ConfigError(
                    "--memory-gib: the memory of a stage can only be derived from measurements of at least three "
                    "ranks with one stage each, which this run does not have. Remove the option."
                )
            memory_bytes -= self.memory.of_rank
        return best_partition(
            self.costs,
            job.schedule,
            known=known,
            memory_bytes=memory_bytes,
            may_hold=self._may_hold(job.schedule),
            is_planned=job.has_energy,
        )

    def errors(self, *terms: tuple[float, EvaluatedCut]) -> tuple[float, float]:
        """Return the standard errors of a weighted sum of cuts' times [s] and energies [J] at default clocks.

        The errors are of first order: they assume that the longest path of each cut stays the same.
        """
        kinds, parts = self.kinds, self.job.layout.parts
        of_kind = np.array([[part.kind == kind for part in parts] for kind in kinds.kinds], dtype=float)
        path = sum(factor * (of_kind @ found.on_path) for factor, found in terms)  # shape (kinds, instructions)
        runs = sum(factor for factor, _ in terms) * (of_kind @ terms[0][1].runs)
        time_variance = energy_variance = 0.0
        for number, kind in enumerate(kinds.time_s):
            covariance, on_path = kinds.time_covariance[kind], np.asarray(path)[:, number]
            time_variance += float(on_path @ covariance @ on_path)
            waited = self.costs.blocking_power_w * (self.job.ranks * on_path - runs[:, number])
            energy_variance += float(waited @ covariance @ waited)
            energy_variance += float(runs[:, number] @ kinds.energy_covariance[kind] @ runs[:, number])
        return time_variance**0.5, energy_variance**0.5

    def of_size(self, ranks: int, stages_per_rank: int, schedule_of: Callable[[int, int, int], Schedule]) -> OtherSize:
        """Return the best layout for a pipeline of another size, with the same GPUs and the same batch.

        ``schedule_of`` returns the schedule for given numbers of ranks, stages per rank and micro-batches.
        """
        job, pipelines_now = self.job, self.job.profile.info.data_parallel or 1
        gpus, batch = job.ranks * pipelines_now, job.schedule.micro_batches * pipelines_now
        pipelines = gpus // ranks
        size = OtherSize(ranks, stages_per_rank, pipelines, batch // max(1, pipelines))
        if gpus % ranks:
            return replace(size, problem=f"{gpus} GPUs are not a multiple of {ranks} pipeline ranks")
        if batch % pipelines:
            return replace(size, problem=f"{batch} micro-batches do not divide among {pipelines} pipelines")
        if job.layout.engine == "megatron" and stages_per_rank > 1 and size.micro_batches % ranks:
            rule = "a multiple of the pipeline size, with virtual stages"
            return replace(size, problem=f"{size.micro_batches} micro-batches: Megatron-Core needs {rule}")
        if ranks * stages_per_rank > len(job.layout.parts):
            return replace(size, problem=f"{len(job.layout.parts)} parts are fewer than its stages")
        try:
            if (ranks, ranks * stages_per_rank) == (job.ranks, job.schedule.num_stages):
                schedule, costs = job.schedule, self.costs
            else:
                schedule = schedule_of(ranks, stages_per_rank, size.micro_batches)
                costs = replace(self.costs, fixed=self._fixed_of(schedule), tails=())
            may_hold = self._may_hold(schedule)
            best = best_partition(costs, schedule, known={}, may_hold=may_hold, is_planned=job.has_energy)
        except PerseusError as error:
            return replace(size, problem=str(error).rstrip("."))
        return replace(size, layout=job.layout.cut_into(best.cut), found=best.most_frugal)

    def _fixed_of(self, schedule: Schedule) -> FixedDurations:
        """Return the durations of loads, transfers and tails of another pipeline."""
        own = self.job.profile.info.fixed_durations
        tails_s = [*own.tail_s.values()] or [
            self.job.profile.at_highest_clock(*key).time_s for key in self.job.profile.keys if key[1] is Kind.TAIL
        ]
        tail_s = fmean(tails_s) * self.job.ranks / len(schedule.ranks) if tails_s else 0.0
        known_s: dict[str, list[float]] = defaultdict(list)
        for (payload, *_), time_s in own.transfer_s.items():
            known_s[payload].append(time_s)
        mean_s = {payload: fmean(times_s) for payload, times_s in known_s.items()}
        last = self.job.schedule.num_stages - 1
        loads_s = {0: own.load_s.get(0, 0.0), schedule.num_stages - 1: own.load_s.get(last, 0.0)}
        return FixedDurations(
            load_s=loads_s,
            transfer_s={(t.payload, t.source, t.target): mean_s.get(t.payload, 0.0) for t in schedule.transfers},
            tail_s={stage: tail_s for stage, kind in schedule.keys if kind is Kind.TAIL},
        )

    def _may_hold(self, schedule: Schedule) -> npt.NDArray[np.bool_]:
        ends = {0, schedule.num_stages - 1}
        if self.tied_on_one_rank and not any(ends <= set(stages) for stages in schedule.stages_of_ranks):
            raise ConfigError(
                f"--tied-on-one-rank: {schedule.name} has the first and the last stage on different ranks. Choose a "
                "schedule that has both on one, such as dualpipev."
            )
        return may_hold(self.job.layout, schedule)


def may_hold(layout: Layout, schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Return whether a stage may have the parts i to j, shape (stages, parts + 1, parts + 1)."""
    ends = len(layout.parts) + 1
    result = np.ones((schedule.num_stages, ends, ends), dtype=bool)
    layers = np.cumsum([0, *(_is_layer(part.kind) for part in layout.parts)])
    mtp = np.cumsum([0, *(part.kind.startswith(MTP) for part in layout.parts)])
    if layout.engine == "huggingface":
        result &= (layers[None, :] > layers[:, None])[None]
    if layout.engine == "megatron" and mtp[-1]:
        held = mtp[None, :] - mtp[:, None]
        result &= ((held == 0) | (held == mtp[-1]))[None]
        result[: schedule.num_stages - len(schedule.ranks)] &= held[None] == 0
    return result


def _is_layer(kind: str) -> bool:
    return kind.split(maxsplit=1)[0] not in (EMBEDDING, HEAD)


@dataclass(frozen=True)
class KindCosts:
    """The costs of one micro-batch of the kinds of parts of a model, by kind of instruction.

    Attributes:
        kinds: Names, in the order of the model.
        clocks_mhz: Shape (clocks,), ascending.
        time_s, energy_j: Shape (kinds, clocks).
        time_covariance, energy_covariance: Shape (kinds, kinds), at the highest clock [s², J²].
    """

    kinds: tuple[str, ...]
    clocks_mhz: tuple[int, ...]
    time_s: dict[Kind, Floats]
    energy_j: dict[Kind, Floats]
    time_covariance: dict[Kind, Floats]
    energy_covariance: dict[Kind, Floats]


def kind_costs(jobs: Sequence[tuple[Layout, StageProfile]]) -> KindCosts:
    """Estimate the costs of all kinds of parts from one or more jobs of the same model.

    Raises:
        ConfigError: If kinds cannot be distinguished. The message names a layout with which they can.
    """
    if any(kind is Kind.FORWARD_BACKWARD for _, profile in jobs for _, kind in profile.keys):
        raise ConfigError(
            "In combined 1F1B, one step is the forward of one stage and the backward of another, so that the costs of "
            "stages cannot be separated. Observe some iterations without overlap_moe_expert_parallel_comm."
        )
    kinds = tuple(dict.fromkeys(part.kind for layout, _ in jobs for part in layout.parts))
    held = np.concatenate([_parts_by_kind(layout, kinds) for layout, _ in jobs])
    if together := _inseparable(held, kinds):
        raise ConfigError(_separation_error(jobs[0][0], held, kinds, together))
    measured = [
        (kind, set(profile.options(stage, kind).clock_mhz.tolist()))
        for _, profile in jobs
        for stage, kind in profile.keys
        if kind is not Kind.TAIL
    ]
    clocks_mhz = tuple(sorted(set.intersection(*(clocks for _, clocks in measured))))
    if not clocks_mhz:
        raise ConfigError("The runs have no clock in common. Give runs of one mode, profile or observe, on one GPU.")
    found = KindCosts(kinds, clocks_mhz, {}, {}, {}, {})
    for kind in sorted({kind for kind, _ in measured}, key=list(Kind).index):
        at_clocks = [_estimate(jobs, kinds, kind, clock_mhz) for clock_mhz in clocks_mhz]
        for number, (costs, covariances) in enumerate(
            ((found.time_s, found.time_covariance), (found.energy_j, found.energy_covariance))
        ):
            costs[kind] = np.stack([of_clock[number][0] for of_clock in at_clocks], axis=1)
            covariances[kind] = at_clocks[-1][number][1]
    return found


def _parts_by_kind(layout: Layout, kinds: Sequence[str]) -> Floats:
    """Return the number of parts of each kind on each stage, shape (stages, kinds)."""
    return np.array([[sum(part.kind == kind for part in parts) for kind in kinds] for parts in layout.stages], float)


def _estimate(
    jobs: Sequence[tuple[Layout, StageProfile]], kinds: Sequence[str], kind: Kind, clock_mhz: int
) -> list[tuple[Floats, Floats]]:
    """Return time [s] and energy [J] of each kind of part at a clock, each with the covariance of its errors."""
    held, values, errors = [], [], []
    for layout, profile in jobs:
        quality = profile.info.quality
        for stage, counts in enumerate(_parts_by_kind(layout, kinds)):
            if (stage, kind) not in profile.keys:
                continue
            row, known = profile.at(stage, kind, clock_mhz), quality.get((stage, kind, clock_mhz))
            held.append(counts)
            values.append((row.time_s, row.energy_j))
            of_row = (known.time_relative_error, known.energy_relative_error) if known else (None, None)
            errors.append([max(_LEAST_ERROR, _UNKNOWN_ERROR if error is None else error) for error in of_row])
    result = []
    for value, error in zip(np.array(values).T, np.array(errors).T, strict=True):
        weighted = np.array(held) / (value * error)[:, None]
        costs, residual = nnls(weighted, 1 / error)
        # A residual that the errors of the rows do not explain increases the covariance.
        freedom = len(value) - len(kinds)
        scale = max(1.0, residual**2 / freedom) if freedom > 0 else 1.0
        result.append((costs, scale * np.linalg.pinv(weighted.T @ weighted)))
    return result


def _inseparable(held: Floats, kinds: Sequence[str]) -> list[list[str]]:
    """Return the groups of kinds that cannot be distinguished from these stages."""
    unseen = np.eye(len(kinds)) - np.linalg.pinv(held) @ held  # projects onto cost changes that no stage shows
    linked = np.abs(unseen) > 1e-6
    _, group_of = connected_components(linked, directed=False)
    groups = []
    for group in np.unique(group_of[linked.diagonal()]):
        members = np.flatnonzero(group_of == group).tolist()
        groups.append([kinds[number] for number in members])
    return groups


def _separation_error(layout: Layout, held: Floats, kinds: Sequence[str], together: Sequence[Sequence[str]]) -> str:
    """Return an error message that names a layout with which the kinds can be distinguished."""
    groups = "; ".join(f"{', '.join(group[:-1])} and {group[-1]}" if len(group) > 1 else group[0] for group in together)
    problem = f"The costs of these kinds of parts cannot be distinguished: {groups}. "
    for cut in _other_cuts(layout.cut):
        other = layout.cut_into(cut)
        if not _inseparable(np.concatenate([held, _parts_by_kind(other, kinds)]), kinds):
            return (
                f"{problem}Train a few iterations of the same model with another layout in the same mode, such as\n"
                f"{spelled(other)}\nand give both output folders: perseus-ds partition RUN --also OTHER_RUN"
            )
    return f"{problem}They are on the same stages in the same numbers: train with more stages, and give that run."


def _other_cuts(cut: Cut) -> list[Cut]:
    """Return cuts with one or two parts moved to a neighbouring stage."""
    ways = [*pairwise(range(len(cut))), *((b, a) for a, b in pairwise(range(len(cut))))]
    found = []
    for moves in [*combinations(ways, 1), *combinations(ways, 2)]:
        counts = list(cut)
        for giver, taker in moves:
            counts[giver] -= 1
            counts[taker] += 1
        if min(counts) > 0:
            found.append(tuple(counts))
    return found
