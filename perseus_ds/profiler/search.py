"""Chooses the clocks to measure next, the same on all ranks; rows are written to disk after every clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.device.gpu.base import Gpu
from perseus_ds.distributed import Communicator
from perseus_ds.errors import ConfigError, GpuError, ProfileError
from perseus_ds.profiler.denoise import denoise
from perseus_ds.profiler.profile_config import ProfileConfig
from perseus_ds.profiler.rows import MeasuredRow, combine_rows, reached_only
from perseus_ds.profiler.sampling import make_sampler

logger = logging.getLogger("perseus_ds")

# While training goes on, every measured clock costs a slower iteration.
_ONLINE_BUDGET = 8


def clocks_to_choose_from(gpu: Gpu, config: ProfileConfig) -> list[int]:
    """Return the clocks that may be measured, ascending [MHz].

    Raises:
        ConfigError: The GPU supports fewer than two clocks in the configured range.
    """
    supported = gpu.supported_clocks_mhz()
    low, high = config.min_clock_mhz or supported[0], config.max_clock_mhz or supported[-1]
    chosen = [clock for clock in supported if low <= clock <= high]
    if len(chosen) < 2:
        raise ConfigError(
            f"perseus.profile: {gpu.name} supports {len(chosen)} clocks from {low} to {high} MHz; a profile needs at "
            f"least 2. It supports {supported[0]} to {supported[-1]} MHz."
        )
    return chosen


@dataclass(frozen=True)
class SearchResult:
    """The profile that all ranks measured.

    Attributes:
        profile: Estimates to plan with: less noise, and rows for clocks between the measured ones.
        raw: The rows as they were measured.
    """

    profile: StageProfile
    raw: StageProfile


class ClockSearch:
    """Chooses clocks to measure until the profile is accurate enough; all ranks must call its methods together.

    Rows are written to ``measured.csv`` after every clock. If ``measured.csv`` has rows of the same job, and no
    profile was finished after them, the search continues the interrupted one.

    Args:
        ranks: All ranks.
        clocks_mhz: The clocks that may be measured, ascending.
        config: How to sample.
        info: The device and job; ``info.job`` identifies the job.
        directory: Where the profile will be written.
        online: Whether training goes on meanwhile, at the measured clocks.
    """

    def __init__(
        self,
        ranks: Communicator,
        clocks_mhz: Sequence[int],
        config: ProfileConfig,
        info: ProfileInfo,
        directory: Path,
        *,
        online: bool = False,
    ) -> None:
        self._ranks = ranks
        self._clocks = clocks_mhz
        self._info = info
        self._directory = directory
        self._sampler = make_sampler(
            config.sampling,
            clocks_mhz,
            stride=config.clock_stride,
            blocking_power_w=info.blocking_power_w or 0.0,
            budget=most_clocks(config, len(clocks_mhz), online=online),
        )
        self._rows: list[MeasuredRow] = []
        self._earlier = self._rows_of_an_interrupted_search() if ranks.is_first else {}
        self.resumed = 0

    def next_clocks(self) -> list[int]:
        """Return the clocks to measure now, the highest first [MHz]; none when the search is finished."""
        return self._ranks.from_first(self._next_unknown)

    def add(self, rows: Sequence[MeasuredRow] | Exception) -> None:
        """Add the rows that this rank measured at those clocks, or the error that prevented it.

        Raises:
            GpuError: On all ranks, if the GPU of one had an error.
            ProfileError: On all ranks, if one had another error.
            OSError: On all ranks, if rank 0 cannot write the rows.
        """
        by_rank = self._ranks.gather(rows)

        def take() -> None:
            for rank, found in enumerate(by_rank):
                if isinstance(found, Exception):
                    kind = GpuError if isinstance(found, GpuError) else ProfileError
                    raise kind(f"no profile was written: rank {rank}: {found}")
            self._take(combine_rows(row for found in by_rank if not isinstance(found, Exception) for row in found))

        self._ranks.from_first(take)

    def finish(self, info: ProfileInfo) -> SearchResult:
        """Make the profile; on rank 0 only.

        Args:
            info: The metadata to save with it.

        Raises:
            ProfileError: There are no rows.
        """
        kept, left_out = reached_only(self._rows)
        if left_out:
            clocks = sorted({row.measurement.clock_mhz for row in left_out})
            logger.warning(
                "perseus: a power or thermal limit kept GPUs below %s MHz; %d rows are left out. The fastest row that "
                "the limit allows is kept.",
                f"{clocks[0]} to {clocks[-1]}" if len(clocks) > 1 else clocks[0],
                len(left_out),
            )
        if not kept:
            raise ProfileError("no instruction was measured at any clock. See the warnings above.")
        raw = _profile(self._rows, info)
        return SearchResult(denoise(_profile(kept, info), self._clocks), raw)

    def _next_unknown(self) -> list[int]:
        while clocks := self._sampler.next_clocks():
            unknown = [clock for clock in clocks if clock not in self._earlier]
            if unknown and len(unknown) < len(clocks):
                self._take([row for clock in clocks for row in self._earlier.pop(clock, [])], keep=False)
            if unknown:
                return unknown
            self.resumed += len(clocks)
            self._take([row for clock in clocks for row in self._earlier.pop(clock)], keep=False)
        return []

    def _take(self, rows: list[MeasuredRow], *, keep: bool = True) -> None:
        self._rows += rows
        self._sampler.add(row.measurement for row in rows)
        if keep:
            _profile(self._rows, self._info).save(self._directory / "measured.csv")

    def _rows_of_an_interrupted_search(self) -> dict[int, list[MeasuredRow]]:
        path, finished = self._directory / "measured.csv", self._directory / "profile.csv"
        if not path.exists() or (finished.exists() and finished.stat().st_mtime >= path.stat().st_mtime):
            return {}
        try:
            earlier = StageProfile.load(path)
        except ProfileError:
            return {}
        if earlier.info.job is None or earlier.info.job != self._info.job:
            return {}
        found: dict[int, list[MeasuredRow]] = {}
        for quality in earlier.info.rows:
            row = MeasuredRow(earlier.at(quality.stage, quality.kind, quality.clock_mhz), quality)
            found.setdefault(quality.clock_mhz, []).append(row)
        return found


def _profile(rows: Sequence[MeasuredRow], info: ProfileInfo) -> StageProfile:
    return StageProfile([r.measurement for r in rows], info.model_copy(update={"rows": [r.quality for r in rows]}))


def most_clocks(config: ProfileConfig, clocks: int, *, online: bool = False) -> int:
    """Return the largest number of clocks that are measured, given how many there are."""
    if config.sampling == "adaptive":
        budget = max(4, clocks // 3)
        return min(_ONLINE_BUDGET, budget) if online else budget
    return clocks if config.sampling == "full" else -(-clocks // config.clock_stride)
