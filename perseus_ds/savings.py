"""What default clocks take, and what was saved: the only definition of a saving.

- The figures of an order at default clocks are the means of its last iterations at default clocks, without those that
  contain a stall. As long as it has too few of them, they are those of the profile, multiplied by what other orders
  really take relative to the profile. Before there is a profile, all measured iterations count.
- The inputs of iterations may differ in length. Then time and energy are proportional to a power of the *size* of an
  iteration, which is fitted to the iterations of each order, and figures are those of an iteration of a given size.
- The record of every iteration contains what default clocks take for its order. An iteration is *compared* if this is
  known and the iteration does not contain a stall. A *saving* is the sum over compared iterations of the difference.
- Default clocks were measured earlier than the iterations that are compared, maybe under other limits of GPUs. The
  trial of plans (``policy/trial.py``) compares neighbours only. So as soon as it has enough pairs, what default clocks
  take for all iterations of a trial is multiplied by the factor with which their saving is the one that the pairs
  show. The error of a saving is that of the trial.
- An iteration contains a *stall* if it takes more than 1.5 times as long as its plans promise or as others at default
  clocks take, such as one in which a checkpoint is written. It is left out, because waiting takes less power.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from perseus_ds.artifacts.io import FileModel
from perseus_ds.artifacts.run_iterations import IterationRecord, Sums
from perseus_ds.artifacts.run_savings import TrialState

STALL = 1.5
"""An iteration that takes more than this many times the usual time contains a stall."""
_KEPT = 8
"""Number of the last iterations of each order that count."""
_FEWEST = 4
# A prediction is refuted by a deviation of more than this fraction and this number of standard errors.
_OFF, _SURE = 0.02, 3.0
_RECENT = 100
# Relative standard deviation of sizes below which differences of times are hardly due to them.
_SAME_SIZE = 0.01


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

    def times(self, time_factor: float, energy_factor: float) -> Default:
        """Return both figures multiplied by factors."""
        return self._replace(time_s=self.time_s * time_factor, energy_j=self.energy_j * energy_factor)


class Size(NamedTuple):
    """Size of the inputs of an iteration: tokens of a micro-batch.

    Attributes:
        longest: In the pipeline with the most tokens, for which the others wait.
        mean: On average over pipelines.
    """

    longest: Annotated[float, Field(gt=0)]
    mean: Annotated[float, Field(gt=0)]

    @classmethod
    def of(cls, tokens: Sequence[float]) -> Size | None:
        """Return the size of an iteration from the tokens of a micro-batch of each pipeline, 0 if unknown."""
        return cls(max(tokens), statistics.fmean(tokens)) if min(tokens) > 0 else None


class _Measured(NamedTuple):
    time_s: Annotated[float, Field(gt=0)]
    energy_j: Annotated[float, Field(ge=0)] | None
    size: Size | None = None

    def rounded(self) -> _Measured:
        """Return the iteration with as many digits as a file needs."""
        energy_j = None if self.energy_j is None else round(self.energy_j, 6)
        return _Measured(round(self.time_s, 6), energy_j, self.size)


class Exponents(NamedTuple):
    """Powers of the size to which time and energy of iterations are proportional."""

    time: float
    energy: float


def exponent(series: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Return the power of the size to which values are proportional, by least squares of their logarithms.

    Args:
        series: Sizes and values. Only the differences within each series count.

    Returns:
        The exponent, which is close to 1 if sizes hardly differ.
    """
    products = squares = 0.0
    for pairs in series:
        sizes = _deviations(math.log(size) for size, _ in pairs)
        values = _deviations(math.log(value) for _, value in pairs)
        products += math.fsum(size * (value - size) for size, value in zip(sizes, values, strict=True))
        squares += math.fsum(size**2 for size in sizes) + len(sizes) * _SAME_SIZE**2
    return 1 + products / squares if squares else 1.0


def _deviations(values: Iterable[float]) -> list[float]:
    found = [*values]
    mean = statistics.fmean(found) if found else 0.0
    return [value - mean for value in found]


class _SavedDefault(FileModel):
    """Iterations at default clocks by order, as kept in the state of a job."""

    measured: dict[int, list[_Measured]]


