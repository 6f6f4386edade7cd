"""The energy of a job's ranks or pipelines, added up record by record: large jobs have too many figures to keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A part of the job's energy.

    Attributes:
        name: Of a rank or a pipeline.
        energy_j: Over the whole run [J].
        power_w: On average [W].
    """

    name: str
    energy_j: float
    power_w: float


class PartSums:
    """What is known of the parts so far."""

    def __init__(self) -> None:
        self._sums_j: list[float] | None = None
        self._time_s = self._since_s = 0.0
        self._is_mixed = False

    def add(self, time_s: float, parts_j: tuple[float, ...] | None) -> None:
        """Add an iteration.

        Args:
            time_s: How long it took; 0 where its energy is not known.
            parts_j: Of all iterations since the last one that had them [J]; None where it has none.
        """
        self._since_s += time_s
        if parts_j is None:
            return
        self._time_s, self._since_s = self._time_s + self._since_s, 0.0
        if self._sums_j is None:
            self._sums_j = [0.0] * len(parts_j)
        self._is_mixed |= len(parts_j) != len(self._sums_j)  # the job was resumed at another size
        self._sums_j = [total + part for total, part in zip(self._sums_j, parts_j, strict=False)]

    def shares(self, name: str) -> list[Share]:
        """Return them by number; none where not all records have the same parts, or no energy."""
        if self._is_mixed or not self._time_s:
            return []
        return [Share(f"{name} {i}", total_j, total_j / self._time_s) for i, total_j in enumerate(self._sums_j or [])]
