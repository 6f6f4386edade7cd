"""Time and energy of each stage's instructions at each clock, read from and written to ``profile.csv``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.io import write_together
from perseus_ds.artifacts.limits import MOST_JSON_BYTES
from perseus_ds.artifacts.profile_csv import COLUMNS, Measurement, check, read_rows
from perseus_ds.artifacts.profile_metadata import ProfileInfo, RowQuality, TransferDuration, load_info
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind

__all__ = ["ClockOptions", "Measurement", "ProfileInfo", "RowQuality", "StageProfile", "TransferDuration"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClockOptions:
    """The clocks measured for one (stage, kind), ascending, with time and energy at each.

    Attributes:
        clock_mhz: Shape (n,).
        time_s: Shape (n,).
        energy_j: Shape (n,), per GPU.
    """

    clock_mhz: npt.NDArray[np.int64]
    time_s: Floats
    energy_j: Floats

    def effective_energy_j(self, blocking_power_w: float) -> Floats:
        """Return the effective energy, ``energy - blocking power * time``: the cost beyond waiting [J]."""
        return self.energy_j - blocking_power_w * self.time_s

    def pareto(self, blocking_power_w: float) -> ClockOptions:
        """Return the options that no other one beats in both time and effective energy, the fastest first."""
        cost = self.effective_energy_j(blocking_power_w)
        kept: list[int] = []
        for index in np.lexsort((-self.clock_mhz, cost, self.time_s)):
            if not kept or cost[index] < cost[kept[-1]]:
                kept.append(int(index))
        return ClockOptions(self.clock_mhz[kept], self.time_s[kept], self.energy_j[kept])


def lower_hull(time_s: Floats, cost_j: Floats) -> list[int]:
    """Return the indices of the points on the lower hull of points with rising time and falling cost."""
    kept: list[int] = []
    for index in range(len(time_s)):
        while len(kept) >= 2 and _above(time_s, cost_j, kept[-2], kept[-1], index):
            kept.pop()
        kept.append(index)
    return kept


def _above(time_s: Floats, cost_j: Floats, left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies on or above the line through its neighbours."""
    rise = (cost_j[right] - cost_j[left]) * (time_s[middle] - time_s[left])
    return bool((cost_j[middle] - cost_j[left]) * (time_s[right] - time_s[left]) >= rise)


class StageProfile:
    """Time and energy by stage, kind and clock.

    Attributes:
        info: The device and job that were measured, fixed durations, and the quality of each row.
    """

    def __init__(self, measurements: Iterable[Measurement], info: ProfileInfo | None = None) -> None:
        """Combine the measurements; see :meth:`load` for what is checked.

        Raises:
            ProfileError: A value is not a finite positive number, or rows of one key disagree.
        """
        self.info = info or ProfileInfo()
        rows: dict[tuple[int, Kind], dict[int, Measurement]] = defaultdict(dict)
        for row in measurements:
            check(row)
            known = rows[row.stage, row.kind].setdefault(row.clock_mhz, row)
            if known != row:
                raise ProfileError(
                    f"Two measurements disagree for stage {row.stage}, {row.kind}, {row.clock_mhz} MHz: "
                    f"{known.time_s} s, {known.energy_j} J and {row.time_s} s, {row.energy_j} J. Keep one."
                )
        self._rows = {key: {c: by_clock[c] for c in sorted(by_clock)} for key, by_clock in sorted(rows.items())}

    @classmethod
    def load(cls, path: Path | str) -> StageProfile:
        """Read ``profile.csv`` and, if it is in the same folder, ``profile.json``.

        Rows that differ in an extra column ``rank``, ``dp_rank`` or ``tp_rank`` (Merak's) are
        combined: the slowest rank's time, the mean energy.

        Raises:
            ProfileError: The message names file and line, says what was expected and what to do.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "profile.csv"
        if not path.exists():
            raise ProfileError(f'{path}: no such profile. Measure one with "mode": "profile", or give its path.')
        info_path = path.with_suffix(".json")
        info = load_info(info_path) if info_path.exists() else ProfileInfo()
        try:
            profile = cls(read_rows(path), info)
        except ProfileError as error:
            raise error if str(error).startswith(str(path)) else ProfileError(f"{path}: {error}") from None
        for row in info.rows:
            if row.clock_mhz not in profile._rows.get((row.stage, row.kind), {}):
                raise ProfileError(
                    f"{path}: no row for stage {row.stage}, {row.kind}, {row.clock_mhz} MHz, which {info_path.name} "
                    "lists. The file is cut off or was edited; measure the profile again."
                )
        return profile

    def save(self, path: Path | str) -> None:
        """Write ``profile.csv``, and ``profile.json`` in the same folder, both complete or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [",".join(COLUMNS)]
        lines += [f"{m.stage},{m.kind},{m.clock_mhz},{m.time_s!r},{m.energy_j!r}" for m in self.measurements]
        info = self.info.model_dump_json(indent=2) + "\n"
        if len(info) > MOST_JSON_BYTES:  # of a long schedule, most of it is the indentation
            info = self.info.model_dump_json() + "\n"
        write_together([(path.with_suffix(".json"), info), (path, "\n".join(lines) + "\n")])

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All rows, by stage, kind and ascending clock."""
        return tuple(row for rows in self._rows.values() for row in rows.values())

    @property
    def keys(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that were measured."""
        return tuple(self._rows)

    @property
    def num_stages(self) -> int:
        return 1 + max((stage for stage, _ in self._rows), default=-1)

    def options(self, stage: int, kind: Kind) -> ClockOptions:
        """Return the measured clocks of one (stage, kind).

        Raises:
            ProfileError: There are none.
        """
        rows = self._rows.get((stage, kind))
        if rows is None:
            raise ProfileError(
                f"The profile has no {kind} rows for stage {stage}. Measure it again, or give fewer stages."
            )
        return ClockOptions(
            np.array(list(rows), dtype=np.int64),
            np.array([row.time_s for row in rows.values()]),
            np.array([row.energy_j for row in rows.values()]),
        )

    def at(self, stage: int, kind: Kind, clock_mhz: int) -> Measurement:
        """Return the row of one clock.

        Raises:
            ProfileError: That clock was not measured.
        """
        row = self._rows.get((stage, kind), {}).get(clock_mhz)
        if row is None:
            raise ProfileError(f"The profile has no row for stage {stage}, {kind}, {clock_mhz} MHz.")
        return row

    def at_highest_clock(self, stage: int, kind: Kind) -> Measurement:
        """Return the row of the highest clock measured, which is not always the fastest."""
        return self.at(stage, kind, int(self.options(stage, kind).clock_mhz[-1]))

    def where(self, keep: Callable[[int, Kind, int], bool]) -> StageProfile:
        """Return the rows of those stages, kinds and clocks [MHz] for which ``keep`` holds, with their quality."""
        quality = [row for row in self.info.rows if keep(row.stage, row.kind, row.clock_mhz)]
        rows = [row for row in self.measurements if keep(row.stage, row.kind, row.clock_mhz)]
        return StageProfile(rows, self.info.model_copy(update={"rows": quality}))
