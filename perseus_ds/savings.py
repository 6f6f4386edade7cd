"""What default clocks take: the time and energy that savings are relative to.

The figures of an order are the means of its last iterations at default clocks, without those that contain a stall. As
long as it has too few of them, they are those of the profile, multiplied by what other orders really take relative to
the profile.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from perseus_ds.artifacts.io import FileModel
from perseus_ds.measures import STALL

_KEPT = 8
"""Number of the last iterations of each order that count."""
_FEWEST = 4
# A prediction is refuted by a deviation of more than this fraction and this number of standard errors.
_OFF, _SURE = 0.02, 3.0
_RECENT = 100


class Default(NamedTuple):
    """Time [s] and energy of all GPUs [J] of an iteration of an order at default clocks.

    Attributes:
        is_measured: Whether they were measured in this job for this order.
    """

    time_s: float
    energy_j: float
    is_measured: bool

    @property
    def power_w(self) -> float:
        return self.energy_j / self.time_s


class _Measured(NamedTuple):
    time_s: float
    energy_j: float | None


class _Saved(FileModel):
    """Iterations at default clocks by order, as kept in the state of a job."""

    measured: dict[int, list[tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(ge=0)] | None]]]


class DefaultClocks:
    """Time and energy at default clocks of each order, which is identified by its number."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[_Measured]] = {}
        self._predicted: dict[int, Default] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._found: dict[int, Default | None] = {}

    def predict(self, order: int, time_s: float, energy_j: float) -> None:
        """Set what the profile says about an order."""
        self._predicted[order] = Default(time_s, energy_j, is_measured=False)
        self._found.clear()

    def add(self, order: int, time_s: float, energy_j: float) -> None:
        """Add an iteration at default clocks. The energy may be NaN."""
        known = self._measured.setdefault(order, deque(maxlen=_KEPT))
        known.append(_Measured(time_s, energy_j if math.isfinite(energy_j) and energy_j > 0 else None))
        self._found.clear()

    def of(self, order: int) -> Default | None:
        """Return what an order takes, or None if that is unknown."""
        if order not in self._found:
            self._found[order] = self._of(order)
        return self._found[order]

    def _of(self, order: int) -> Default | None:
        predicted, known = self._predicted.get(order), self._typical(order)
        if known is not None and known.energy_j is not None:
            return Default(known.time_s, known.energy_j, is_measured=True)
        if predicted is None:
            return None
        time_ratio, energy_ratio = self._ratios()
        if known is not None:
            time_ratio = known.time_s / predicted.time_s
        return Default(predicted.time_s * time_ratio, predicted.energy_j * energy_ratio, is_measured=False)

    def _typical(self, order: int) -> _Measured | None:
        """Return the mean of an order's iterations without stalls. None if there are too few."""
        known = self._measured.get(order, ())
        if len(known) < _FEWEST:
            return None
        found = _without_stalls(known)
        energies_j = [one.energy_j for one in found if one.energy_j is not None]
        energy_j = statistics.fmean(energies_j) if energies_j else None
        return _Measured(statistics.fmean(one.time_s for one in found), energy_j)

    def refutes_prediction(self, order: int) -> bool:
        """Return whether an order certainly takes another time at default clocks than predicted."""
        predicted, known = self._predicted.get(order), self._measured.get(order, ())
        if predicted is None or len(known) < _FEWEST:
            return False
        found_s = [one.time_s for one in _without_stalls(known)]
        error_s = statistics.stdev(found_s) / math.sqrt(len(found_s)) if len(found_s) > 1 else math.inf
        off_s = abs(statistics.fmean(found_s) - predicted.time_s)
        return off_s > _OFF * predicted.time_s + _SURE * error_s

    def _ratios(self) -> tuple[float, float]:
        """Return the mean ratios of measured to predicted time and energy. They are 1 if unknown."""
        times, energies = [], []
        for order, predicted in self._predicted.items():
            known = self._typical(order)
            if known is not None:
                times.append(known.time_s / predicted.time_s)
                if known.energy_j is not None:
                    energies.append(known.energy_j / predicted.energy_j)
        return _mean_or_1(times), _mean_or_1(energies)

    def count(self, order: int) -> None:
        """Count an iteration of an order, at any clocks."""
        self._recent.append(order)

    def relative_time(self, order: int) -> float:
        """Return the time of an order relative to the mean of the last iterations of the job. 1 if unknown."""
        own = self.of(order)
        others = [default.time_s for each in self._recent if (default := self.of(each)) is not None]
        return own.time_s / statistics.fmean(others) if own is not None and others else 1.0

    def state(self) -> dict[str, Any]:
        """Return the measured iterations, as plain values."""
        measured = {
            order: [(round(one.time_s, 6), None if one.energy_j is None else round(one.energy_j, 6)) for one in known]
            for order, known in self._measured.items()
        }
        return _Saved(measured=measured).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. What cannot be read is ignored."""
        try:
            saved = _Saved.model_validate(state)
        except ValidationError:
            return
        for order, known in saved.measured.items():
            self._measured[order] = deque((_Measured(*one) for one in known), maxlen=_KEPT)


def _without_stalls(known: Collection[_Measured]) -> list[_Measured]:
    longest_s = STALL * statistics.median(one.time_s for one in known)
    return [one for one in known if one.time_s <= longest_s]


def _mean_or_1(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 1.0
