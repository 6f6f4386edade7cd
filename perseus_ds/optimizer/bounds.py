"""Lower bounds on the energy of every plan, with proofs that can be checked without the solver.

The proof is a flow through the DAG, in watts. Suppose a plan ends by time T and node v finishes at x_v after taking
t_v. For every edge (u, v) with flow f, x_u + t_v <= x_v. Multiplied by f >= 0 and summed over all edges (into nodes
without predecessors, with 0 for x_u), this gives

    sum of in_v * t_v  <=  sum of (in_v - out_v) * x_v  <=  T * sum of max(0, in_v - out_v)

because 0 <= x_v <= T. So for any clocks of the plan, the effective energy of its instructions is

    sum c_v  >=  sum over instructions of min (c + in_v * t)  +  sum over the others of in_v * t_v
                 -  T * sum of max(0, in_v - out_v),

with the minima over the clocks that an instruction can have in *any* plan that ends by T. This holds for any flow >= 0,
conserved or not. The method by which it was found affects the height of the bound but not its validity.

Two neighbouring ranks are bounded together between two of their meetings, where the DAG has parallel paths. In the
steady state of 1F1B, both ranks execute two instructions between a meeting X and the next one, Y, on the paths
X -> a -> ... -> b -> Y and X -> c -> ... -> d -> Y. The longer path determines the start of Y. With L1 and L2 the sums
of durations between X and Y on the two paths, x the finish times of nodes, and flows f1, f2 >= 0 along the paths,

    f1 * L1 + f2 * L2  <=  (f1 + f2) * max(L1, L2)  <=  (f1 + f2) * (x_Y - t_Y - x_X).

So the proof holds with the middle term in place of the left one. The flow b into an instruction in excess of its path's
flow is priced as before. So the four instructions and the middle term together are at least the minimum, over the
clocks of all four, of the sum of c + b * t + (f1 + f2) * max(L1, L2), excluding lengths with which no plan ends by T.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import FrontierError, ProfileError
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Corners, Floats, Indices, Problem, problem_for
from perseus_ds.optimizer.relaxation import Relaxed
from perseus_ds.optimizer.search import evenly
from perseus_ds.pipeline.dag import Dag

_SAMPLED = 8
"""Number of pairs of paths from which the gain of bounding two ranks together is estimated."""
_WORTH_IT = 1e-4
"""Ranks are bounded together if this adds at least this fraction of the energy."""
_ROUNDING = 1e-12
"""Largest rounding error of the sums relative to their terms, by which the bound is lowered."""


@dataclass(frozen=True)
class Tangent:
    """A point on the bound's curve, and the decrease of the bound per additional second, >= 0."""

    time_s: float
    energy_j: float
    slope_w: float


