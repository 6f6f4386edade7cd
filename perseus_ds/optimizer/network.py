"""The DAG as a network of events: points in time, with arcs for the least time between two of them.

An instruction is an arc from the event at which it starts to the event at which it ends. Nodes that
take no time are left out, and an end and a start that may always coincide are one event, so the network has
about a third of the variables that finish times of all DAG nodes would be.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from scipy.sparse import csr_array

from perseus_ds.optimizer.problem import Floats, Problem
from perseus_ds.pipeline.dag import Level, levels


class Network:
    """Events and arcs; event 0 is the start of the iteration, the last one its end.

    Attributes:
        tail: Shape (arcs,): event at which each arc starts. The first ``len(problem.node)`` arcs are
            the decisions, in their order; the others are fixed durations and plain precedences.
        head: Shape (arcs,): event at which each arc ends.
        least_s: Shape (arcs,): the least time each arc takes [s].
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._built = _Builder(problem)
        names, ends = np.unique(np.array([self._built.tail, self._built.head]), return_inverse=True)
        tail, head = ends.reshape(2, -1)
        # Names sort as start, the others, end: see _Builder.
        self.events = len(names)
        work = np.array(self._built.work, dtype=np.intp)
        decision = np.where(work >= 0, problem.decision_of[work], -1)
        # Stable: decisions in their own order, then the rest as generated, which is topological.
        order = np.argsort(np.where(decision >= 0, decision, len(work)), kind="stable")
        # Where each arc is, in the order in which they were generated.
        self._topological = np.argsort(order)
        self.tail, self.head = tail[order], head[order]
        least_s = np.where(work >= 0, problem.durations_s(problem.fastest)[work], 0.0)
        self.least_s = least_s[order]

    @property
    def decisions(self) -> int:
        """Number of arcs that have a clock to choose."""
        return len(self.problem.node)

    @cached_property
    def position(self) -> Floats:
        """The start of each arc with all at their fastest clocks, 0 at the start of the iteration and 1 at its end."""
        earliest_s = self.earliest_s(self.least_s)
        return earliest_s[self.tail] / float(earliest_s[-1])

    @cached_property
    def forward(self) -> list[Level]:
        """All events but the start, each level's arcs coming from earlier levels."""
        return levels(self.tail, self.head, self._topological)

    @cached_property
    def backward(self) -> list[Level]:
        """All events but the end, each level's arcs going to levels that come earlier in this list."""
        return levels(self.head, self.tail, self._topological[::-1])

    def earliest_s(self, duration_s: Floats) -> Floats:
        """Return when each event happens at the earliest [s].

        Args:
            duration_s: Shape (arcs, ...) [s].

        Returns:
            Shape (events, ...).
        """
        result = np.zeros((self.events, *duration_s.shape[1:]))
        for level in self.forward:
            finish = result[level.others] + duration_s[level.edges]
            result[level.nodes] = np.maximum.reduceat(finish, level.first, axis=0)
        return result

    def latest_s(self, duration_s: Floats, deadline_s: Floats | float) -> Floats:
        """Return when each event may happen at the latest for the end to be in time [s].

        Args:
            duration_s: Shape (arcs, ...) [s].
            deadline_s: Shape (...) [s].
        """
        result = np.zeros((self.events, *np.broadcast(duration_s[0], deadline_s).shape))
        result[-1] = deadline_s
        for level in self.backward:
            start = result[level.others] - duration_s[level.edges]
            result[level.nodes] = np.minimum.reduceat(start, level.first, axis=0)
        return result

    def dag_flow(self, flow: Floats) -> tuple[Floats, Floats]:
        """Return a flow over the arcs as one over the DAG: over its edges, and into nodes without predecessors.

        Returns:
            Shape (edges,), edges in the order of ``dag.predecessors``, and shape (nodes,).
        """
        edges, source = self._dag_flow_matrices
        return edges @ flow, source @ flow

    @cached_property
    def _dag_flow_matrices(self) -> tuple[csr_array, csr_array]:
        """The sums of arcs that make up the flow over each edge, and into each node without predecessors."""
        before, built = self.problem.dag.predecessors, self._built
        first = [0, *accumulate(map(len, before))]
        # The arcs whose flows pass through each node.
        through: list[list[int]] = [[] for _ in before]
        for arc, node in enumerate(built.work):
            if node >= 0:
                through[node] = [arc]
        for node, arc in built.to_end.items():
            through[node] = [arc]
        edges: list[list[int]] = [[] for _ in range(first[-1])]
        for node in range(len(before) - 1, -1, -1):
            for edge, other in enumerate(before[node], first[node]):
                arc = built.edge_arc[edge]
                # Not carried by an arc: all of the node's flow comes this way, or all of the other's goes it.
                edges[edge] = [arc] if arc >= 0 else through[node] if len(before[node]) == 1 else through[other]
                if built.instant[other]:
                    through[other] = through[other] + edges[edge]
        source = [[] if preceding else arcs for preceding, arcs in zip(before, through, strict=True)]
        return self._sums_of(edges), self._sums_of(source)

    def _sums_of(self, lists: list[list[int]]) -> csr_array:
        """Return the matrix whose rows add up the listed arcs, given as they were generated."""
        columns = self._topological[np.fromiter(chain.from_iterable(lists), np.intp)]
        begins = [0, *accumulate(map(len, lists))]
        return csr_array((np.ones(len(columns)), columns, begins), shape=(len(lists), len(self.tail)))


class _Builder:
    """Names events and lists arcs, in an order in which an event's arcs in precede its arcs out.

    Start and end of node v are named 2v+1 and 2v+2, the iteration's start 0, its end the largest.

    Attributes:
        tail, head: Of each arc.
        work: The node of the DAG that it is, -1 for a plain precedence.
        edge_arc: For each edge of the DAG, the arc that carries it, else -1.
        to_end: Arcs from nodes that take no time to the end, by node.
        instant: Which nodes take no time.
    """

    def __init__(self, problem: Problem) -> None:
        dag = problem.dag
        self.before, self.after = dag.predecessors, dag.successors
        self.last = 2 * len(dag.nodes) + 1
        self.instant = (problem.fixed_s == 0.0).tolist()
        for node in problem.node.tolist():
            self.instant[node] = False
        self.tail: list[int] = []
        self.head: list[int] = []
        self.work: list[int] = []
        self.edge_arc: list[int] = []
        self.to_end: dict[int, int] = {}
        self.end = [0] * len(dag.nodes)
        for node in range(len(dag.nodes)):
            self._add(node)

    def _add(self, node: int) -> None:
        before, after = self.before[node], self.after[node]
        # A node with one predecessor can start as soon as that ends, without loss, and then last longer.
        start = 0 if not before else self.end[before[0]] if len(before) == 1 else 2 * node + 1
        for other in before:
            carried = self.end[other] != start
            self.edge_arc.append(len(self.tail) if carried else -1)
            if carried:
                self._arc(self.end[other], start, -1)
        if self.instant[node]:
            self.end[node] = start
            if not after:
                self.to_end[node] = len(self.tail)
                self._arc(self.end[node], self.last, -1)
            return
        # A node with one successor can end when that starts, without loss.
        merges = len(after) == 1 and len(self.before[after[0]]) > 1
        self.end[node] = self.last if not after else 2 * after[0] + 1 if merges else 2 * node + 2
        self._arc(start, self.end[node], node)

    def _arc(self, tail: int, head: int, work: int) -> None:
        self.tail.append(tail)
        self.head.append(head)
        self.work.append(work)