class DefaultClocks:
    """Time and energy at default clocks of each order, which is identified by its number."""

    def __init__(self) -> None:
        self._passes: dict[int, int] = {}
        self._measured: dict[int, deque[_Measured]] = {}
        self._predicted: dict[int, Default] = {}
        self._profiled_size: float | None = None
        self._recent: deque[int] = deque(maxlen=_RECENT)
        # Computed when they are needed, until an iteration is added:
        self._found: dict[int, Default | None] = {}
        self._fitted: tuple[Exponents, Size | None] | None = None

    def set_passes(self, order: int, passes: int) -> None:
        """Set the number of passes of an order, by which it is estimated before there is a profile."""
        if self._passes.get(order) != passes:
            self._passes[order] = passes
            self._forget()

    def predict(self, order: int, time_s: float, energy_j: float, size: float | None = None) -> None:
        """Set what the profile says about an order, and the size of the iterations in which it was measured."""
        self._predicted[order] = Default(time_s, energy_j, is_measured=False)
        self._profiled_size = size
        self._forget()

    def add(self, order: int, time_s: float, energy_j: float, size: Size | None = None) -> None:
        """Add an iteration at default clocks. The energy may be NaN."""
        known = self._measured.setdefault(order, deque(maxlen=_KEPT))
        known.append(_Measured(time_s, energy_j if math.isfinite(energy_j) and energy_j > 0 else None, size))
        self._forget()

    def _forget(self) -> None:
        self._found.clear()
        self._fitted = None

    def of(self, order: int, size: Size | None = None) -> Default | None:
        """Return what an order takes, by default for inputs of the usual size. None if that is unknown."""
        if order not in self._found:
            self._found[order] = self._of(order)
        found = self._found[order]
        _, usual = self._fit()
        return found if found is None or size is None or usual is None else found.times(*self._factors(usual, size))

    def time_factor(self, tokens: float) -> float:
        """Return the time of passes on this number of tokens relative to the profile. 1 if unknown."""
        if self._profiled_size is None or tokens <= 0:
            return 1.0
        exponents, _ = self._fit()
        return float((tokens / self._profiled_size) ** exponents.time)

    def _of(self, order: int) -> Default | None:
        """Return what an order takes for inputs of the usual size."""
        predicted = self._prediction(order)
        known = self._typical(order, fewest=1 if predicted is None else _FEWEST)
        if known is not None and known.energy_j is not None:
            return Default(known.time_s, known.energy_j, is_measured=True)
        if predicted is None:
            return self._by_passes(order)
        time_ratio, energy_ratio = self._ratios()
        if known is not None:
            time_ratio = known.time_s / predicted.time_s
        return predicted.times(time_ratio, energy_ratio)

    def _by_passes(self, order: int) -> Default | None:
        """Estimate an order by its number of passes and those of orders that were measured. None if unknown."""
        passes = self._passes.get(order)
        times_s, energies_j = [], []
        for other, count in self._passes.items():
            known = self._typical(other, fewest=1)
            if known is not None and known.energy_j is not None:
                times_s.append(known.time_s / count)
                energies_j.append(known.energy_j / count)
        if not passes or not times_s:
            return None
        time_s, energy_j = passes * statistics.fmean(times_s), passes * statistics.fmean(energies_j)
        return Default(time_s, energy_j, is_measured=False)

    def _fit(self) -> tuple[Exponents, Size | None]:
        """Return the powers of the size, and the usual size: the mean of the measured iterations or of the profile."""
        if self._fitted is None:
            times, energies, sizes = [], [], []
            for order in self._measured:
                known = [one for one in _without_stalls(self._measured[order]) if one.size is not None]
                times.append([(one.size.longest, one.time_s) for one in known if one.size])
                energies.append([(one.size.mean, one.energy_j) for one in known if one.size and one.energy_j])
                sizes += [one.size for one in known if one.size]
            if sizes:
                usual: Size | None = Size(*map(statistics.geometric_mean, zip(*sizes, strict=True)))
            else:
                usual = None if self._profiled_size is None else Size(self._profiled_size, self._profiled_size)
            self._fitted = Exponents(exponent(times), exponent(energies)), usual
        return self._fitted

    def _factors(self, before: Size, after: Size) -> tuple[float, float]:
        """Return by which factors time and energy change between two sizes."""
        exponents, _ = self._fit()
        time_factor = (after.longest / before.longest) ** exponents.time
        return time_factor, (after.mean / before.mean) ** exponents.energy

    def _prediction(self, order: int) -> Default | None:
        """Return what the profile says about an order, for inputs of the usual size."""
        predicted = self._predicted.get(order)
        _, usual = self._fit()
        if predicted is None or usual is None or self._profiled_size is None:
            return predicted
        return predicted.times(*self._factors(Size(self._profiled_size, self._profiled_size), usual))

    def _at_usual_size(self, order: int) -> list[_Measured]:
        """Return the measured iterations of an order without stalls, each as for inputs of the usual size."""
        _, usual = self._fit()
        found = []
        for one in self._measured.get(order, ()):
            if one.size is None or usual is None:
                found.append(one)
                continue
            time_factor, energy_factor = self._factors(one.size, usual)
            energy_j = None if one.energy_j is None else one.energy_j * energy_factor
            found.append(_Measured(one.time_s * time_factor, energy_j))
        return _without_stalls(found)

    def _typical(self, order: int, fewest: int = _FEWEST) -> _Measured | None:
        """Return the mean of an order's iterations without stalls. None if there are too few."""
        if len(self._measured.get(order, ())) < fewest:
            return None
        found = self._at_usual_size(order)
        energies_j = [one.energy_j for one in found if one.energy_j is not None]
        energy_j = statistics.fmean(energies_j) if energies_j else None
        return _Measured(statistics.fmean(one.time_s for one in found), energy_j)

    def refutes_prediction(self, order: int) -> bool:
        """Return whether an order certainly takes another time at default clocks than predicted."""
        predicted = self._prediction(order)
        if predicted is None or len(self._measured.get(order, ())) < _FEWEST:
            return False
        found_s = [one.time_s for one in self._at_usual_size(order)]
        error_s = statistics.stdev(found_s) / math.sqrt(len(found_s)) if len(found_s) > 1 else math.inf
        off_s = abs(statistics.fmean(found_s) - predicted.time_s)
        return off_s > _OFF * predicted.time_s + _SURE * error_s

    def _ratios(self) -> tuple[float, float]:
        """Return the mean ratios of measured to predicted time and energy. They are 1 if unknown."""
        times, energies = [], []
        for order in self._predicted:
            predicted, known = self._prediction(order), self._typical(order)
            if predicted is not None and known is not None:
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
        measured = {}
        for order, known in self._measured.items():
            measured[order] = [one.rounded() for one in known]
        return _SavedDefault(measured=measured).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. What cannot be read is ignored."""
        try:
            saved = _SavedDefault.model_validate(state)
        except ValidationError:
            return
        for order, known in saved.measured.items():
            self._measured[order] = deque(known, maxlen=_KEPT)
        self._forget()


def _without_stalls(known: Collection[_Measured]) -> list[_Measured]:
    longest_s = STALL * statistics.median(one.time_s for one in known)
    return [one for one in known if one.time_s <= longest_s]


def _mean_or_1(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 1.0


def mean_without_stalls(times_s: Iterable[float]) -> float:
    """Return the mean time of iterations without stalls [s]."""
    kept = _without_stalls([_Measured(time_s, None) for time_s in times_s])
    return statistics.fmean(one.time_s for one in kept)


def has_stall(record: IterationRecord) -> bool:
    """Return whether an iteration contains a stall. Iterations at the low clocks of a profile may take any time."""
    usual_s = record.default_time_s if record.predicted_time_s is None else record.predicted_time_s
    return record.phase != "profile" and usual_s is not None and record.time_s > STALL * usual_s


def sums_of(record: IterationRecord) -> Sums:
    """Return the sums over one iteration."""
    sums = Sums(
        iterations=1,
        time_s=record.time_s,
        energy_j=record.energy_j or 0.0,
        without_energy=int(record.energy_j is None),
        clock_changes=record.clock_changes,
        clock_skips=record.clock_skips,
        stalls=int(has_stall(record)),
    )
    if record.default_time_s and record.default_energy_j and not sums.stalls:
        sums.compared, sums.compared_s, sums.default_s = 1, record.time_s, record.default_time_s
        if record.energy_j is not None:
            sums.known, sums.compared_j, sums.default_j = 1, record.energy_j, record.default_energy_j
            if record.tokens:
                sums.tokens, sums.tokens_s, sums.tokens_j = record.tokens, record.time_s, record.energy_j
                sums.tokens_default_s, sums.tokens_default_j = record.default_time_s, record.default_energy_j
    return sums


def as_in(trial: TrialState, sums: Sums) -> Sums:
    """Return sums with the changes of time and energy that the pairs of the trial of these iterations show."""
    default_s, default_j = sums.default_s, sums.default_j
    if trial.slowdown is not None:
        default_s = sums.compared_s / (1 + trial.slowdown)
    if trial.saved is not None:
        default_j = sums.compared_j / (1 - trial.saved)
    return replace(sums, default_s=default_s, default_j=default_j)


def total_of(parts: Iterable[Sums]) -> Sums:
    """Return the sums over all iterations of several sums."""
    total = Sums()
    for part in parts:
        total.add(part)
    return total
