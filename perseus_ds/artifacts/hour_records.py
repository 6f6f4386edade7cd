"""The events of policies that know the hour."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perseus_ds.artifacts.record_base import Event


class TimetableMade(Event):
    """A cheapest policy has decided which plan runs when; costs are values of its signal times kWh."""

    event: Literal["timetable"] = "timetable"
    cost: float = Field(0.0, description="Of all steps that are left.")
    bound: float = Field(0.0, description="No assignment of plans to hours that ends in time costs less.")
    fastest_cost: float = Field(0.0, description="Of the same steps under the plan of slowdown 0.")
    unit: str = Field("", description="Of the signal.")
    entries: tuple[tuple[float, int], ...] = Field((), description="When each plan begins [Unix seconds]; -1 is none.")
    ends: float = Field(0.0, description="When the last step is done [Unix seconds].")
    mean_from: float | None = Field(None, description="From when on the signal's mean is assumed [Unix seconds].")


class CostsSoFar(Event):
    """What the energy has cost since a cheapest policy began, in values of its signal times kWh."""

    event: Literal["costs"] = "costs"
    iterations: int = Field(0, description="Iterations that are counted.")
    cost: float = 0.0
    fastest_cost: float = Field(0.0, description="Of as many iterations under the plan of slowdown 0.")
    bound: float | None = Field(None, description="Of all steps, as computed at the beginning.")
    halted_s: float = Field(0.0, description="How long training stood still [s].")
    done: bool = Field(False, description="Whether these are all; before, the fastest plan has had other hours.")


class Halted(Event):
    """All ranks waited before an iteration."""

    event: Literal["halt"] = "halt"
    time_s: float = 0.0
    energy_j: float | None = Field(None, description="Of all GPUs meanwhile [J]; null where it cannot be read.")