class Bounds:
    """The flows of the solved deadlines, and the bounds that follow from them at any iteration time."""

    def __init__(self, network: Network) -> None:
        self.problem, self.network = network.problem, network
        self._verifier = Verifier(network.problem)
        self._found: list[tuple[Tangent, Floats, Floats]] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Add the flow of a relaxed optimum and return the bound that it proves at its deadline."""
        edges_w, source_w = self.network.dag_flow(np.maximum(relaxed.flow_w, 0.0))
        energy_j = self._verifier.bound_j(relaxed.deadline_s, edges_w, source_w)
        tangent = Tangent(relaxed.deadline_s, energy_j, float(source_w.sum()) - self.problem.waiting_power_w)
        self._found.append((tangent, edges_w, source_w))
        self._found.sort(key=lambda found: found[0].time_s)
        return tangent

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([tangent.energy_j for tangent, _, _ in self._found])

    def certify(self, plans: Sequence[FrequencyPlan]) -> tuple[list[FrequencyPlan], Certificates]:
        """Return the plans with the best bound for each, from a neighbouring flow or a mixture of two."""
        found, *flows_w = zip(*self._found, strict=True)
        found_s = [tangent.time_s for tangent in found]
        edge_flow_w, source_flow_w = map(np.stack, flows_w)
        proven, mixed, shares = [], [], []
        for plan in plans:
            time_s = plan.time_s
            right = min(int(np.searchsorted(found_s, time_s)), len(found_s) - 1)
            left = max(right - 1, 0)
            span_s = found_s[right] - found_s[left]
            between = min(max((time_s - found_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
            candidates = []
            # The bound from one flow changes along its tangent, so the lower end need not be tried, except near T_min,
            # where more and more clocks become usable and tangents are not informative.
            ends_j = [found[n].energy_j - found[n].slope_w * (time_s - found_s[n]) for n in (left, right)]
            for share in sorted({0.0, between, 1.0} if left == 0 else {between, float(ends_j[1] > ends_j[0])}):
                edges_w = (1 - share) * edge_flow_w[left] + share * edge_flow_w[right]
                source_w = (1 - share) * source_flow_w[left] + share * source_flow_w[right]
                candidates.append((self._verifier.bound_j(time_s, edges_w, source_w), share))
            bound_j, share = max(candidates, key=lambda candidate: candidate[0])
            proven.append(replace(plan, lower_bound_j=bound_j))
            mixed.append((left, right))
            shares.append(share)
        schedule = self.problem.dag.schedule
        return proven, Certificates(schedule, edge_flow_w, source_flow_w, np.array(mixed), np.array(shares))


class Verifier:
    """Recomputes bounds from flows, using only the problem's DAG and measured rows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        dag = problem.dag
        self._is_first = np.array([not before for before in dag.predecessors])
        fastest_s = problem.durations_s(problem.fastest)
        self._ready_s = (dag.finish_s(fastest_s) - fastest_s)[problem.node]
        self._rest_s = (-dag.latest_finish_s(fastest_s, 0.0))[problem.node]
        self._pairs = find_path_pairs(problem)
        self._fastest_s = np.array([group.options.time_s[0] for group in problem.groups])[problem.group]
        self._corners = [Corners.of(group.options.time_s, group.cost_j) for group in problem.groups]
        self._members = [np.flatnonzero(problem.group == g) for g in range(len(problem.groups))]

    def bound_j(
        self, time_s: float, edge_flow_w: Floats, source_flow_w: Floats, *, with_all_pairs: bool = False
    ) -> float:
        """Return a lower bound on the energy of all plans that end by ``time_s`` [J].

        With all pairs of paths, deciding which ranks to bound together takes longer and seldom improves the bound.

        Raises:
            FrontierError: If the flow is negative or not a number.
        """
        if not (np.all(edge_flow_w >= 0) and np.all(source_flow_w >= 0)):
            raise FrontierError("A flow must be >= 0 on every edge; the certificate is damaged.")
        into, ends = self.prices_w(edge_flow_w, source_flow_w)
        price_w = into[self.problem.node]
        least_j = self._least_j(time_s, price_w)
        instructions_j = float(least_j.sum()) + self._joint_gain_j(
            time_s, least_j, price_w, edge_flow_w, with_all_pairs=with_all_pairs
        )
        fixed_j = float(into @ self.problem.fixed_s)
        waiting_w = self.problem.waiting_power_w
        # A plan may end earlier, which lowers the bound if a second is worth less than waiting costs.
        earlier_j = max(0.0, waiting_w - ends) * (time_s - self.problem.t_min_s)
        slip_j = _ROUNDING * (abs(instructions_j) + fixed_j + (ends + waiting_w) * time_s)
        return instructions_j + fixed_j + (waiting_w - ends) * time_s - max(earlier_j, 0.0) - slip_j

    def prices_w(self, edge_flow_w: Floats, source_flow_w: Floats) -> tuple[Floats, float]:
        """Return the flow into each node, the price of a second of it, and the outflow [W]."""
        dag, nodes = self.problem.dag, len(self.problem.dag.nodes)
        into: Floats = np.where(self._is_first, source_flow_w, 0.0) + np.bincount(dag.edge_head, edge_flow_w, nodes)
        return into, float(np.maximum(into - np.bincount(dag.edge_tail, edge_flow_w, nodes), 0.0).sum())

    def _least_j(self, time_s: float, price_w: Floats) -> Floats:
        """Return the minimum of ``c + price * t`` of every decision, over its usable clocks."""
        longest_s = np.maximum(time_s - self._rest_s - self._ready_s + 1e-9 * time_s, self._fastest_s)
        result = np.empty(len(price_w))
        for group, corners, members in zip(self.problem.groups, self._corners, self._members, strict=True):
            result[members] = corners.least_j(price_w[members])
            # If some clocks are not usable, the hull's minimum may be too low.
            some = members[longest_s[members] < group.options.time_s[-1]]
            values = group.cost_j + price_w[some, None] * group.options.time_s
            values[group.options.time_s > longest_s[some, None]] = np.inf
            result[some] = values.min(axis=1)
        return result

    def _joint_gain_j(
        self, time_s: float, least_j: Floats, price_w: Floats, edge_flow_w: Floats, *, with_all_pairs: bool
    ) -> float:
        """Return the difference between joint minima over parallel paths and the sums of ``least_j`` [J]."""
        expected_j = []
        for pairs in self._pairs:
            few = pairs if with_all_pairs else pairs.sample()
            gains_j = self._gains_j(few, time_s, least_j, price_w, edge_flow_w)
            expected_j.append(len(pairs.decisions) * float(gains_j.mean()))
        least_worth_j = 0.0 if with_all_pairs else _WORTH_IT * float(np.abs(least_j).sum())
        return sum(
            float(self._gains_j(self._pairs[n], time_s, least_j, price_w, edge_flow_w).sum())
            for n in matching([p.rank for p in self._pairs], expected_j)
            if expected_j[n] > least_worth_j
        )

    def _gains_j(
        self, pairs: PathPairs, time_s: float, least_j: Floats, price_w: Floats, edge_flow_w: Floats
    ) -> Floats:
        """Return the gain from the joint minimum of each pair of paths, at least 0 [J]."""
        # Paths may share an edge between nodes without a clock, and together use more than its flow. Its head has no
        # other predecessor and starts when its tail ends, so a larger flow along this edge proves at least as much.
        path_w = np.stack([edge_flow_w[edges].min(axis=1) for edges in pairs.edges], axis=1)
        decisions = pairs.decisions.reshape(-1, 2, 2)
        # Flow in excess of that of the paths prices each instruction separately.
        beyond_w = price_w[decisions] - path_w[:, :, None]
        joint_j = path_w.sum(axis=1)[:, None] * pairs.length_s
        for number, path in enumerate(pairs.options):
            priced_j = path.cost_j + beyond_w[:, number] @ path.time_s
            joint_j += np.minimum.accumulate(priced_j, axis=1)[:, path.within]
        room_s = time_s * (1 + 1e-9) - self._rest_s[decisions[:, :, 1]] - self._ready_s[decisions[:, :, 0]]
        longest_s = (room_s + pairs.fixed_s).max(axis=1)
        joint_j[:, 1:][pairs.length_s[1:] > longest_s[:, None]] = np.inf
        added_j = joint_j.min(axis=1) - path_w @ pairs.fixed_s - least_j[pairs.decisions].sum(axis=1)
        gain_j: Floats = np.maximum(added_j, 0.0)
        return gain_j


