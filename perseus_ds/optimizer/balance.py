"""Finds better layouts for the model of a job, also for other pipeline sizes.

Everything is predicted from the costs of each kind of part (:mod:`perseus_ds.optimizer.layer_costs`). Loads, transfers
and tails keep their measured durations. For other pipeline sizes, a transfer takes the mean of the measured ones, and a
tail the mean scaled by the rank's share of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, MTP, Layout
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer.layer_costs import KindCosts, kind_costs
from perseus_ds.optimizer.partition import Cut, EvaluatedCut, LayerCosts, Partition, best_partition
from perseus_ds.optimizer.schedule_comparison import held_by_stage
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule


@dataclass(frozen=True)
class MeasuredJob:
    """A job that has trained under Perseus.

    Attributes:
        layout: The parts of the model on each stage.
        schedule: The schedule of its ranks.
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
    """The best layout for another size of the pipeline on the same GPUs.

    Attributes:
        ranks: Number of pipeline ranks.
        stages_per_rank: Number of stages per rank.
        pipelines: Number of pipelines.
        micro_batches: Number of micro-batches of each pipeline.
        layout: The proposed layout, or None if there is none.
        found: Predicted costs of an iteration of one pipeline with it.
        problem: The reason if there is no layout.
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
        """
        self.job = job
        self.tied_on_one_rank = tied_on_one_rank
        self.kinds: KindCosts = kind_costs([(each.layout, each.profile) for each in (job, *others)])

    @cached_property
    def costs(self) -> LayerCosts:
        """The costs of the parts, with the job's own transfers and tails."""
        costs = self.kinds.of_parts(self.job.layout.parts, self.job.profile)
        if self.memory is None:
            return costs
        _, a_parameter, a_layer = self.memory
        layers = np.array([float(_is_layer(part.kind)) for part in self.job.layout.parts])
        return replace(costs, fixed_bytes=a_parameter * costs.parameters, held_bytes=a_layer * layers)

    @cached_property
    def memory(self) -> tuple[float, float, float] | None:
        """Bytes per rank, per parameter, and per layer for each micro-batch held, or None if unknown."""
        job = self.job
        if len(job.memory_bytes) != job.ranks:
            return None
        rows = [[1.0, *self._held_by(stages)] for stages in job.schedule.stages_of_ranks]
        if np.linalg.matrix_rank(rows) < 3:
            return None
        (least, a_parameter, a_layer), _ = nnls(np.array(rows), np.array(job.memory_bytes, float))
        return float(least), float(a_parameter), float(a_layer)

    def _held_by(self, stages: Sequence[int], layout: Layout | None = None) -> tuple[float, float]:
        """Return the number of parameters of some stages, and of their layers times micro-batches held."""
        layout, held = layout or self.job.layout, held_by_stage(self.job.schedule)
        parameters = sum(part.parameters for stage in stages for part in layout.stages[stage])
        layers = sum(held[stage] * _is_layer(part.kind) for stage in stages for part in layout.stages[stage])
        return float(parameters), float(layers)

    def memory_bytes(self, layout: Layout) -> list[float]:
        """Return the memory of each rank, measured for the current layout, otherwise predicted.

        The list is empty if the memory is unknown.
        """
        if layout.cut == self.job.layout.cut:
            return [float(needed) for needed in self.job.memory_bytes]
        if self.memory is None:
            return []
        weights = np.array(self.memory)
        ranks = self.job.schedule.stages_of_ranks
        return [float(np.array([1.0, *self._held_by(stages, layout)]) @ weights) for stages in ranks]

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
            memory_bytes -= self.memory[0]
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

        Args:
            ranks: Number of pipeline ranks.
            stages_per_rank: Number of stages per rank.
            schedule_of: Returns the schedule for given numbers of ranks, stages per rank and micro-batches.
        """
        job, info = self.job, self.job.profile.info
        gpus = job.ranks * (info.data_parallel or 1)
        batch = job.schedule.micro_batches * (info.data_parallel or 1)
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
            is_own = (ranks, ranks * stages_per_rank) == (job.ranks, job.schedule.num_stages)
            schedule = job.schedule if is_own else schedule_of(ranks, stages_per_rank, size.micro_batches)
            costs = self.costs if is_own else replace(self.costs, fixed=self._fixed_of(schedule), tails=())
            best = best_partition(
                costs, schedule, known={}, may_hold=self._may_hold(schedule), is_planned=job.has_energy
            )
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
        mean_s = {
            payload: fmean(known)
            for payload in ("activation", "grad")
            if (known := [time_s for (of, *_), time_s in own.transfer_s.items() if of == payload])
        }
        last = self.job.schedule.num_stages - 1
        loads_s = {0: own.load_s.get(0, 0.0), schedule.num_stages - 1: own.load_s.get(last, 0.0)}
        return FixedDurations(
            load_s=loads_s,
            transfer_s={(t.payload, t.source, t.target): mean_s.get(t.payload, 0.0) for t in schedule.transfers},
            tail_s={stage: tail_s for stage, kind in schedule.keys if kind is Kind.TAIL},
        )

    def _may_hold(self, schedule: Schedule) -> npt.NDArray[np.bool_]:
        """Return :func:`may_hold` for the job's model.

        Raises:
            ConfigError: If the embedding and the head must share a rank but cannot.
        """
        ranks = schedule.stages_of_ranks
        if self.tied_on_one_rank and not any({0, schedule.num_stages - 1} <= set(stages) for stages in ranks):
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
