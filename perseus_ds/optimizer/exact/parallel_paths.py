"""Two neighbouring ranks between two of their meetings: parallel paths of the DAG, bounded together.

In the steady part of 1F1B, both ranks run two instructions between a meeting X and their next one, Y: the paths
X -> a -> ... -> b -> Y and X -> c -> ... -> d -> Y. The longer path decides when Y starts. With L1 and L2 the sums of
durations between X and Y on either path, x the times at which nodes finish, and flows f1, f2 >= 0 along the paths,

    f1 * L1 + f2 * L2  <=  (f1 + f2) * max(L1, L2)  <=  (f1 + f2) * (x_Y - t_Y - x_X).

So the proof of ``certificate`` holds with the middle term in place of the left one. Let G(L) be the least effective
energy of the four instructions where neither path is longer than L. Then their energy and the middle term are
together at least the minimum of G(L) + (f1 + f2) * L, which lies at a corner of the lower hull of G.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.hull import Corners
from perseus_ds.optimizer.exact.problem import InstructionGroup, Problem

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class _Path:
    """One path between two meetings: its nodes in order, X and Y among them, and its first and last decision."""

    nodes: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class PathPairs:
    """Pairs of parallel paths of the same two ranks whose instructions have the same options.

    Attributes:
        rank: The lower one of the two neighbouring ranks.
        decisions: Shape (pairs, 4): two decisions of the first path and two of the second.
        edges: Two arrays of shape (pairs, edges of the path): indices of the DAG's edges along each path.
        fixed_s: What each path takes beside its decisions [s].
        corners: Those of G's hull: least effective energy of the four instructions by length.
    """

    rank: int
    decisions: Indices
    edges: tuple[Indices, Indices]
    fixed_s: tuple[float, float]
    corners: Corners


def find_path_pairs(problem: Problem) -> list[PathPairs]:
    """Return all pairs of parallel paths of neighbouring ranks, each decision at most once for each two ranks."""
    finder = _Finder(problem)
    found: dict[tuple[object, ...], list[tuple[_Path, _Path]]] = defaultdict(list)
    used: set[tuple[int, int]] = set()
    for node, before in enumerate(problem.dag.predecessors):
        pair = finder.pair(node) if len(before) == 2 else None
        if pair is None:
            continue
        rank = finder.rank(pair[0])
        decisions = [(rank, decision) for path in pair for decision in (path.first, path.last)]
        if finder.rank(pair[1]) != rank + 1 or not used.isdisjoint(decisions):
            continue
        used.update(decisions)
        groups = tuple(int(problem.group[decision]) for _, decision in decisions)
        fixed_s = tuple(float(problem.fixed_s[list(path.nodes[1:-1])].sum()) for path in pair)
        found[rank, groups, fixed_s, tuple(len(path.nodes) for path in pair)].append(pair)
    return [finder.joined(pairs) for pairs in found.values()]


def matching(ranks: list[int], gains_j: list[float]) -> list[int]:
    """Choose among pairs of ranks (r, r + 1) those of greatest gain in which no rank occurs twice."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        of_rank[rank].append(number)
    # The best choice among the ranks below, and the best one of those that leave the last of them free.
    best: tuple[float, list[int]] = (0.0, [])
    free: tuple[float, list[int]] = (0.0, [])
    for rank in range(max(ranks, default=-1) + 1):
        numbers = of_rank[rank]
        taken = (free[0] + sum(gains_j[n] for n in numbers), free[1] + numbers)
        free, best = best, max(best, taken, key=lambda choice: choice[0])
    return best[1]


