"""What each iteration took: summed over the job, written to ``run.jsonl``, DeepSpeed's monitor and the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from perseus_ds.device.rank_clocks import Forecast
from perseus_ds.distributed import Communicator

logger = logging.getLogger("perseus_ds")
# What DeepSpeed's monitor is told of a record, and how it is called there.
_TAGS = {
    "iteration_time_s": "time_s",
    "iteration_energy_j": "energy_j",
    "average_power_w": "power_w",
    "plan": "plan",
    "saved": "saved",
    "late": "late",
    "drift": "drift",
    "clock_changes": "clock_changes",
    "clock_skips": "clock_skips",
}


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
        energy_j: Energy of this rank's GPU [J]; NaN where it cannot be read.
        clock_changes: Clock changes of this rank's GPU.
        clock_skips: Clock changes it left out: too short to be worth it, or a later one was already due.
        failed: Whether this rank has fallen back to default clocks.
        plan: The plan's place on the frontier; None without a plan.
        forecast: What the profile promised for the whole job; None without a plan.
        wants_timeline: Whether this rank wants the iteration's operations kept; what counts is what rank 0 wants.
    """

    number: int
    samples: int
    phase: str
    time_s: float
    energy_j: float
    clock_changes: int
    clock_skips: int = 0
    failed: bool = False
    plan: int | None = None
    forecast: Forecast | None = None
    wants_timeline: bool = False


@dataclass
class _Total:
    """Sums over the iterations so far; those under plans apart."""

    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    without_energy: int = 0
    clock_changes: int = 0
    clock_skips: int = 0
    planned: int = 0
    planned_j: float = 0.0
    default_j: float = 0.0

    def add(self, record: Mapping[str, Any], forecast: Forecast | None) -> None:
        self.iterations += 1
        self.time_s += record["time_s"]
        self.clock_changes += record["clock_changes"]
        self.clock_skips += record["clock_skips"]
        if record["energy_j"] is None:
            self.without_energy += 1
            return
        self.energy_j += record["energy_j"]
        if forecast is not None:
            self.planned += 1
            self.planned_j += record["energy_j"]
            self.default_j += forecast.default_energy_j

    @property
    def saved(self) -> float | None:
        return 1 - self.planned_j / self.default_j if self.default_j else None

    def __str__(self) -> str:
        text = f"{self.iterations} iterations, {self.time_s:.0f} s, {self.energy_j / 3.6e6:.4g} kWh"
        if self.without_energy:
            text += f" (not counting {self.without_energy} iterations whose energy could not be read)"
        text += f", {self.clock_changes} clock changes, {self.clock_skips} skipped"
        if self.saved is not None:
            compared = f"{abs(self.saved):.1%} {'more' if self.saved < 0 else 'less'} energy"
            text += f"; {self.planned} under plans, on {compared} than default clocks take by the profile"
        return text


