"""Figures by rank for the job's records; they are long where a job has many ranks, and then not in every record."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.rank_report import RankReports

# A job with so many ranks at most has them in every record; a larger one as rarely as keeps records about as short.
_RANKS = 64


class RankFigures:
    """Adds up the energies of the ranks until a record has them."""

    def __init__(self) -> None:
        self._energies_j: npt.NDArray[np.float64] | None = None
        self._iterations = 0

    def of(self, reports: RankReports) -> dict[str, Any]:
        """Take in an iteration; return fields of its record, none where it has no figures by rank."""
        energies_j = reports.column("energy_j")
        every = math.ceil(len(energies_j) / _RANKS)
        if np.isfinite(energies_j).all():
            self._energies_j = energies_j.copy() if self._energies_j is None else self._energies_j + energies_j
        self._iterations += 1
        if self._iterations % every:
            return {}
        known_j, self._energies_j = self._energies_j, None
        return {
            "energy_by_rank_j": None if known_j is None else tuple(np.round(known_j, 6).tolist()),
            "clocks_asked_mhz": _clocks(reports.column("asked_mhz")),
            "clocks_reached_mhz": _clocks(reports.column("reached_mhz")),
        }


def _clocks(clocks_mhz: npt.NDArray[np.float64]) -> tuple[int | None, ...] | None:
    """Return clocks by rank, None for those not known; None if no clock is."""
    if np.isnan(clocks_mhz).all():
        return None
    return tuple(None if math.isnan(clock) else int(clock) for clock in clocks_mhz.tolist())
