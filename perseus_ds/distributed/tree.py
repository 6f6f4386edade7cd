"""The ranks of a job as a tree of small groups, so that no rank is connected with all others.

Eight ranks one after the other, mostly those of a node, are a group; the first rank of each group is in a group of the
next level with the first ranks of up to seven others, and so on up to rank 0. A rank that is first nowhere, a *leaf*,
is in one group however large the job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from perseus_ds.distributed.connections import Connections

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
# Larger groups are connected more slowly: every rank of a group is connected with every other.
GROUP_SIZE = 8


class Started(Protocol[T_co]):
    """A collective that was begun; see :class:`~perseus_ds.distributed.groups.Underway`."""

    def is_over(self) -> bool: ...

    def wait(self) -> T_co: ...

    def then(self, follow: Callable[[Callable[[], T_co]], None]) -> None: ...


class Group(Protocol):
    """Some ranks; see :class:`~perseus_ds.distributed.groups.GlooGroup`."""

    @property
    def is_first(self) -> bool: ...

    @property
    def connections(self) -> Connections: ...

    def gather(self, value: Any) -> list[Any]: ...

    def broadcast(self, value: Any) -> Any: ...

    def barrier(self) -> None: ...

    def start_gather(self, numbers: torch.Tensor) -> Started[list[torch.Tensor]]: ...

    def start_scatter(self, numbers: Sequence[torch.Tensor], shape: Sequence[int]) -> Started[torch.Tensor]: ...


@dataclass(frozen=True)
class Level:
    """One group of a rank.

    Attributes:
        group: The group.
        below: For each of its ranks, how many ranks it stands for: itself, and those it is the first of.
        most: How many a rank of this level stands for at most.
        is_top: Whether no level is above it.
    """

    group: Group
    below: tuple[int, ...]
    most: int
    is_top: bool


def groups_of(place: int, size: int) -> Iterator[tuple[range, int]]:
    """Yield the groups of more than one in a tree, the lowest first.

    Args:
        place: Of the rank in the tree, 0 first.
        size: Number of ranks in the tree.

    Yields:
        The places of the ranks of a group, and for how many ranks each of them stands at most.
    """
    for stride, span in itertools.pairwise(_strides(size)):
        if place % stride:
            return
        begin = place - place % span
        members = range(begin, min(begin + span, size), stride)
        if len(members) > 1:
            yield members, stride


def _strides(size: int) -> list[int]:
    """Return for how many ranks a member of a group stands on each level, and last how many all of them are at most.

    All members of a group send as much as the largest one, so the last two levels are such that few are not full.
    """
    strides = [1]
    while strides[-1] < size:
        left = math.ceil(size / strides[-1])
        group = GROUP_SIZE
        if len(strides) > 1 and GROUP_SIZE < left <= GROUP_SIZE**2:
            sizes = range(math.ceil(left / GROUP_SIZE), GROUP_SIZE + 1)
            group = min(sizes, key=lambda group: group * math.ceil(left / group))
        strides.append(strides[-1] * group)
    return strides


class Tree:
    """Some ranks as a tree; all of them must make it, and call each method, at once.

    Args:
        ranks: Global ranks, in ascending order.
        rank: This one.
        connect: Makes a group of global ranks, given a name that no other group of this rank has in the tree.

    Attributes:
        levels: The groups of this rank, the lowest first.
        is_first: Whether this rank is the first one, to which values go and from which they come.
    """

    def __init__(self, ranks: Sequence[int], rank: int, connect: Callable[[Sequence[int], str], Group]) -> None:
        place, size = ranks.index(rank), len(ranks)
        self.is_first = place == 0
        self.levels = tuple(
            Level(
                connect([ranks[p] for p in places], str(stride)),
                tuple(min(stride, size - p) for p in places),
                stride,
                is_top=places[0] == 0 and len(places) * stride >= size,
            )
            for places, stride in groups_of(place, size)
        )

    def combine(self, value: T, combined: Callable[[list[T]], T]) -> T:
        """Return, on the first rank, what all values combine to; elsewhere something that is of no use.

        Args:
            value: Of this rank.
            combined: Combines values of ranks one after the other, in order.
        """
        for level in self.levels:
            values = level.group.gather(value)
            if not values:
                break
            value = combined(values)
        return value

    def broadcast(self, value: T) -> T:
        """Return the first rank's value."""
        for level in reversed(self.levels):
            value = level.group.broadcast(value)
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        for level in self.levels:
            level.group.barrier()
        for level in reversed(self.levels):
            if not level.is_top:
                level.group.barrier()
