"""``schedules.json``: the predicted frontiers of several schedules, computed from one profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, write_atomically
from perseus_ds.artifacts.validation import Count

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ComparedSchedule(FileModel):
    """One schedule with one number of micro-batches.

    Attributes:
        stages: Number of stages on all ranks.
        held_by_stage: Maximum number of micro-batches for which each stage holds activations.
        held_by_rank: Maximum number of micro-batches that each rank holds, counted for all of its layers.
        t_min_s: Iteration time with every instruction at its fastest measured clock [s].
        baseline_time_s: Iteration time with every instruction at the highest measured clock [s].
        baseline_energy_j: Energy of one pipeline with one GPU per rank at the highest measured clock [J].
        plans: Time [s] and energy [J] of every plan, the fastest first.
        worst_gap: Largest possible excess of a plan's energy over the optimum, as a fraction.
        assumptions: Assumptions that are not based on measurements.
    """

    name: str
    micro_batches: Count
    ranks: Count
    stages: Count
    held_by_stage: list[Count]
    held_by_rank: list[Positive]
    t_min_s: Positive
    baseline_time_s: Positive
    baseline_energy_j: Positive
    plans: Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]
    worst_gap: float
    assumptions: list[str]

    @property
    def t_star_s(self) -> float:
        """Iteration time of the plan of least energy [s]."""
        return self.plans[-1][0]

    @property
    def label(self) -> str:
        """Name and number of micro-batches."""
        return f"{self.name}, {self.micro_batches} micro-batches"


class ScheduleTable(FileModel):
    """A comparison of several schedules."""

    format: Literal["perseus-ds schedules"] = "perseus-ds schedules"
    schema_version: Literal[1] = 1
    profile: str
    simulated: bool | None
    gpu: str | None
    schedules: Annotated[list[ComparedSchedule], Field(min_length=1)]

    @property
    def subject(self) -> str:
        """The GPU, marked if it is simulated, as the end of a title."""
        gpu = f": {self.gpu}" if self.gpu else ""
        hidden = self.simulated and "simulated" not in gpu.lower()
        return gpu + (" (SIMULATED)" if hidden else "")

    def save(self, path: Path) -> None:
        """Write the file completely or not at all."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
