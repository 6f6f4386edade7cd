"""``schedules.json``: predicted frontiers of several schedules from one profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from perseus_ds.artifacts.io import FileModel, write_atomically
from perseus_ds.artifacts.profile import GpuSettings, energy_note
from perseus_ds.artifacts.validation import Count

Positive = Annotated[float, Field(gt=0)]


class ComparedSchedule(FileModel):
    """One schedule with one number of micro-batches.

    Attributes:
        held_by_stage: Maximum number of micro-batches for which each stage holds activations.
        held_by_rank: Maximum number of micro-batches that each rank holds, counted for all of its layers.
        baseline_time_s: Iteration time with every instruction at the highest measured clock [s]; likewise its energy,
            of one pipeline with one GPU per rank [J].
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
    def label(self) -> str:
        return f"{self.name}, {self.micro_batches} micro-batches"


class ScheduleTable(FileModel):
    """A comparison of several schedules."""

    format: Literal["perseus-ds schedules"] = "perseus-ds schedules"
    schema_version: Literal[1] = 1
    profile: str
    simulated: bool | None
    gpu: str | None
    settings: GpuSettings | None = None
    schedules: Annotated[list[ComparedSchedule], Field(min_length=1)]

    @property
    def subject(self) -> str:
        """The GPU, marked if it is simulated, as the end of a title."""
        gpu = f": {self.gpu}" if self.gpu else ""
        hidden = self.simulated and "simulated" not in gpu.lower()
        note = energy_note(self.settings)
        return gpu + (f", {note}" if note else "") + (" (SIMULATED)" if hidden else "")

    def save(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