@dataclass(frozen=True)
class _Path:
    """A path of one rank between two meetings, X and Y included, over two decisions."""

    rank: int
    nodes: tuple[int, ...]
    decisions: tuple[int, int]


class _Alike(NamedTuple):
    """Common data of pairs of paths: lower rank, groups of decisions, fixed time [s] and number of nodes of each."""

    rank: int
    groups: tuple[int, ...]
    fixed_s: tuple[float, float]
    nodes: tuple[int, int]


@dataclass(frozen=True)
class _PathOptions:
    """The combinations of clocks for the two decisions of a path, the shortest first.

    Attributes:
        time_s: Shape (2, combinations) [s].
        cost_j: Shape (combinations,): effective energy of both decisions [J].
        within: For each length in :class:`PathPairs`, the last combination that is not longer.
    """

    time_s: Floats
    cost_j: Floats
    within: Indices


@dataclass(frozen=True)
class PathPairs:
    """Pairs of parallel paths of the same two ranks, with equal options for their instructions.

    Attributes:
        rank: The lower one of the two neighbouring ranks.
        decisions: Shape (pairs, 4): two decisions of the first path and two of the second.
        edges: Two arrays of shape (pairs, edges of the path): indices of the DAG's edges along each path.
        fixed_s: Time on each path outside decisions [s].
        length_s: Shape (lengths,), rising: possible lengths of the longer path [s].
    """

    rank: int
    decisions: Indices
    edges: tuple[Indices, Indices]
    fixed_s: tuple[float, float]
    length_s: Floats
    options: tuple[_PathOptions, _PathOptions]

    def sample(self) -> PathPairs:
        """Return a few of the pairs, evenly spaced over the iteration."""
        kept = evenly(len(self.decisions), _SAMPLED)
        first, second = self.edges
        return replace(self, decisions=self.decisions[kept], edges=(first[kept], second[kept]))


