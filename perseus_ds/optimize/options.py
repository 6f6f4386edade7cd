"""The Pareto options of all groups in one table, for looking up many decisions at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.optimize.problem import Group

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class OptionTable:
    """Options of every group, group after group, the fastest first.

    Attributes:
        time_s: Shape (options,).
        cost_j: Shape (options,): effective energy, falling within a group.
        begin: Shape (groups,): where each group's options begin.
        end: Shape (groups,): where they end.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        sizes = np.array([len(g.cost_j) for g in groups], dtype=np.intp)
        self.end = np.cumsum(sizes)
        self.begin = self.end - sizes
        self.time_s = np.concatenate([g.options.time_s[::-1] for g in groups])
        self.cost_j = np.concatenate([g.cost_j[::-1] for g in groups])
        # One sorted array for all groups: each group's times are shifted beyond the one before.
        self._span_s = 2.0 * float(self.time_s.max())
        self._keys = self.time_s + self._span_s * np.repeat(np.arange(len(groups)), sizes)
        self._tolerance_s = 1e-12 * self._span_s * len(groups)

    def longest_within(self, group: Indices, window_s: Floats) -> Indices:
        """Return each group's slowest option that fits the window, or its fastest where none does."""
        window_s = np.clip(window_s, 0.0, 0.75 * self._span_s)
        found = np.searchsorted(self._keys, window_s + self._span_s * group + self._tolerance_s, side="right") - 1
        result: Indices = np.maximum(found, self.begin[group])
        return result