class Recorder:
    """Adds up the ranks' figures of each iteration and writes them on rank 0.

    Attributes:
        drift: How far instructions are from the profile, as a fraction, when that was last looked at.
        timeline_wanted: Whether rank 0 wanted the operations of the last iteration kept.
    """

    def __init__(
        self,
        ranks: Communicator,
        directory: Path,
        *,
        simulated: bool,
        monitor: Monitor | None = None,
        steps_per_print: int | None = None,
    ) -> None:
        self.drift: float | None = None
        self.timeline_wanted = False
        self._ranks = ranks
        self._path = directory / "run.jsonl"
        self._simulated = simulated
        self._monitor = monitor if getattr(monitor, "enabled", True) else None
        self._steps_per_print = steps_per_print
        self._file_works = True
        self._untold: deque[tuple[str, dict[str, Any]]] = deque()
        self._total = _Total()
        self._pipelines = ranks.all_gather(ranks.topology.data_parallel_rank)

    def event(self, name: str, **details: Any) -> None:
        """Record that something happened; on rank 0 only."""
        if self._ranks.is_first:
            self._write({"event": name, "time": time.time(), "simulated": self._simulated, **details})

    def own_event(self, name: str, **details: Any) -> None:
        """Record that something happened on this rank, with its number; on others than rank 0 with the iteration."""
        details = {"rank": self._ranks.topology.rank, **details}
        if self._ranks.is_first:
            self.event(name, **details)
        else:
            self._untold.append((name, details))

    def add(self, iteration: Iteration) -> dict[str, Any]:
        """Record an iteration of all ranks and return the record on rank 0; every rank must do so at the same time."""
        counts = [iteration.clock_changes, iteration.failed, iteration.clock_skips, len(self._untold)]
        counts.append(iteration.wants_timeline)
        values = [iteration.time_s, iteration.energy_j, *map(float, counts)]
        by_rank = self._ranks.all_gather_numbers(values)
        self.timeline_wanted = bool(by_rank[0, 6])
        if by_rank[:, 5].any():
            self._tell_events()
        if not self._ranks.is_first:
            return {}
        record = self._of_job(iteration, by_rank)
        self._write(record)
        self._total.add(record, iteration.forecast)
        self._tell_monitor(record, iteration.samples)
        self._print(record)
        return record

    def summarise(self) -> None:
        """Say in one line what the training took and saved, and record it; on rank 0 only."""
        if not self._ranks.is_first or self._total.iterations == 0:
            return
        self.say(str(self._total))
        total = {key: round(value, 3) for key, value in asdict(self._total).items()}
        self.event("end", **total, saved=_rounded(self._total.saved, 4))

    def _of_job(self, iteration: Iteration, by_rank: torch.Tensor) -> dict[str, Any]:
        time_s, energy_j = float(by_rank[:, 0].max()), float(by_rank[:, 1].sum())
        has_energy = math.isfinite(energy_j)
        forecast = iteration.forecast
        return {
            "iteration": iteration.number,
            "ended": round(time.time(), 3),
            "phase": iteration.phase,
            "plan": iteration.plan,
            "time_s": round(time_s, 6),
            "energy_j": round(energy_j, 3) if has_energy else None,
            "energy_by_pipeline_j": self._by_pipeline(by_rank[:, 1]) if has_energy else None,
            "power_w": round(energy_j / time_s, 3) if has_energy else None,
            "predicted_time_s": forecast and round(forecast.time_s, 6),
            "predicted_energy_j": forecast and round(forecast.energy_j, 3),
            "saved": round(1 - energy_j / forecast.default_energy_j, 4) if forecast and has_energy else None,
            "late": forecast and round(time_s / forecast.time_s - 1, 4),
            "drift": _rounded(self.drift, 4),
            "clock_changes": int(by_rank[:, 2].sum()),
            "clock_skips": int(by_rank[:, 4].sum()),
            "failed_ranks": torch.nonzero(by_rank[:, 3]).flatten().tolist(),
            "simulated": self._simulated,
        }

    def _tell_events(self) -> None:
        ours = [self._untold.popleft() for _ in range(len(self._untold))]
        for events in self._ranks.all_gather(ours):
            for name, details in events:
                self.event(name, **details)

    def _by_pipeline(self, energies_j: torch.Tensor) -> list[float]:
        sums = [0.0] * (max(self._pipelines) + 1)
        for pipeline, energy_j in zip(self._pipelines, energies_j.tolist(), strict=True):
            sums[pipeline] += energy_j
        return [round(energy_j, 3) for energy_j in sums]

    def _tell_monitor(self, record: Mapping[str, Any], samples: int) -> None:
        if self._monitor is None:
            return
        prefix = "Perseus/simulated" if self._simulated else "Perseus"
        values = {tag: record[key] for tag, key in _TAGS.items() if record[key] is not None}
        try:
            self._monitor.write_events([(f"{prefix}/{tag}", float(value), samples) for tag, value in values.items()])
        except Exception as error:  # files, networks, services: whatever the user has chosen to write to
            self._monitor = None
            logger.warning("perseus: DeepSpeed's monitor failed (%s); it is told no more by Perseus.", error)

    def _print(self, record: Mapping[str, Any]) -> None:
        if not self._steps_per_print or record["iteration"] % self._steps_per_print:
            return
        text = f"step {record['iteration']}: {record['phase']}, {record['time_s']:.3f} s"
        text += "" if record["energy_j"] is None else f", {record['energy_j']:.0f} J"
        if record["predicted_time_s"] is not None:
            promised = f"{record['predicted_time_s']:.3f} s, {record['predicted_energy_j']:.0f} J"
            text += f" (plan {record['plan']}: {promised})"
        self.say(text)

    def say(self, text: str) -> None:
        """Say something to who watches the job's output; on rank 0 only."""
        if not self._ranks.is_first:
            return
        with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk
            print(f"perseus: {text}" + (", simulated GPUs" if self._simulated else ""), flush=True)

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


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
