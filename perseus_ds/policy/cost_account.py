"""What the energy of a job has cost by a signal, and what it would have cost under the fastest plan throughout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perseus_ds.artifacts.run_records import CostsSoFar
from perseus_ds.policy.signals import Signal
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import J_PER_KWH


class CostAccount:
    """Costs since a cheapest policy began, in values of its signal times kWh.

    The fastest plan throughout is charged with its own hours: it would have been at the same step earlier.

    Attributes:
        iterations: How many are counted.
        cost: Of their energy, and of the energy while training stood still.
        fastest_cost: Of as many iterations under the plan of ``slowdown: 0``.
        halted_s: How long training stood still [s].
        bound: What no assignment of plans to hours would have stayed below, as computed at the beginning; None before.
    """

    def __init__(self, timebase: Timebase = REAL_TIME) -> None:
        self._timebase = timebase
        self.iterations = 0
        self.cost = 0.0
        self.fastest_cost = 0.0
        self.halted_s = 0.0
        self.bound: float | None = None
        self._fastest_at_s: float | None = None

    @property
    def saved(self) -> float | None:
        """How much less it cost than under the fastest plan, as a fraction; None where that cannot be told."""
        return 1 - self.cost / self.fastest_cost if self.fastest_cost > 0 else None

    def add_iteration(
        self,
        signal: Signal,
        *,
        ended_s: float,
        time_s: float,
        energy_j: float,
        fastest_time_s: float,
        fastest_energy_j: float,
    ) -> None:
        """Add an iteration.

        Args:
            signal: Values over time.
            ended_s: When it ended [Unix seconds].
            time_s: How long it took [s].
            energy_j: Of all GPUs [J].
            fastest_time_s: How long it takes under the fastest plan, with the time until the next one [s].
            fastest_energy_j: Its energy then [J].
        """
        begin_s = ended_s - time_s if self._fastest_at_s is None else self._fastest_at_s
        self.iterations += 1
        self.cost += _cost(signal, ended_s - time_s, ended_s, energy_j)
        self._fastest_at_s = begin_s + fastest_time_s
        self.fastest_cost += _cost(signal, begin_s, self._fastest_at_s, fastest_energy_j)

    def add_halt(self, signal: Signal, *, begin_s: float, end_s: float, energy_j: float) -> None:
        """Add a time in which training stood still [Unix seconds, J]."""
        self.halted_s += end_s - begin_s
        self.cost += _cost(signal, begin_s, end_s, energy_j)

    def so_far(self, *, done: bool = False) -> CostsSoFar:
        """Return the record of what is counted; ``done`` if these are all."""
        return CostsSoFar(
            iterations=self.iterations,
            cost=self.cost,
            fastest_cost=self.fastest_cost,
            bound=self.bound,
            halted_s=round(self.halted_s, 3),
            done=done,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        return {
            "iterations": self.iterations,
            "cost": self.cost,
            "fastest_cost": self.fastest_cost,
            "halted_s": self.halted_s,
            "bound": self.bound,
            "at": self._fastest_at_s,
            "saved_at": self._timebase.date().timestamp(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept; the time in which the job did not run is lost under any plan.

        Raises:
            Exception: It is damaged; nothing has changed.
        """
        cost, fastest_cost, halted_s = (_finite(state[name]) for name in ("cost", "fastest_cost", "halted_s"))
        bound, at_s = (None if state[name] is None else _finite(state[name]) for name in ("bound", "at"))
        lost_s = self._timebase.date().timestamp() - _finite(state["saved_at"])
        self.iterations = int(state["iterations"])
        self.cost, self.fastest_cost, self.halted_s, self.bound = cost, fastest_cost, halted_s, bound
        self._fastest_at_s = None if at_s is None else at_s + lost_s


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _cost(signal: Signal, begin_s: float, end_s: float, energy_j: float) -> float:
    """Return the cost of energy that was used evenly over a span of time."""
    return signal.mean_between(begin_s, end_s) * energy_j / J_PER_KWH
