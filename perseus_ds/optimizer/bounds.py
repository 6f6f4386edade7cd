"""Lower bounds on the energy of every plan, with a proof that can be checked without the solver.

The proof is a flow through the DAG, in watts. Suppose a plan ends by time T and node v finishes at
x_v after taking t_v. For every edge (u, v) with flow f, x_u + t_v <= x_v; multiplied by f >= 0 and
summed over all edges (into nodes without predecessors, with 0 for x_u),

    sum of in_v * t_v  <=  sum of (in_v - out_v) * x_v  <=  T * sum of max(0, in_v - out_v)

because 0 <= x_v <= T. So whatever clocks the plan has, the effective energy of its instructions is

    sum c_v  >=  sum over instructions of min (c + in_v * t)  +  sum over the others of in_v * t_v
                 -  T * sum of max(0, in_v - out_v),

the minima being over the clocks that an instruction can have in *any* plan that ends by T. This
holds for any flow >= 0, conserved or not; how it was found affects how high the bound is, never
whether it holds.

Two neighbouring ranks are bounded together between two of their meetings, where the DAG has parallel paths. In the
steady part of 1F1B, both ranks run two instructions between a meeting X and their next one, Y: the paths
X -> a -> ... -> b -> Y and X -> c -> ... -> d -> Y. The longer path decides when Y starts. With L1 and L2 the sums of
durations between X and Y on either path, x the times at which nodes finish, and flows f1, f2 >= 0 along the paths,

    f1 * L1 + f2 * L2  <=  (f1 + f2) * max(L1, L2)  <=  (f1 + f2) * (x_Y - t_Y - x_X).

So the proof holds with the middle term in place of the left one. Let G(L) be the least effective
energy of the four instructions where neither path is longer than L. Then their energy and the middle term are
together at least the minimum of G(L) + (f1 + f2) * L, which lies at a corner of the lower hull of G.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import InstructionGroup, Problem
from perseus_ds.optimizer.relaxation import Relaxed

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_ROUNDING = 1e-12
"""Largest rounding error of the sums, relative to their terms; the bound is lowered by it."""


class CertificateError(ValueError):
    """A flow that proves nothing about this problem."""


@dataclass(frozen=True)
class Tangent:
    """A point of the bound's curve.

    Attributes:
        time_s: Where.
        energy_j: Its height there.
        slope_w: How fast it falls: energy saved per second more, >= 0.
    """

    time_s: float
    energy_j: float
    slope_w: float


class Bounds:
    """The flows of the solved deadlines, and the bounds that follow at any iteration time."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self.problem, self.network = problem, network
        self._verifier = Verifier(problem)
        self._found: list[tuple[Tangent, Floats, Floats]] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Keep a relaxed optimum's flow; return the bound that it proves at its deadline."""
        edges_w, source_w = self.network.dag_flow(np.maximum(relaxed.flow_w, 0.0))
        energy_j = self._verifier.bound_j(relaxed.deadline_s, edges_w, source_w)
        tangent = Tangent(relaxed.deadline_s, energy_j, float(source_w.sum()) - self.problem.waiting_energy_j(1.0))
        self._found.append((tangent, edges_w, source_w))
        self._found.sort(key=lambda found: found[0].time_s)
        return tangent

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([tangent.energy_j for tangent, _, _ in self._found])

    def certify(self, times_s: list[float]) -> tuple[list[float], Certificates]:
        """Return the best bound at hand for each iteration time: the flow of a neighbour, or a mixture of two [J]."""
        found = [tangent for tangent, _, _ in self._found]
        found_s = [tangent.time_s for tangent in found]
        edge_flow_w = np.stack([edges_w for _, edges_w, _ in self._found])
        source_flow_w = np.stack([source_w for _, _, source_w in self._found])
        bounds_j, mixed, shares = [], [], []
        for time_s in times_s:
            right = min(int(np.searchsorted(found_s, time_s)), len(found_s) - 1)
            left = max(right - 1, 0)
            span_s = found_s[right] - found_s[left]
            between = min(max((time_s - found_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
            candidates = []
            # What one flow proves changes along its tangent, so the lower end need not be tried; but near T_min, where
            # more and more clocks become possible, tangents say little.
            ends_j = [found[n].energy_j - found[n].slope_w * (time_s - found_s[n]) for n in (left, right)]
            for share in sorted({0.0, between, 1.0} if left == 0 else {between, float(ends_j[1] > ends_j[0])}):
                edges_w = (1 - share) * edge_flow_w[left] + share * edge_flow_w[right]
                source_w = (1 - share) * source_flow_w[left] + share * source_flow_w[right]
                candidates.append((self._verifier.bound_j(time_s, edges_w, source_w), share))
            bound_j, share = max(candidates, key=lambda candidate: candidate[0])
            bounds_j.append(bound_j)
            mixed.append((left, right))
            shares.append(share)
        schedule = self.problem.dag.schedule
        return bounds_j, Certificates(schedule, edge_flow_w, source_flow_w, np.array(mixed), np.array(shares))


class Verifier:
    """Recomputes bounds from flows, from the problem's DAG and measured rows alone."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        dag = problem.dag
        self._head = np.repeat(np.arange(len(dag.nodes)), [len(b) for b in dag.predecessors])
        self._tail = np.fromiter(chain.from_iterable(dag.predecessors), np.intp, len(self._head))
        self._is_first = np.array([not before for before in dag.predecessors])
        fastest_s = problem.durations_s(problem.fastest)
        self._ready_s = (dag.finish_s(fastest_s) - fastest_s)[problem.node]
        self._rest_s = (-dag.latest_finish_s(fastest_s, 0.0))[problem.node]
        self._pairs = find_path_pairs(problem)
        self._fastest_s = np.array([group.options.time_s[0] for group in problem.groups])[problem.group]
        self._corners = [Corners.of(group.options.time_s, group.cost_j) for group in problem.groups]
        self._members = [np.flatnonzero(problem.group == g) for g in range(len(problem.groups))]

    def bound_j(self, time_s: float, edge_flow_w: Floats, source_flow_w: Floats) -> float:
        """Return the energy below which no plan that ends by ``time_s`` can stay [J].

        Raises:
            CertificateError: The flow does not fit the DAG, is negative, or is not a number.
        """
        nodes = len(self.problem.dag.nodes)
        if edge_flow_w.shape != self._head.shape or source_flow_w.shape != (nodes,):
            raise CertificateError(
                f"The flow has {len(edge_flow_w)} edges and {len(source_flow_w)} nodes, the DAG {len(self._head)} and "
                f"{nodes}: the certificate belongs to another schedule."
            )
        if not (np.all(edge_flow_w >= 0) and np.all(source_flow_w >= 0)):
            raise CertificateError("A flow must be >= 0 everywhere; the certificate was damaged.")
        into, ends = self.prices_w(edge_flow_w, source_flow_w)
        price_w = into[self.problem.node]
        least_j = self._least_j(time_s, price_w)
        instructions_j = float(least_j.sum()) + self._joint_gain_j(least_j, price_w, edge_flow_w)
        fixed_j = float(into @ self.problem.fixed_s)
        waiting_w = self.problem.waiting_energy_j(1.0)
        # A plan may end earlier, which costs less where a second is worth less than it costs to wait.
        earlier_j = max(0.0, waiting_w - ends) * (time_s - self.problem.t_min_s)
        slip_j = _ROUNDING * (abs(instructions_j) + fixed_j + (ends + waiting_w) * time_s)
        return instructions_j + fixed_j + (waiting_w - ends) * time_s - max(earlier_j, 0.0) - slip_j

    def prices_w(self, edge_flow_w: Floats, source_flow_w: Floats) -> tuple[Floats, float]:
        """Return what flows into each node, the price of a second of it, and what flows out of the last ones [W]."""
        nodes = len(self.problem.dag.nodes)
        into: Floats = np.where(self._is_first, source_flow_w, 0.0) + np.bincount(self._head, edge_flow_w, nodes)
        return into, float(np.maximum(into - np.bincount(self._tail, edge_flow_w, nodes), 0.0).sum())

    def _least_j(self, time_s: float, price_w: Floats) -> Floats:
        """Return the least ``c + price * t`` of every decision over the clocks possible by ``time_s``."""
        longest_s = np.maximum(time_s - self._rest_s - self._ready_s + 1e-9 * time_s, self._fastest_s)
        result = np.empty(len(price_w))
        for group, corners, members in zip(self.problem.groups, self._corners, self._members, strict=True):
            result[members] = corners.least_j(price_w[members])
            # Where not all clocks are possible, the hull may promise too much.
            some = members[longest_s[members] < group.options.time_s[-1]]
            values = group.cost_j + price_w[some, None] * group.options.time_s
            values[group.options.time_s > longest_s[some, None]] = np.inf
            result[some] = values.min(axis=1)
        return result

    def _joint_gain_j(self, least_j: Floats, price_w: Floats, edge_flow_w: Floats) -> float:
        """Return by how much joint minima over parallel paths exceed the sums of ``least_j``."""
        flows_w = [tuple(edge_flow_w[edges].min(axis=1) for edges in pairs.edges) for pairs in self._pairs]
        gains_j = [self._gains_j(*args, least_j, price_w) for args in zip(self._pairs, flows_w, strict=True)]
        chosen = matching([pairs.rank for pairs in self._pairs], [float(g.sum()) for g in gains_j])
        # Paths may share an edge; together they must not use more than its flow.
        used_w = np.zeros(len(edge_flow_w))
        for number in chosen:
            for edges, flow_w in zip(self._pairs[number].edges, flows_w[number], strict=True):
                np.add.at(used_w, edges, flow_w[:, None])
        share = np.divide(edge_flow_w, used_w, out=np.ones_like(used_w), where=used_w > edge_flow_w)
        total_j = 0.0
        for number in chosen:
            pairs = self._pairs[number]
            kept = tuple(f * share[e].min(axis=1) for f, e in zip(flows_w[number], pairs.edges, strict=True))
            total_j += float(self._gains_j(pairs, kept, least_j, price_w).sum())
        return total_j

    def _gains_j(self, pairs: PathPairs, flows_w: tuple[Floats, ...], least_j: Floats, price_w: Floats) -> Floats:
        """Return for each pair of paths what its joint minimum adds, never below 0."""
        first_w, second_w = flows_w
        joint_j = pairs.corners.least_j(first_w + second_w) - pairs.fixed_s[0] * first_w - pairs.fixed_s[1] * second_w
        # Flow beyond that of the paths pays for each instruction on its own.
        path_w = np.stack([first_w, first_w, second_w, second_w], axis=1)
        beyond_w = price_w[pairs.decisions] - path_w
        joint_j += (beyond_w * self._fastest_s[pairs.decisions]).sum(axis=1)
        gain_j: Floats = np.maximum(joint_j - least_j[pairs.decisions].sum(axis=1), 0.0)
        return gain_j


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