def find_path_pairs(problem: Problem) -> list[PathPairs]:
    """Return the disjoint pairs of parallel paths of neighbouring ranks."""
    decision_of: list[int] = problem.decision_of.tolist()
    found: dict[_Alike, list[tuple[_Path, _Path]]] = defaultdict(list)
    used: set[tuple[int, int]] = set()
    for meeting, before in enumerate(problem.dag.predecessors):
        if len(before) != 2 or len(problem.dag.nodes[meeting].ranks) != 2:
            continue
        paths = [path for last in before if (path := _path(problem.dag, decision_of, meeting, last)) is not None]
        if len(paths) < 2:
            continue
        first, second = sorted(paths, key=lambda path: path.rank)
        decisions = first.decisions + second.decisions
        of_rank = {(first.rank, decision) for decision in decisions}
        if first.nodes[0] != second.nodes[0] or second.rank != first.rank + 1 or used & of_rank:
            continue
        used |= of_rank
        groups = tuple(problem.group[list(decisions)].tolist())
        first_s, second_s = (float(problem.fixed_s[list(path.nodes[1:-1])].sum()) for path in (first, second))
        lengths = len(first.nodes), len(second.nodes)
        found[_Alike(first.rank, groups, (first_s, second_s), lengths)].append((first, second))
    edges = zip(problem.dag.edge_tail.tolist(), problem.dag.edge_head.tolist(), strict=True)
    edge_of = {edge: number for number, edge in enumerate(edges)}
    return [_alike_pairs(problem, alike, pairs, edge_of) for alike, pairs in found.items()]


def _path(dag: Dag, decision_of: list[int], meeting: int, last: int) -> _Path | None:
    """Return the path of one rank back over two decisions to the previous meeting, if it is unique."""
    if decision_of[last] < 0:
        return None
    ranks, nodes, decisions = dag.nodes[last].ranks, [meeting, last], [decision_of[last]]
    while True:
        before = dag.predecessors[nodes[-1]]
        if len(before) > 1:
            before = tuple(n for n in before if decision_of[n] >= 0 and dag.nodes[n].ranks == ranks)
        if len(before) != 1 or (decision_of[before[0]] >= 0 and len(decisions) == 2):
            return None
        nodes += before
        if decision_of[before[0]] >= 0:
            decisions.append(decision_of[before[0]])
        elif len(decisions) == 2 and len(dag.nodes[before[0]].ranks) == 2:
            return _Path(ranks[0], tuple(nodes[::-1]), (decisions[1], decisions[0]))


def _alike_pairs(
    problem: Problem, alike: _Alike, pairs: list[tuple[_Path, _Path]], edge_of: dict[tuple[int, int], int]
) -> PathPairs:
    times_s, lengths_s, costs_j = [], [], []
    for numbers, own_s in zip((alike.groups[:2], alike.groups[2:]), alike.fixed_s, strict=True):
        own = [problem.groups[number] for number in numbers]
        time_s = np.stack([t.ravel() for t in np.meshgrid(*(g.options.time_s for g in own), indexing="ij")])
        order = np.argsort(time_s.sum(axis=0), kind="stable")
        times_s.append(time_s[:, order])
        lengths_s.append(times_s[-1].sum(axis=0) + own_s)
        costs_j.append(np.add.outer(own[0].cost_j, own[1].cost_j).ravel()[order])
    length_s = np.union1d(*lengths_s)
    length_s = length_s[length_s >= max(own_s[0] for own_s in lengths_s)]
    first, second = (
        _PathOptions(time_s, cost_j, np.searchsorted(own_s, length_s, side="right") - 1)
        for time_s, cost_j, own_s in zip(times_s, costs_j, lengths_s, strict=True)
    )
    first_edges, second_edges = (
        np.array([[edge_of[edge] for edge in pairwise(path.nodes)] for path in paths], dtype=np.intp)
        for paths in zip(*pairs, strict=True)
    )
    return PathPairs(
        rank=alike.rank,
        decisions=np.array([p.decisions + q.decisions for p, q in pairs], dtype=np.intp),
        edges=(first_edges, second_edges),
        fixed_s=alike.fixed_s,
        length_s=length_s,
        options=(first, second),
    )


