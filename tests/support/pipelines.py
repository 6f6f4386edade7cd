"""Schedules and profiles shared by several tests."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule, TrainSchedule
from torch.distributed.pipelining.schedules import get_schedule_class

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile
from perseus_ds.engines.torch_pipelining.order import read_class
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule

STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "LoopedBFS": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Torch's schedules, and the number of stages that the tests place on each rank."""


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    return read_schedule(TrainSchedule, ranks=ranks, micro_batches=micro_batches)


def interleaved(ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    schedule_class = get_schedule_class("Interleaved1F1B")
    return read_class(schedule_class, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


def of_torch(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Return the operations of one of torch's schedules."""
    schedule_class = get_schedule_class(name)
    return read_class(schedule_class, ranks=ranks, stages_per_rank=STAGES_PER_RANK[name], micro_batches=micro_batches)


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    return read_schedule(deepspeed_schedule.DualPipeVSchedule, ranks=ranks, micro_batches=micro_batches)


class GPipe(PipeSchedule):
    """A user's schedule: all forwards, followed by all backwards."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        ds = deepspeed_schedule
        for m in range(self.micro_batches):
            step = [] if self.is_first_stage else [ds.RecvActivation(m)]
            step.append(ds.ForwardPass(m))
            yield step if self.is_last_stage else [*step, ds.SendActivation(m)]
        for m in range(self.micro_batches):
            step = [] if self.is_last_stage else [ds.RecvGrad(m)]
            step.append(ds.BackwardPass(m))
            yield step if self.is_first_stage else [*step, ds.SendGrad(m)]
        yield [ds.ReduceGrads(), ds.OptimizerStep()]


# Merak's instructions, which its own engine defines; perseus-ds recognises them by class name.
class SendActivationRecvGrad(PipeInstruction): ...


class SendGradRecvActivation(PipeInstruction): ...


class PreCheckpointForwardPass(PipeInstruction): ...


class RecomputeRecvGrad(PipeInstruction): ...


class RestoreRecomputeStatus(PipeInstruction): ...


class MergedTransfers(TrainSchedule):
    """Like Merak's 1F1B: the send and the receive of a step are launched together."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in super().steps():
            names = {type(command).__name__ for command in step}
            if names >= {"SendGrad", "RecvActivation"}:
                yield [SendGradRecvActivation(), *step[2:]]
            elif names >= {"SendActivation", "RecvGrad"}:
                yield [SendActivationRecvGrad(), *step[2:]]
            else:
                yield step


class EarlyRecomputation(MergedTransfers):
    """Like Merak's early recomputation, before a gradient is received while the pipeline drains."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        forwards = 0
        for step in super().steps():
            result: list[PipeInstruction] = []
            for command in step:
                name = type(command).__name__
                if name == "RecvGrad":
                    result.append(RecomputeRecvGrad())
                elif name == "ForwardPass" and self.micro_batches - forwards + self.stage_id < self.stages:
                    result.append(PreCheckpointForwardPass())
                elif name == "ReduceTiedGrads":
                    result += [RestoreRecomputeStatus(), command]
                else:
                    result.append(command)
                forwards += name == "ForwardPass"
            yield result


def synthetic_profile(
    stages: int, *, kinds: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD), clocks: int = 8, **info: Any
) -> StageProfile:
    """Return a profile like a measured one, with unequal stages and slower, efficient low clocks."""
    rows = []
    for stage in range(stages):
        for kind in kinds:
            work = (1 + 0.1 * (stage % 3)) * (0.05 if kind is Kind.FORWARD else 0.1)
            for clock in np.linspace(900, 1410, clocks).astype(int).tolist():
                time_s = work * (0.3 + 0.7 * 1410 / clock)
                power_w = 120 + 230 * (clock / 1410) ** 3
                rows.append(Measurement(stage, kind, clock, time_s, power_w * time_s))
    return StageProfile(rows, ProfileInfo(**info))


def scaled(profile: StageProfile, *, time: float = 1.0, energy: float = 1.0) -> StageProfile:
    """Return the profile with all times and energies multiplied."""
    rows = profile.measurements
    return StageProfile([replace(m, time_s=m.time_s * time, energy_j=m.energy_j * energy) for m in rows], profile.info)
