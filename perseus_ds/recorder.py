"""What each iteration took: summed over the job, written to ``run.jsonl``, DeepSpeed's monitor and the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from perseus_ds.ranks import Ranks

logger = logging.getLogger("perseus_ds")


class Monitor(Protocol):
    """DeepSpeed's monitor, or anything like it."""

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None: ...


@dataclass(frozen=True)
class Iteration:
    """What this rank saw of one iteration.

    Attributes:
        number: Training step, 1 first.
        samples: Samples seen by the job so far, the monitor's x-axis.
        phase: What Perseus was doing.
        time_s: Iteration time [s].
        energy_j: Energy of this rank's GPU [J].
        clock_changes: Clock changes of this rank's GPU.
        clock_skips: Clock changes it left out because a later one was already due.
        failed: Whether this rank has fallen back to default clocks.
        predicted_time_s: What the plan promised [s]; None without a plan.
        predicted_energy_j: For the whole job [J]; None without a plan.
        plan: The plan's place on the frontier; None without a plan.
        default_energy_j: What the profile says the whole job uses at default clocks [J]; None without a plan.
    """

    number: int
    samples: int
    phase: str
    time_s: float
    energy_j: float
    clock_changes: int
    clock_skips: int = 0
    failed: bool = False
    predicted_time_s: float | None = None
    predicted_energy_j: float | None = None
    plan: int | None = None
    default_energy_j: float | None = None


@dataclass
class _Total:
    """Sums over the iterations so far; those under plans apart."""

    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    planned: int = 0
    planned_j: float = 0.0
    default_j: float = 0.0

    def add(self, time_s: float, energy_j: float, default_j: float | None) -> None:
        self.iterations += 1
        self.time_s += time_s
        self.energy_j += energy_j
        if default_j is not None:
            self.planned += 1
            self.planned_j += energy_j
            self.default_j += default_j


class Recorder:
    """Adds up the ranks' figures of each iteration and writes them on rank 0."""

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        *,
        simulated: bool,
        monitor: Monitor | None = None,
        steps_per_print: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._path = directory / "run.jsonl"
        self._simulated = simulated
        self._monitor = monitor
        self._steps_per_print = steps_per_print
        self._file_works = True
        self._total = _Total()
        self._pipelines = ranks.all_gather(ranks.place.data_parallel_rank)

    def event(self, name: str, **details: Any) -> None:
        """Record that something happened; on rank 0 only."""
        if self._ranks.is_first:
            self._write({"event": name, "time": time.time(), "simulated": self._simulated, **details})

    def add(self, iteration: Iteration) -> None:
        """Record an iteration of all ranks; every rank must do so at the same time."""
        counts = [iteration.clock_changes, iteration.failed, iteration.clock_skips]
        values = [iteration.time_s, iteration.energy_j, *map(float, counts)]
        by_rank = self._ranks.all_gather_numbers(values)
        if self._ranks.is_first:
            time_s, energy_j = float(by_rank[:, 0].max()), float(by_rank[:, 1].sum())
            self._write(
                {
                    "iteration": iteration.number,
                    "ended": round(time.time(), 3),
                    "phase": iteration.phase,
                    "plan": iteration.plan,
                    "time_s": round(time_s, 6),
                    "energy_j": round(energy_j, 3),
                    "energy_by_pipeline_j": self._by_pipeline(by_rank[:, 1]),
                    "power_w": round(energy_j / time_s, 3),
                    "predicted_time_s": iteration.predicted_time_s,
                    "predicted_energy_j": iteration.predicted_energy_j,
                    "saved": iteration.default_energy_j and round(1 - energy_j / iteration.default_energy_j, 4),
                    "clock_changes": int(by_rank[:, 2].sum()),
                    "clock_skips": int(by_rank[:, 4].sum()),
                    "failed_ranks": torch.nonzero(by_rank[:, 3]).flatten().tolist(),
                    "simulated": self._simulated,
                }
            )
            self._total.add(time_s, energy_j, iteration.default_energy_j)
            self._tell_monitor(iteration, time_s, energy_j)
            self._print(iteration, time_s, energy_j)

    def _by_pipeline(self, energies_j: torch.Tensor) -> list[float]:
        sums = [0.0] * (max(self._pipelines) + 1)
        for pipeline, energy_j in zip(self._pipelines, energies_j.tolist(), strict=True):
            sums[pipeline] += energy_j
        return [round(energy_j, 3) for energy_j in sums]

    def _tell_monitor(self, iteration: Iteration, time_s: float, energy_j: float) -> None:
        if self._monitor is None or not getattr(self._monitor, "enabled", True):
            return
        prefix = "Perseus/simulated" if self._simulated else "Perseus"
        values = {"iteration_time_s": time_s, "iteration_energy_j": energy_j, "average_power_w": energy_j / time_s}
        if iteration.default_energy_j is not None and iteration.plan is not None:
            values |= {"plan": float(iteration.plan), "saved": 1 - energy_j / iteration.default_energy_j}
        self._monitor.write_events([(f"{prefix}/{name}", value, iteration.samples) for name, value in values.items()])

    def summarise(self) -> None:
        """Say in one line what the training took and saved, and record it; on rank 0 only."""
        total = self._total
        if not self._ranks.is_first or total.iterations == 0:
            return
        text = f"perseus: {total.iterations} iterations, {total.time_s:.0f} s, {total.energy_j / 3.6e6:.4g} kWh"
        saved = None
        if total.default_j:
            saved = 1 - total.planned_j / total.default_j
            text += f"; {total.planned} under plans, on {saved:.1%} less energy than default clocks take by the profile"
        with contextlib.suppress(OSError):
            print(text + (", simulated GPUs" if self._simulated else ""), flush=True)
        self.event(
            "end",
            iterations=total.iterations,
            time_s=round(total.time_s, 3),
            energy_j=round(total.energy_j, 3),
            saved=saved and round(saved, 4),
        )

    def _print(self, iteration: Iteration, time_s: float, energy_j: float) -> None:
        if not self._steps_per_print or iteration.number % self._steps_per_print:
            return
        text = f"perseus: step {iteration.number}: {iteration.phase}, {time_s:.3f} s, {energy_j:.0f} J"
        if iteration.predicted_time_s is not None and iteration.predicted_energy_j is not None:
            text += (
                f" (plan {iteration.plan}: {iteration.predicted_time_s:.3f} s, {iteration.predicted_energy_j:.0f} J)"
            )
        print(text + (", simulated GPUs" if self._simulated else ""), flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        if not self._file_works:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._file_works = False
            logger.warning("perseus: %s cannot be written (%s); training goes on without it.", self._path, error)
