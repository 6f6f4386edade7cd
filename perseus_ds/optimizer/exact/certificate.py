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

Where two neighbouring ranks run parallel paths between two meetings, the sum over their four instructions is
replaced by a joint minimum, which is never lower: see ``parallel_paths``.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.hull import Corners
from perseus_ds.optimizer.exact.parallel_paths import PathPairs, find_path_pairs, matching
from perseus_ds.optimizer.exact.problem import Problem

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-12
"""Largest rounding error of the sums, relative to their terms; the bound is lowered by it."""


class CertificateError(ValueError):
    """A flow that proves nothing about this problem."""


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
        into: Floats = np.where(self._is_first, source_flow_w, 0.0) + np.bincount(self._head, edge_flow_w, nodes)
        ends = float(np.maximum(into - np.bincount(self._tail, edge_flow_w, nodes), 0.0).sum())
        price_w = into[self.problem.node]
        least_j = self._least_j(time_s, price_w)
        instructions_j = float(least_j.sum()) + self._joint_gain_j(least_j, price_w, edge_flow_w)
        fixed_j = float(into @ self.problem.fixed_s)
        waiting_w = self.problem.waiting_energy_j(1.0)
        # A plan may end earlier, which costs less where a second is worth less than it costs to wait.
        earlier_j = max(0.0, waiting_w - ends) * (time_s - self.problem.t_min_s)
        slip_j = _ROUNDING * (abs(instructions_j) + fixed_j + (ends + waiting_w) * time_s)
        return instructions_j + fixed_j + (waiting_w - ends) * time_s - max(earlier_j, 0.0) - slip_j

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
