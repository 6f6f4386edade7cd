"""Effective energy as a convex function of time: lower hulls of the measured points of each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.exact.problem import InstructionGroup

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Hull:
    """A convex, falling, piecewise-linear function of time, its pieces from left to right.

    Attributes:
        length_s: Shape (k,): how much time each piece spans [s].
        saving_w: Shape (k,): energy saved per second spent on it, strictly falling [W].
    """

    length_s: Floats
    saving_w: Floats

    @classmethod
    def of(cls, time_s: Floats, cost_j: Floats) -> Hull:
        """Return the lower hull of points with rising time and falling cost."""
        kept = lower_hull(time_s, cost_j)
        length_s = np.diff(time_s[kept])
        return cls(length_s, -np.diff(cost_j[kept]) / length_s)


@dataclass(frozen=True)
class Pieces:
    """The hull pieces of many decisions, one decision after the other.

    Attributes:
        owner: Shape (m,): the decision each piece belongs to.
        length_s, saving_w: Shape (m,), as in :class:`Hull`.
    """

    owner: Indices
    length_s: Floats
    saving_w: Floats


@dataclass(frozen=True)
class Corners:
    """The corners of a lower hull of cost over time.

    Attributes:
        time_s: Shape (k,), rising [s].
        cost_j: Shape (k,), falling [J].
    """

    time_s: Floats
    cost_j: Floats

    @classmethod
    def of(cls, time_s: Floats, cost_j: Floats) -> Corners:
        """Return those of points with rising time and falling cost."""
        kept = lower_hull(time_s, cost_j)
        return cls(time_s[kept], cost_j[kept])

    def least_j(self, price_w: Floats) -> Floats:
        """Return the least of ``cost + price * time`` for each price of a second [J]."""
        saving_w = -np.diff(self.cost_j) / np.diff(self.time_s)
        corner = np.searchsorted(-saving_w, -price_w)
        result: Floats = self.cost_j[corner] + price_w * self.time_s[corner]
        return result


class HullTable:
    """The hulls of all groups, for every number of clocks that are fast enough to be usable."""

    def __init__(self, groups: tuple[InstructionGroup, ...]) -> None:
        self._groups = groups
        self._hulls: dict[tuple[int, int], Hull] = {}

    def pieces(self, group: Indices, usable: Indices) -> Pieces:
        """Return the pieces of decisions of these groups that may use their fastest clocks only.

        Args:
            group: Shape (n,).
            usable: Shape (n,): how many of the group's clocks, at least 1.
        """
        keys, which = np.unique(np.stack([group, usable]), axis=1, return_inverse=True)
        hulls = [self._hull(int(g), int(n)) for g, n in keys.T]
        counts = np.array([len(h.length_s) for h in hulls], dtype=np.intp)
        begins = np.cumsum(counts) - counts
        which = which.reshape(-1)
        owner = np.repeat(np.arange(len(group)), counts[which])
        ends = np.cumsum(counts[which])
        within = np.arange(len(owner)) - np.repeat(ends - counts[which], counts[which])
        at = begins[which][owner] + within

        lengths_s = np.concatenate([h.length_s for h in hulls])
        savings_w = np.concatenate([h.saving_w for h in hulls])
        return Pieces(owner, lengths_s[at], savings_w[at])

    def _hull(self, group: int, usable: int) -> Hull:
        key = (group, usable)
        if key not in self._hulls:
            options = self._groups[group]
            self._hulls[key] = Hull.of(options.options.time_s[:usable], options.cost_j[:usable])
        return self._hulls[key]
