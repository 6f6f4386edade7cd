"""The saving of a frontier in an emulated job of many pipelines, one of them a straggler.

The accounting is that of the Perseus paper's large-scale emulation, so that its published figures
come out of its published frontiers. All data-parallel pipelines synchronise at the end of an
iteration, so all wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.limits import LEAST, MOST_JOULES
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError, FrontierError
from perseus_ds.pipeline.instruction import Instruction

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Iteration time and energy of one pipeline's plans, in any order, one GPU per rank.

    Attributes:
        time_s: Shape (n,), n >= 1.
        energy_j: Shape (n,).
    """

    time_s: Floats
    energy_j: Floats

    def __post_init__(self) -> None:
        values = np.concatenate([self.time_s, self.energy_j])
        # NaN is within no range.
        if self.time_s.size == 0 or not ((values >= LEAST) & (values <= MOST_JOULES)).all():
            raise FrontierError(
                f"a frontier needs at least one plan, with positive times and energies, from {LEAST:g} to "
                f"{MOST_JOULES:g}."
            )

    def cheapest(self, deadline_s: float) -> tuple[float, float]:
        """Return time [s] and energy [J] of the plan of least energy that meets a deadline."""
        # A straggler of 1.1 ends after 1.1 * T; a plan that ends later only by rounding is in time.
        in_time = np.flatnonzero(self.time_s <= deadline_s * (1 + 1e-9))
        best = in_time[np.argmin(self.energy_j[in_time])]
        return float(self.time_s[best]), float(self.energy_j[best])

    @property
    def shortest_s(self) -> float:
        """Time of the fastest plan [s]."""
        return float(self.time_s.min())

    @property
    def t_star_s(self) -> float:
        """Time of the plan of least energy [s]."""
        return float(self.time_s[np.argmin(self.energy_j)])


@dataclass(frozen=True)
class BusyTotals:
    """Time and energy of one iteration's instructions at the highest clock, summed over all ranks, one GPU each.

    Attributes:
        ranks: Pipeline ranks.
        time_s: GPU-seconds in instructions.
        energy_j: Energy of the instructions.
    """

    ranks: int
    time_s: float
    energy_j: float


def busy_at_highest_clock(profile: StageProfile, streams: Sequence[Iterable[Instruction]]) -> BusyTotals:
    """Return time and energy of every rank's instructions at the highest measured clock."""
    rows = [profile.at_highest_clock(i.stage, i.kind) for stream in streams for i in stream]
    return BusyTotals(len(streams), sum(row.time_s for row in rows), sum(row.energy_j for row in rows))


@dataclass(frozen=True)
class EmulatedJob:
    """The job to emulate.

    Attributes:
        pipelines: Data-parallel pipelines, the straggler included.
        gpus_per_stage: GPUs that share a stage (tensor parallelism).
        blocking_power_w: What a waiting GPU draws [W].
        time_scale: Factor on all times, for a profile of a part of each stage.
        energy_scale: Factor on all energies per GPU, blocking energy of the pipelines' own waiting included.
    """

    pipelines: int
    gpus_per_stage: int
    blocking_power_w: float
    time_scale: float = 1.0
    energy_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.pipelines < 1 or self.gpus_per_stage < 1:
            raise ConfigError(
                f"A job needs at least one pipeline and one GPU per stage, got {self.pipelines} and "
                f"{self.gpus_per_stage}."
            )
        if not (self.time_scale > 0 and self.energy_scale > 0 and self.blocking_power_w >= 0):
            raise ConfigError(
                f"time_scale={self.time_scale}, energy_scale={self.energy_scale} and "
                f"blocking_power_w={self.blocking_power_w} must be positive."
            )


@dataclass(frozen=True)
class StragglerSaving:
    """The saving of the whole job while one pipeline is slower.

    Attributes:
        slowdown: How many times slower the straggler is.
        saving: Intrinsic and extrinsic saving, as a fraction of the job's energy at the highest clock.
    """

    slowdown: float
    saving: float


@dataclass(frozen=True)
class Emulation:
    """The saving of a frontier against everything at the highest clock.

    Attributes:
        shortest_s: Iteration time of the fastest plan, scaled [s].
        t_star_s: Iteration time of the plan of least energy, scaled [s].
        baseline_j: Energy of one pipeline's iteration at the highest clock, scaled [J].
        intrinsic: Saving without a straggler, at the shortest time, as a fraction.
        stragglers: One per slowdown asked for.
    """

    shortest_s: float
    t_star_s: float
    baseline_j: float
    intrinsic: float
    stragglers: tuple[StragglerSaving, ...]


def emulate(curve: Curve, busy: BusyTotals, job: EmulatedJob, slowdowns: Iterable[float]) -> Emulation:
    """Return the saving of a frontier in a job.

    Everything at the highest clock is taken to finish in the frontier's shortest time, and waits at
    blocking power whenever it does not compute. A straggler ``s`` times slower is charged ``s``
    times the energy of its plan (the baseline, or the fastest plan); the other pipelines run the
    plan of least energy that finishes before it, and wait for it at blocking power.

    Raises:
        ConfigError: A slowdown below 1.
    """
    shortest_s = curve.shortest_s
    scale = job.energy_scale * job.gpus_per_stage
    waiting_w = job.blocking_power_w * job.gpus_per_stage * busy.ranks
    baseline_j = scale * (busy.energy_j + job.blocking_power_w * (busy.ranks * shortest_s - busy.time_s))
    fastest_j = scale * curve.cheapest(shortest_s)[1]

    def job_j(straggler_j: float, plan_s: float, plan_j: float, end_s: float) -> float:
        waiting_j = waiting_w * job.time_scale * (end_s - plan_s)
        return straggler_j + (job.pipelines - 1) * (plan_j + waiting_j)

    def straggling(slowdown: float) -> StragglerSaving:
        if not slowdown >= 1:
            raise ConfigError(f"straggler={slowdown}: a straggler is at least 1 times as slow as the others.")
        end_s = slowdown * shortest_s
        plan_s, plan_j = curve.cheapest(end_s)
        ours_j = job_j(slowdown * fastest_j, plan_s, scale * plan_j, end_s)
        without_j = job_j(slowdown * baseline_j, shortest_s, baseline_j, end_s)
        return StragglerSaving(slowdown, 1 - ours_j / without_j)

    return Emulation(
        shortest_s=shortest_s * job.time_scale,
        t_star_s=curve.t_star_s * job.time_scale,
        baseline_j=baseline_j,
        intrinsic=1 - fastest_j / baseline_j,
        stragglers=tuple(straggling(slowdown) for slowdown in slowdowns),
    )