class _Finder:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dag = problem.dag
        decision = np.full(len(self.dag.nodes), -1, dtype=np.intp)
        decision[problem.node] = np.arange(len(problem.node))
        self.decision: list[int] = decision.tolist()
        self.first_edge: list[int] = np.concatenate(([0], np.cumsum([len(b) for b in self.dag.predecessors]))).tolist()

    def rank(self, path: _Path) -> int:
        return self.dag.nodes[int(self.problem.node[path.first])].ranks[0]

    def pair(self, meeting: int) -> tuple[_Path, _Path] | None:
        """Return the two paths that end at a node, the lower rank's first, if they begin at the same one."""
        paths = [self._path(meeting, before) for before in self.dag.predecessors[meeting]]
        if paths[0] is None or paths[1] is None or paths[0].nodes[0] != paths[1].nodes[0]:
            return None
        first, second = sorted((paths[0], paths[1]), key=self.rank)
        return first, second

    def _path(self, meeting: int, last: int) -> _Path | None:
        """Go back along one rank over two decisions to the meeting before them; None where the way is not unique."""
        ranks = self.dag.nodes[last].ranks
        if self.decision[last] < 0 or len(self.dag.nodes[meeting].ranks) != 2:
            return None
        nodes = [meeting, last]
        decisions = 1
        while True:
            before = self._before(nodes[-1], ranks, decided=decisions < 2)
            if before is None:
                return None
            nodes.append(before)
            if self.decision[before] >= 0:
                decisions += 1
            elif decisions == 2 and len(self.dag.nodes[before].ranks) == 2:
                chosen = [self.decision[node] for node in nodes if self.decision[node] >= 0]
                return _Path(tuple(nodes[::-1]), chosen[1], chosen[0])

    def _before(self, node: int, ranks: tuple[int, ...], decided: bool) -> int | None:
        """Return the only predecessor, or the only decision of this rank among several."""
        before = self.dag.predecessors[node]
        if len(before) > 1:
            own = [n for n in before if self.decision[n] >= 0 and self.dag.nodes[n].ranks == ranks]
            before = tuple(own) if decided else ()
        if len(before) != 1 or (self.decision[before[0]] >= 0 and not decided):
            return None
        return before[0]

    def joined(self, pairs: list[tuple[_Path, _Path]]) -> PathPairs:
        """Return pairs with the same options as arrays."""
        first, second = pairs[0]
        decisions = np.array([[p.first, p.last, q.first, q.last] for p, q in pairs], dtype=np.intp)
        fixed_s = tuple(float(self.problem.fixed_s[list(path.nodes[1:-1])].sum()) for path in (first, second))
        groups = [self.problem.groups[g] for g in self.problem.group[decisions[0]]]
        paths = _path_cost(groups[0], groups[1], fixed_s[0]), _path_cost(groups[2], groups[3], fixed_s[1])
        corners = _longer(*paths)
        return PathPairs(
            rank=self.rank(first),
            decisions=decisions,
            edges=(self._edges([p for p, _ in pairs]), self._edges([q for _, q in pairs])),
            fixed_s=(fixed_s[0], fixed_s[1]),
            corners=corners,
        )

    def _edges(self, paths: list[_Path]) -> Indices:
        return np.array([[self._edge(*ends) for ends in pairwise(path.nodes)] for path in paths], dtype=np.intp)

    def _edge(self, tail: int, head: int) -> int:
        return self.first_edge[head] + self.dag.predecessors[head].index(tail)


def _path_cost(first: InstructionGroup, last: InstructionGroup, fixed_s: float) -> tuple[Floats, Floats]:
    """Return lengths of a path of two instructions, rising, and the least energy of them that each length allows."""
    length_s = (first.options.time_s[:, None] + last.options.time_s).ravel() + fixed_s
    cost_j = (first.cost_j[:, None] + last.cost_j).ravel()
    order = np.argsort(length_s, kind="stable")
    return length_s[order], np.minimum.accumulate(cost_j[order])


def _longer(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Corners:
    """Return the hull of the least energy of both paths by the length of the longer one."""
    length_s = np.union1d(first[0], second[0])
    length_s = length_s[length_s >= max(first[0][0], second[0][0])]
    cost_j = sum(cost[np.searchsorted(length, length_s, side="right") - 1] for length, cost in (first, second))
    falls = np.concatenate(([True], np.diff(cost_j) < 0))
    return Corners.of(length_s[falls], cost_j[falls])
