"""Sums over iterations, of which the records of earlier hours and everything that is shown of a job consist."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field


@dataclass
class Sums:
    """Sums over iterations. ``savings.py`` defines which of them are compared with default clocks."""

    iterations: Annotated[int, Field(description="Number of iterations.")] = 0
    time_s: Annotated[float, Field(description="Their time [s].")] = 0.0
    energy_j: Annotated[float, Field(description="Their energy [J], as far as it is known.")] = 0.0
    without_energy: Annotated[int, Field(description="Number of iterations with an energy that could not be read.")] = 0
    clock_changes: Annotated[int, Field(description="Clock changes of all GPUs.")] = 0
    clock_skips: Annotated[int, Field(description="Clock changes that were omitted.")] = 0
    stalls: Annotated[int, Field(description="Number of iterations that contain a stall.")] = 0
    compared: Annotated[int, Field(description="Number of iterations that are compared with default clocks.")] = 0
    compared_s: Annotated[float, Field(description="Their time [s].")] = 0.0
    known: Annotated[int, Field(description="Number of compared iterations with a known energy.")] = 0
    compared_j: Annotated[float, Field(description="Energy of these [J].")] = 0.0
    default_s: Annotated[float, Field(description="Time that default clocks take for the compared ones [s].")] = 0.0
    default_j: Annotated[float, Field(description="Energy that they take for those of known energy [J].")] = 0.0
    tokens: Annotated[int, Field(description="Number of tokens in those of these with a known number of tokens.")] = 0
    tokens_s: Annotated[float, Field(description="Time of the iterations with these tokens [s].")] = 0.0
    tokens_j: Annotated[float, Field(description="Their energy [J].")] = 0.0
    tokens_default_s: Annotated[float, Field(description="Time that default clocks take for them [s].")] = 0.0
    tokens_default_j: Annotated[float, Field(description="Energy that default clocks take for them [J].")] = 0.0

    def add(self, other: Sums) -> None:
        """Add the sums over other iterations."""
        self.iterations += other.iterations
        self.time_s += other.time_s
        self.energy_j += other.energy_j
        self.without_energy += other.without_energy
        self.clock_changes += other.clock_changes
        self.clock_skips += other.clock_skips
        self.stalls += other.stalls
        self.compared += other.compared
        self.compared_s += other.compared_s
        self.known += other.known
        self.compared_j += other.compared_j
        self.default_s += other.default_s
        self.default_j += other.default_j
        self.tokens += other.tokens
        self.tokens_s += other.tokens_s
        self.tokens_j += other.tokens_j
        self.tokens_default_s += other.tokens_default_s
        self.tokens_default_j += other.tokens_default_j

    def with_default_clocks_times(self, time_factor: float, energy_factor: float) -> Sums:
        """Return the sums with what default clocks take multiplied by factors."""
        return replace(
            self,
            default_s=self.default_s * time_factor,
            default_j=self.default_j * energy_factor,
            tokens_default_s=self.tokens_default_s * time_factor,
            tokens_default_j=self.tokens_default_j * energy_factor,
        )

    def mean(self) -> MeanIteration:
        """Return the mean of the compared iterations, of which there must be some."""
        known = self.known or math.nan
        return MeanIteration(
            self.compared_s / self.compared,
            self.compared_j / known,
            self.default_s / self.compared,
            self.default_j / known,
        )

    @property
    def saved_j(self) -> float:
        """Energy saved compared with default clocks [J]."""
        return self.default_j - self.compared_j

    @property
    def gained_s(self) -> float:
        """Time saved compared with default clocks [s], negative if the iterations took longer."""
        return self.default_s - self.compared_s

    @property
    def saved(self) -> float | None:
        """Energy saved, as a fraction of the energy at default clocks. None if it is unknown."""
        return self.saved_j / self.default_j if self.default_j else None

    @property
    def slowdown(self) -> float | None:
        """Increase of the time, as a fraction of the time at default clocks. None if it is unknown."""
        return -self.gained_s / self.default_s if self.default_s else None


class MeanIteration(NamedTuple):
    """Mean time [s] and energy [J] of compared iterations, and what default clocks take. Unknown energies are NaN."""

    time_s: float
    energy_j: float
    default_s: float
    default_j: float
