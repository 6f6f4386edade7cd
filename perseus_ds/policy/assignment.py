"""What every pipeline of a job runs: the policy's plan, stretched where another pipeline takes longer anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.device.rank_clocks import Forecast
from perseus_ds.policy.policies import with_room
from perseus_ds.policy.stragglers import Straggler, straggler_of, with_told

_NOBODY = -1.0


@dataclass(frozen=True)
class Choice:
    """What rank 0 has decided.

    Attributes:
        plan: What the policy asks for, as a place on the frontier.
        paused: Whether to run at default clocks.
        told: A straggler that somebody told of.
    """

    plan: int
    paused: bool = False
    told: Straggler | None = None

    def as_numbers(self) -> list[float]:
        """Return it as it travels among ranks."""
        told = (float(self.told.pipeline), self.told.slowdown) if self.told else (_NOBODY, 1.0)
        return [float(self.plan), float(self.paused), *told]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Choice:
        """Return what :meth:`as_numbers` was made of."""
        plan, paused, pipeline, slowdown = numbers
        return cls(int(plan), bool(paused), None if pipeline == _NOBODY else Straggler(int(pipeline), slowdown))


@dataclass(frozen=True)
class Assignment:
    """What every pipeline runs in an iteration.

    Attributes:
        choice: What rank 0 has decided.
        rooms: How many times as long as the policy's plan each pipeline may take.
        plans: Each pipeline's plan, as a place on the frontier.
    """

    choice: Choice
    rooms: tuple[float, ...]
    plans: tuple[int, ...]

    @classmethod
    def of(cls, frontier: Frontier, choice: Choice, measured_rooms: Sequence[float]) -> Assignment:
        """Give every pipeline its plan."""
        rooms = with_told(measured_rooms, choice.told)
        return cls(choice, rooms, tuple(with_room(frontier, choice.plan, room) for room in rooms))

    @property
    def straggler(self) -> Straggler | None:
        """The pipeline all others wait for, if they do."""
        return straggler_of(self.rooms)

    def forecast(self, frontier: Frontier, gpus_per_stage: int) -> Forecast:
        """Return what the job's iteration takes, and what it would use at default clocks.

        A pipeline that takes ``s`` times as long is charged ``s`` times its plan's energy, and the
        others wait for the slowest at blocking power: the accounting of the paper's emulation.

        Args:
            frontier: The plans.
            gpus_per_stage: GPUs of one pipeline that share a stage.
        """
        time_s, energy_j = self._job([frontier.plans[number] for number in self.plans], frontier)
        _, default_energy_j = self._job([frontier.baseline] * len(self.plans), frontier)
        return Forecast(time_s, gpus_per_stage * energy_j, gpus_per_stage * default_energy_j)

    def _job(self, plans: Sequence[FrequencyPlan], frontier: Frontier) -> tuple[float, float]:
        """Return time [s] and energy [J], one GPU a stage, of pipelines as slow as they are under these plans."""
        slowness = [max(self.rooms) / room for room in self.rooms]
        times_s = [plan.time_s * slow for plan, slow in zip(plans, slowness, strict=True)]
        energies_j = [plan.energy_j * slow for plan, slow in zip(plans, slowness, strict=True)]
        waiting_s = sum(max(times_s) - time_s for time_s in times_s) * len(frontier.instructions)
        return max(times_s), sum(energies_j) + frontier.provenance.blocking_power_w * waiting_s
