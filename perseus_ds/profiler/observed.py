"""A profile at default clocks of an observed job, from its timeline and the energy of each rank.

Clocks were not changed, so the energy of single instructions was not measured. It follows from each rank's power: a
waiting GPU draws blocking power, and computing takes the rest. Without a given blocking power, it is fitted to the
powers of all ranks, assuming the same power for computing on each. If all ranks wait equally long, it cannot be
determined.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import nnls

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.dag import Boundary, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Load, Transfer
from perseus_ds.profiler.fixed_durations import medians

_LEAST_SPREAD = 0.05
"""If the waiting of ranks differs by less than this share of an iteration, blocking power is not fitted."""
UNREAD_CLOCK_MHZ = 1000
"""Placeholder for the default clock, which was not read."""


def observed_profile(file: TimelineFile, powers_w: Sequence[float], *, blocking_power_w: float | None) -> StageProfile:
    """Return the profile of the iterations at default clocks, without energies if blocking power is unknown.

    ``powers_w`` has the mean power of each pipeline rank's GPU, or is empty if it is unknown.

    Raises:
        ConfigError: The timeline has no iteration at default clocks.
    """
    iterations = [iteration for iteration in file.iterations if iteration.plan is None]
    if not iterations:
        raise ConfigError("timeline.json has no iteration at default clocks. Train a few iterations in observe mode.")
    durations_s: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for operation in _operations(iterations):
        if isinstance(work := operation.work, Instruction):
            durations_s[work.stage, work.kind].append(operation.end_s - operation.start_s)
    waits = [statistics.fmean(shares) for shares in zip(*(each.waits for each in iterations), strict=True)]
    if len(powers_w) != len(waits):
        powers_w = []
    known_w = blocking_power_w if blocking_power_w is not None else _blocking_power_w(waits, powers_w)
    busy_w = dict.fromkeys(range(len(waits)), 1.0)
    if known_w is not None and powers_w:
        busy_w = {
            rank: max(known_w, (power_w - known_w * wait) / (1 - wait))
            for rank, (power_w, wait) in enumerate(zip(powers_w, waits, strict=True))
        }
    rank_of = {op.stage: rank for rank, ops in enumerate(iterations[0].ranks) for op in ops if op.kind == "forward"}
    rows, quality = [], []
    for (stage, kind), taken_s in durations_s.items():
        if kind is Kind.TAIL:
            continue
        mean_s = max(1e-9, statistics.fmean(taken_s))
        error = statistics.stdev(taken_s) / len(taken_s) ** 0.5 / mean_s if len(taken_s) > 1 else None
        rows.append(Measurement(stage, kind, UNREAD_CLOCK_MHZ, mean_s, mean_s * busy_w[rank_of[stage]]))
        quality.append(
            RowQuality(
                stage=stage, kind=kind, clock_mhz=UNREAD_CLOCK_MHZ, samples=len(taken_s), time_relative_error=error
            )
        )
    job = file.job or ProfileInfo(simulated=file.simulated, gpu=file.gpu)
    info = job.model_copy(update={"blocking_power_w": known_w if powers_w else None, "rows": quality})
    return StageProfile(rows, info.with_fixed_durations(_fixed(iterations, durations_s)))


def _operations(iterations: Sequence[MeasuredIteration]) -> Iterator[MeasuredOperation]:
    return (operation for iteration in iterations for operations in iteration.ranks for operation in operations)


def _blocking_power_w(waits: Sequence[float], powers_w: Sequence[float]) -> float | None:
    """Return the blocking power that fits the powers of all ranks best [W], or None if they do not determine it."""
    if len(powers_w) < 2 or max(waits) - min(waits) < _LEAST_SPREAD:
        return None
    (_, waiting_w), _ = nnls(np.array([[1 - wait, wait] for wait in waits]), np.array(powers_w))
    return float(waiting_w) if waiting_w > 0 else None


def _fixed(iterations: Sequence[MeasuredIteration], durations_s: dict[tuple[int, Kind], list[float]]) -> FixedDurations:
    loads_s: list[tuple[int, float]] = []
    transfers_s: list[tuple[Boundary, float]] = []
    for iteration in iterations:
        sides: dict[Transfer, list[MeasuredOperation]] = defaultdict(list)
        for operation in _operations([iteration]):
            match operation.work:
                case Load(stage=stage):
                    loads_s.append((stage, operation.end_s - operation.start_s))
                case Transfer() as transfer:
                    sides[transfer].append(operation)
        for transfer, both in sides.items():
            if len(both) == 2:  # neither side waits after both have begun
                taken_s = min(op.end_s for op in both) - max(op.start_s for op in both)
                transfers_s.append(((transfer.payload, transfer.source, transfer.target), max(0.0, taken_s)))
    return FixedDurations(
        load_s=medians(loads_s),
        transfer_s=medians(transfers_s),
        tail_s={stage: statistics.median(v) for (stage, kind), v in durations_s.items() if kind is Kind.TAIL},
    )
