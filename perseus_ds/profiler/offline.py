"""Measures every (stage, kind) of this rank at one clock after the other, from the highest down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from tqdm import tqdm

from perseus_ds.clocks import ClockController
from perseus_ds.config import ProfileConfig
from perseus_ds.errors import ConfigError, ProfileError
from perseus_ds.execution import Execution, Span
from perseus_ds.gpu.base import Gpu
from perseus_ds.instruction import Instruction, Kind
from perseus_ds.profiler.counter_log import CounterLog
from perseus_ds.ranks import Ranks
from perseus_ds.schedule import Compute
from perseus_ds.stage_profile import Measurement, RowQuality

_RISES_TO_STOP = 5


class Repeatable(Protocol):
    """This rank's instructions, to be run again at will."""

    @property
    def instructions(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that can be run, a forward before its backward."""

    def run(self, stage: int, kind: Kind) -> None:
        """Run a forward, or the backward of the last forward run."""


@dataclass(frozen=True)
class Row:
    """A measurement and how it was made."""

    measurement: Measurement
    quality: RowQuality


def clocks_to_measure(gpu: Gpu, config: ProfileConfig) -> list[int]:
    """Return the clocks of a sweep, the highest first [MHz].

    Raises:
        ConfigError: The GPU supports fewer than two clocks in the range asked for.
    """
    supported = gpu.supported_clocks_mhz()
    low, high = config.min_clock_mhz or supported[0], config.max_clock_mhz or supported[-1]
    chosen = [clock for clock in reversed(supported) if low <= clock <= high][:: config.clock_stride]
    if len(chosen) < 2:
        raise ConfigError(
            f"perseus.profile: {gpu.name} supports {len(chosen)} clocks from {low} to {high} MHz with stride "
            f"{config.clock_stride}; a profile needs at least 2. It supports {supported[0]} to {supported[-1]} MHz."
        )
    return chosen


def check_sweep(gpu: Gpu, config: ProfileConfig) -> None:
    """Check that a sweep has clocks to measure.

    Raises:
        ConfigError: It has not.
    """
    clocks_to_measure(gpu, config)


class OfflineProfiler:
    """Sweeps the clocks of one GPU while its rank repeats its own instructions.

    Forwards are repeated alone; a backward needs a forward before it, so pairs are repeated and the
    forward's energy is subtracted.
    """

    def __init__(
        self,
        *,
        gpu: Gpu,
        clocks: ClockController,
        execution: Execution,
        work: Repeatable,
        ranks: Ranks,
        config: ProfileConfig,
    ) -> None:
        self._gpu = gpu
        self._clocks = clocks
        self._execution = execution
        self._work = work
        self._ranks = ranks
        self._config = config

    def sweep(self) -> list[Row]:
        """Measure until energy has risen five times in a row, and leave the clock at its default."""
        rows: list[Row] = []
        energies_j: list[float] = []
        clocks = clocks_to_measure(self._gpu, self._config)
        try:
            for clock_mhz in tqdm(
                clocks, desc="perseus: profiling clocks", unit="clock", disable=not self._ranks.is_first
            ):
                self._clocks.set_and_wait(clock_mhz)
                self._settle()
                measured = self._measure_all(clock_mhz)
                rows += measured
                energies_j.append(sum(row.measurement.energy_j for row in measured))
                # Ranks that share a stage compute together, so they must stop together.
                if self._ranks.stage_max(0.0 if _keeps_rising(energies_j) else 1.0) == 0.0:
                    break
        finally:
            self._clocks.set_and_wait(None)
        return rows

    def _settle(self) -> None:
        """Let clock and temperature follow the first time each instruction runs at a new clock."""
        for stage, kind in self._work.instructions:
            self._work.run(stage, kind)

    def _measure_all(self, clock_mhz: int) -> list[Row]:
        rows = []
        forward_j: dict[int, float] = {}
        for stage, kind in self._work.instructions:
            cycle = [Kind.FORWARD] if kind is Kind.FORWARD else [Kind.FORWARD, Kind.BACKWARD]
            times_s, cycle_j = self._repeat(stage, cycle)
            energy_j = cycle_j - (forward_j[stage] if kind is Kind.BACKWARD else 0.0)
            forward_j.setdefault(stage, energy_j)
            time_s = statistics.median(times_s)
            if energy_j <= 0:
                raise ProfileError(
                    f"stage {stage}, {kind}, {clock_mhz} MHz: measured {energy_j:.3g} J, which cannot be. "
                    "Make perseus.profile.window_s longer."
                )
            error = statistics.stdev(times_s) / math.sqrt(len(times_s)) / time_s if len(times_s) > 1 else None
            rows.append(
                Row(
                    Measurement(stage, kind, clock_mhz, time_s, energy_j),
                    RowQuality(
                        stage=stage, kind=kind, clock_mhz=clock_mhz, samples=len(times_s), time_relative_error=error
                    ),
                )
            )
        return rows

    def _repeat(self, stage: int, cycle: list[Kind]) -> tuple[list[float], float]:
        """Repeat a cycle of instructions for a window; return the last kind's times [s] and a cycle's energy [J]."""
        with CounterLog(self._gpu) as log:
            begin_s = time.perf_counter()
            spans: list[Span] = []
            count = self._cycles_for(self._config.window_s, lambda: spans.extend(self._cycle(stage, cycle)))
            end_s = time.perf_counter()
        times_s = [
            s.time_s for s in spans if isinstance(s.operation, Compute) and s.operation.instruction.kind is cycle[-1]
        ]
        return times_s, log.power_w(begin_s, end_s) * (end_s - begin_s) / count

    def _cycles_for(self, window_s: float, run: Callable[[], None]) -> int:
        """Run until the window is over and there were enough repetitions, as often as peers of the stage do."""
        begin_s = time.perf_counter()
        run()
        once_s = time.perf_counter() - begin_s
        count = max(self._config.repetitions, math.ceil(window_s / once_s))
        count = int(self._ranks.stage_max(count))
        for _ in range(count - 1):
            run()
        return count

    def _cycle(self, stage: int, cycle: list[Kind]) -> list[Span]:
        self._execution.start_iteration()
        for kind in cycle:
            operation = Compute(Instruction(stage, kind, 0))
            self._execution.begin(operation)
            self._work.run(stage, kind)
            self._execution.end(operation)
        return self._execution.spans()


def _keeps_rising(energies_j: list[float]) -> bool:
    last = energies_j[-_RISES_TO_STOP - 1 :]
    return len(last) > _RISES_TO_STOP and all(a < b for a, b in pairwise(last))
