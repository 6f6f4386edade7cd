"""One offline profile, measured by all ranks together and written by rank 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from perseus_ds.errors import PerseusError, ProfileError
from perseus_ds.execution import Span
from perseus_ds.gpu.base import Gpu
from perseus_ds.instruction import Kind
from perseus_ds.profiler.blocking import measure_blocking_power_w
from perseus_ds.profiler.offline import OfflineProfiler, Row
from perseus_ds.profiler.rest import load_durations_s, tail_durations_s, transfer_durations
from perseus_ds.ranks import Place, Ranks
from perseus_ds.stage_profile import Measurement, ProfileInfo, StageProfile


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    place: Place
    rows: list[Row]
    spans: list[list[Span]]
    blocking_power_w: float
    error: str | None = None


def measure_profile(
    profiler: OfflineProfiler,
    *,
    gpu: Gpu,
    ranks: Ranks,
    device: torch.device,
    spans: list[list[Span]],
    window_s: float,
    info: ProfileInfo,
    path: Path,
) -> StageProfile | None:
    """Measure a profile on all ranks and write it on rank 0.

    Args:
        profiler: Of this rank.
        gpu: Of this rank.
        ranks: All ranks.
        device: Where the engine's tensors live.
        spans: This rank's operations in ordinary iterations before, by iteration.
        window_s: How long blocking power is measured [s].
        info: What is known of the job.
        path: Where to write ``profile.csv``.

    Returns:
        The profile on rank 0, None elsewhere.

    Raises:
        ProfileError: On rank 0: a rank could not measure; nothing was written.
    """
    ranks.barrier()
    power_w = measure_blocking_power_w(gpu, ranks.place, device, window_s)
    try:
        report = RankReport(ranks.place, profiler.sweep(), spans, power_w)
    except (PerseusError, TimeoutError) as error:  # the other ranks wait to hear of it
        report = RankReport(ranks.place, [], spans, power_w, str(error))
    reports = ranks.gather(report)
    if not reports:
        return None
    for failed in reports:
        if failed.error is not None:
            raise ProfileError(f"no profile was written: rank {failed.place.rank}: {failed.error}")
    profile = combine(reports, info)
    profile.save(path)
    return profile


def combine(reports: Sequence[RankReport], info: ProfileInfo) -> StageProfile:
    """Make one profile of what all ranks measured.

    Rows of ranks that share a stage become one: the slowest time, the mean energy. Loads and
    transfers are the first pipeline's.
    """
    by_key: dict[tuple[int, Kind, int], list[Row]] = defaultdict(list)
    for report in reports:
        for row in report.rows:
            by_key[row.measurement.stage, row.measurement.kind, row.measurement.clock_mhz].append(row)
    first_pipeline = [r.spans for r in reports if r.place.data_parallel_rank == 0]
    complete = info.model_copy(
        update={
            "blocking_power_w": sum(r.blocking_power_w for r in reports) / len(reports),
            "load_s": load_durations_s(first_pipeline),
            "transfers": transfer_durations(first_pipeline),
            "tail_s": tail_durations_s([r.spans for r in reports]),
            "rows": [rows[0].quality for _, rows in sorted(by_key.items())],
        }
    )
    measurements = [
        Measurement(
            stage,
            kind,
            clock_mhz,
            max(r.measurement.time_s for r in rows),
            sum(r.measurement.energy_j for r in rows) / len(rows),
        )
        for (stage, kind, clock_mhz), rows in by_key.items()
    ]
    return StageProfile(measurements, complete)
