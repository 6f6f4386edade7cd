"""Compares the frontiers of several schedules, computed from one measured profile.

For a schedule other than the measured one, stages are divided into chunks or joined, and backwards are split or joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.artifacts.schedule_table import ComparedSchedule
from perseus_ds.errors import ProfileError
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.problem import Progress
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Payload, Schedule
from perseus_ds.planning import PlanningSettings

_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def compare_schedules(
    profile: StageProfile,
    schedules: Sequence[tuple[str, Schedule]],
    settings: PlanningSettings,
    *,
    weight_share: float,
    progress: Progress,
) -> list[ComparedSchedule]:
    """Compute the frontier of each schedule from a profile that was measured under any of them.

    Raises:
        PerseusError: If the profile does not fit a schedule.
    """
    result = []
    for number, (name, schedule) in enumerate(schedules):

        def report(_: str, done: float, name: str = name, number: int = number) -> None:
            progress(name, (number + done) / len(schedules))

        fitted, assumptions = recut(profile, schedule, weight_share=weight_share)
        frontier = optimize(schedule, fitted, settings, progress=report)
        result.append(
            ComparedSchedule(
                name=name,
                micro_batches=schedule.micro_batches,
                ranks=len(schedule.ranks),
                stages=schedule.num_stages,
                held_by_stage=held_by_stage(schedule),
                held_by_rank=held_by_rank(schedule),
                t_min_s=frontier.t_min_s,
                baseline_time_s=frontier.baseline.time_s,
                baseline_energy_j=frontier.baseline.energy_j,
                plans=[(plan.time_s, plan.energy_j) for plan in frontier.plans],
                worst_gap=max(plan.gap for plan in frontier.plans if plan.gap is not None),
                assumptions=assumptions,
            )
        )
    return result


def held_by_stage(schedule: Schedule) -> list[int]:
    """Return the maximum number of micro-batches for which each stage holds activations.

    They are held from the forward to the backward or, if that is split, to the gradients of the weights.
    """
    most = {stage: max(held) for stream in schedule.instructions for stage, held in _held_after_each(stream).items()}
    return [most[stage] for stage in sorted(most)]


def held_by_rank(schedule: Schedule) -> list[float]:
    """Return the maximum number of micro-batches held by each rank.

    A micro-batch on one of the rank's n stages counts as 1/n.
    """
    result = []
    for stream in schedule.instructions:
        by_stage = _held_after_each(stream)
        of_rank = [sum(of_stages) for of_stages in zip(*by_stage.values(), strict=True)]
        result.append(max(of_rank) / len(by_stage))
    return result


def _held_after_each(stream: tuple[Instruction, ...]) -> dict[int, list[int]]:
    """Return, by stage, the number of micro-batches that it holds after each instruction of its rank."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    held: dict[int, list[int]] = {}
    for stage in sorted({instruction.stage for instruction in stream}):
        changes = [change.get(each.kind, 0) if each.stage == stage else 0 for each in stream]
        held[stage] = list(accumulate(changes))
    return held


def recut(profile: StageProfile, schedule: Schedule, *, weight_share: float) -> tuple[StageProfile, list[str]]:
    """Return the profile of the same model on the same GPUs under another schedule.

    A stage of the profile is divided into equal chunks if the schedule has more stages, and neighbouring stages are
    joined if it has fewer.

    ``weight_share`` is the share of the weight gradients in a backward's time and energy, from 0 to 1. It is used if
    the schedule splits a backward that was measured as a whole.

    Returns:
        The profile, and its assumptions that are not based on measurements, one sentence each.

    Raises:
        ProfileError: If the number of stages is neither a multiple nor a divisor of the profile's, or a kind of
            instruction was not measured.
    """
    recut = _Recut(profile, schedule, weight_share)
    return recut.profile_of_schedule(), [*recut.assumptions]


