"""A profile at default clocks of an observed job, from its timeline and the energy of each rank.

Clocks were not changed, so the energy of single instructions was not measured. It follows from each rank's power: a
waiting GPU draws blocking power, and computing takes the rest. Without a given blocking power, it is fitted to the
powers of all ranks, assuming the same power for computing on each. If all ranks wait equally long, it cannot be
determined.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile
from perseus_ds.artifacts.timeline import MeasuredOperation, TimelineFile
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Span, Transfer
from perseus_ds.profiler.fixed_durations import fixed_durations, medians, tails_s

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
    ranks = [[_spans(each.ranks[rank]) for each in iterations] for rank in range(len(iterations[0].ranks))]
    durations_s: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    rank_of: dict[int, int] = {}
    for rank, spans in ((rank, spans) for rank, own in enumerate(ranks) for spans in own):
        for span in spans:
            if isinstance(span.operation, Compute) and (work := span.operation.instruction).kind is not Kind.TAIL:
                durations_s[work.stage, work.kind].append(span.time_s)
                rank_of[work.stage] = rank
    by_iteration = [each.waits for each in iterations]
    waits = [statistics.fmean(of_rank) for of_rank in zip(*by_iteration, strict=True)]
    if len(powers_w) != len(waits):
        powers_w = []
    known_w = blocking_power_w if blocking_power_w is not None else _blocking_power_w(waits, powers_w)
    busy_w = dict.fromkeys(range(len(waits)), 1.0)
    if known_w is not None and powers_w:
        busy_w = {
            rank: max(known_w, (power_w - known_w * wait) / (1 - wait))
            for rank, (power_w, wait) in enumerate(zip(powers_w, waits, strict=True))
        }
    rows, quality = [], []
    for (stage, kind), taken_s in durations_s.items():
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
    tail_s = medians(tail for own in ranks for spans in own for tail in tails_s(spans).items())
    return StageProfile(rows, info.with_fixed_durations(replace(fixed_durations(ranks), tail_s=tail_s)))


def _spans(operations: Sequence[MeasuredOperation]) -> list[Span]:
    spans = []
    for operation in operations:
        match operation.work:
            case Instruction() as instruction:
                spans.append(Span(Compute(instruction), operation.start_s, operation.end_s))
            case Transfer() as transfer:
                spans.append(Span(Exchange((transfer,)), operation.start_s, operation.end_s))
            case work:
                spans.append(Span(work, operation.start_s, operation.end_s))
    return spans


def _blocking_power_w(waits: Sequence[float], powers_w: Sequence[float]) -> float | None:
    """Return the blocking power that fits the powers of all ranks best [W], or None if they do not determine it."""
    if len(powers_w) < 2 or max(waits) - min(waits) < _LEAST_SPREAD:
        return None
    (_, waiting_w), _ = nnls(np.array([[1 - wait, wait] for wait in waits]), np.array(powers_w))
    return float(waiting_w) if waiting_w > 0 else None
