"""The options of all groups in one table, for looking up many decisions at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.exact.problem import InstructionGroup

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class OptionTable:
    """Options of every group, group after group, each in the order of :class:`InstructionGroup`.

    Attributes:
        time_s: Shape (options,).
        cost_j: Shape (options,): effective energy, falling within a group.
        begin: Shape (groups,): where each group's options begin.
        last: Shape (groups,): its slowest option.
    """

    def __init__(self, groups: Sequence[InstructionGroup], *, hull_only: bool = False) -> None:
        """Set up the table, of all Pareto options or of those on the lower convex hull alone."""
        kept = [_kept(group, hull_only) for group in groups]
        sizes = np.array([len(k) for k in kept], dtype=np.intp)
        self.last = np.cumsum(sizes) - 1
        self.begin = self.last - sizes + 1
        self.time_s = np.concatenate([g.options.time_s[k] for g, k in zip(groups, kept, strict=True)])
        self.cost_j = np.concatenate([g.cost_j[k] for g, k in zip(groups, kept, strict=True)])
        # One sorted array for all groups: each group's times are shifted beyond the one before.
        self.span_s = 2.0 * float(self.time_s.max())
        self.keys = self.time_s + self.span_s * np.repeat(np.arange(len(groups)), sizes)
        self.tolerance_s = 1e-13 * self.span_s * max(len(groups), 10)

    def longest_within(self, group: Indices, window_s: Floats) -> Indices:
        """Return each group's slowest option that fits the window, or its fastest where none does."""
        window_s = np.clip(window_s, 0.0, 0.75 * self.span_s)
        found = np.searchsorted(self.keys, window_s + (self.span_s * group + self.tolerance_s), side="right") - 1
        result: Indices = np.maximum(found, self.begin[group])
        return result


def _kept(group: InstructionGroup, hull_only: bool) -> Indices:
    """Return the indices of the group's options to keep."""
    kept = lower_hull(group.options.time_s, group.cost_j) if hull_only else range(len(group.cost_j))
    return np.array(kept, dtype=np.intp)