class _Recut:
    def __init__(self, profile: StageProfile, schedule: Schedule, weight_share: float) -> None:
        self.profile, self.schedule, self.weight_share = profile, schedule, weight_share
        self.fixed = profile.info.fixed_durations
        self.stages, self.wanted = profile.num_stages, schedule.num_stages
        if self.wanted % self.stages and self.stages % self.wanted:
            raise ProfileError(
                f"{schedule.name} has {self.wanted} stages, the profile {self.stages}: expected a multiple or a "
                "divisor, so that stages can be cut into equal chunks or joined. Change ranks or stages_per_rank."
            )
        self.chunks = max(1, self.wanted // self.stages)
        self.assumptions: dict[str, None] = {}  # in order, each once

    def profile_of_schedule(self) -> StageProfile:
        if self.chunks > 1:
            self._assume(
                f"each stage is cut into {self.chunks} equal chunks, each with 1/{self.chunks} of its time and energy"
            )
        rows = [row for stage, kind in self.schedule.keys for row in self._rows(stage, kind)]
        info = self.profile.info.model_copy(
            update={
                "schedule": self.schedule.name,
                "stages": self.wanted,
                "pipeline_ranks": len(self.schedule.ranks),
                "micro_batches": self.schedule.micro_batches,
                "load_s": {},
                "tail_s": {},
                "transfers": [],
                "others": [],
                "rows": [],
            }
        )
        # Only the ends of the pipeline load data: the first chunk of the first stage and the last chunk of the last.
        loads_s = {
            stage: self.fixed.load_s.get(self._sources(stage)[0 if stage == 0 else -1], 0.0)
            for stage in range(self.wanted)
        }
        tails_s = {stage: self._tail_s(stage) for stage, kind in self.schedule.keys if kind is Kind.TAIL}
        boundaries = sorted({(t.payload, t.source, t.target) for t in self.schedule.transfers})
        transfers_s = {boundary: self._transfer_s(*boundary) for boundary in boundaries}
        if self.fixed.other_s:
            self._assume("commands that perseus-ds does not know take no time")
        return StageProfile(rows, info.with_fixed_durations(FixedDurations(loads_s, transfers_s, tails_s)))

    def _tail_s(self, stage: int) -> float:
        return sum(share * self.fixed.tail_s.get(source, 0.0) for source, share in self._tail_shares(stage))

    def _assume(self, sentence: str) -> None:
        self.assumptions[sentence] = None

    def _sources(self, stage: int) -> range:
        """Return the profile's stages that a stage is a part of or consists of."""
        if self.chunks > 1:
            return range(stage // self.chunks, stage // self.chunks + 1)
        joined = self.stages // self.wanted
        return range(stage * joined, (stage + 1) * joined)

    def _rows(self, stage: int, kind: Kind) -> list[Measurement]:
        """Return the rows of an instruction, at the clocks at which all of its parts were measured.

        They are none for a tail of which a part was not measured.
        """
        if kind is Kind.TAIL:
            parts = [(source, Kind.TAIL, share) for source, share in self._tail_shares(stage)]
            if any((source, Kind.TAIL) not in self.profile.keys for source, _, _ in parts):
                return []
        else:
            found = [part for source in self._sources(stage) for part in self._measured_as(source, kind)]
            parts = [(source, of, share / self.chunks) for source, of, share in found]
        clocks = [set(self.profile.options(source, of).clock_mhz.tolist()) for source, of, _ in parts]
        result = []
        for clock_mhz in sorted(set.intersection(*clocks)):
            rows = [(self.profile.at(source, of, clock_mhz), share) for source, of, share in parts]
            time_s = sum(share * row.time_s for row, share in rows)
            energy_j = sum(share * row.energy_j for row, share in rows)
            result.append(Measurement(stage, kind, clock_mhz, time_s, energy_j))
        return result

    def _measured_as(self, stage: int, kind: Kind) -> list[tuple[int, Kind, float]]:
        """Return the rows, with shares, that make up an instruction of a profile's stage."""
        has = [kind for measured, kind in self.profile.keys if measured == stage]
        recomputed = []
        is_part = Kind.RECOMPUTE in has and all(kind is not Kind.RECOMPUTE for _, kind in self.schedule.keys)
        if is_part and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._assume("recomputation, measured as a separate instruction, is part of the backward")
            recomputed = [(stage, Kind.RECOMPUTE, 1.0)]
        if kind in _SPLIT and kind not in has:
            share = self.weight_share if kind is Kind.BACKWARD_WEIGHT else 1 - self.weight_share
            self._assume(
                f"the gradients of the weights take {self.weight_share:.0%} of a backward's time and energy, at "
                "every clock"
            )
            return [*recomputed, (stage, Kind.BACKWARD, share)]
        if kind is Kind.BACKWARD and kind not in has:
            return [*recomputed, *((stage, part, 1.0) for part in _SPLIT)]
        return [*recomputed, (stage, kind, 1.0)]

    def _tail_shares(self, stage: int) -> list[tuple[int, float]]:
        """Return the shares of the profile's tails that make up the tail of a stage's rank."""
        shares: defaultdict[int, float] = defaultdict(float)
        for held in next(stages for stages in self.schedule.stages_of_ranks if stage in stages):
            for source in self._sources(held):
                shares[source] += 1 / self.chunks
        return list(shares.items())

    def _transfer_s(self, payload: Payload, source: int, target: int) -> float:
        """Return the measured duration of a transfer, or the mean of all if it is unknown."""
        boundary = (
            payload,
            self._sources(source)[-1 if source < target else 0],
            self._sources(target)[0 if source < target else -1],
        )
        if boundary in self.fixed.transfer_s:
            return self.fixed.transfer_s[boundary]
        known = [time_s for (of, *_), time_s in self.fixed.transfer_s.items() if of == payload]
        if not known:
            return 0.0
        self._assume("a transfer over a boundary that was not measured takes the mean of the others")
        return fmean(known)