def matching(ranks: list[int], gains_j: list[float]) -> list[int]:
    """Return the indices of disjoint pairs of ranks (r, r + 1) with the largest total gain."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        of_rank[rank].append(number)
    # The best choice among the ranks so far, and the best choice that does not use the last of them.
    best: tuple[float, list[int]] = (0.0, [])
    free: tuple[float, list[int]] = (0.0, [])
    for rank in range(max(ranks, default=-1) + 1):
        numbers = of_rank[rank]
        taken = (free[0] + sum(gains_j[n] for n in numbers), free[1] + numbers)
        free, best = best, max(best, taken, key=lambda choice: choice[0])
    return best[1]


def verify(frontier: Frontier, certificates: Certificates, profile: StageProfile) -> float:
    """Check a frontier's times, energies and lower bounds by recomputing them.

    Returns:
        The largest gap of a plan.

    Raises:
        PerseusError: If a stated value is wrong, or the profile does not cover the schedule. The message names the
            plan.
    """
    origin = frontier.provenance
    problem = problem_for(
        certificates.schedule,
        profile,
        blocking_power_w=origin.blocking_power_w,
        least_dwell_s=origin.least_dwell_s,
    )
    _check_inputs(frontier, certificates, problem)
    _check_plan("the baseline", frontier.baseline, problem)
    verifier = Verifier(problem)
    worst_gap = 0.0
    for number, plan in enumerate(frontier.plans):
        name = f"plan {number}"
        _check_plan(name, plan, problem)
        if plan.lower_bound_j is None or plan.gap is None:
            raise FrontierError(f"{name} states no lower bound.")
        try:
            # Frontiers of version 0.1.0 have bounds with more ranks bounded together.
            proven_j = verifier.bound_j(plan.time_s, *certificates.flow_w(number), with_all_pairs=True)
        except FrontierError as error:
            raise FrontierError(f"{name}: {error}") from None
        if not plan.lower_bound_j <= proven_j * (1 + _ROUNDING):
            raise FrontierError(
                f"{name}: the frontier states a lower bound of {plan.lower_bound_j!r} J, its certificate proves "
                f"{proven_j!r} J only."
            )
        worst_gap = max(worst_gap, plan.gap)
    return worst_gap


def _check_inputs(frontier: Frontier, certificates: Certificates, problem: Problem) -> None:
    if frontier.instructions != problem.instructions:
        raise FrontierError(
            "the frontier's instructions are not those of the certificates' schedule. Give the certificates that were "
            "written with this frontier."
        )
    if len(certificates.share) != len(frontier.plans):
        raise FrontierError(f"{len(frontier.plans)} plans, but certificates for {len(certificates.share)}.")
    if not _equal(frontier.t_min_s, problem.t_min_s):
        raise FrontierError(f"T_min is {frontier.t_min_s!r} s, by the profile {problem.t_min_s!r} s.")
    # Checked before flows are mixed, because the flows of a damaged file may be as large as memory.
    widths = certificates.edge_flow_w.shape[1], certificates.source_flow_w.shape[1]
    edges, nodes = len(problem.dag.edge_head), len(problem.dag.nodes)
    if widths != (edges, nodes):
        raise FrontierError(
            f"the certificates' flows have {widths[0]} edges and {widths[1]} nodes, the schedule {edges} and {nodes}."
        )
    rows = {(row.stage, row.kind, row.clock_mhz): row.time_s for row in problem.profile.measurements}
    for (stage, kind, clock_mhz), time_s in frontier.instruction_times_s.items():
        if rows.get((stage, kind, clock_mhz)) != time_s:
            raise FrontierError(
                f"instruction_times_s: stage {stage}, {kind}, {clock_mhz} MHz takes {time_s!r} s, by the profile "
                f"{rows.get((stage, kind, clock_mhz))!r} s."
            )


def _check_plan(name: str, plan: FrequencyPlan, problem: Problem) -> None:
    try:
        found = problem.evaluate(plan.clocks_mhz)
    except ProfileError as error:
        raise FrontierError(f"{name}: {error}") from None
    for what, unit, stated, recomputed in (
        ("takes", "s", plan.time_s, found.time_s),
        ("uses", "J", plan.energy_j, found.energy_j),
    ):
        if not _equal(stated, recomputed):
            raise FrontierError(f"{name} {what} {stated!r} {unit}, by the profile's rows {recomputed!r} {unit}.")


def _equal(stated: float, recomputed: float) -> bool:
    return math.isclose(stated, recomputed, rel_tol=_ROUNDING)
