"""The DAG as a network of events: points in time, with arcs for the least time between two of them.

An instruction is an arc from the event at which it starts to the event at which it ends. Nodes that
take no time are left out, and an end and a start that may always coincide are one event, so the network has
about a third of the variables that finish times of all DAG nodes would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from perseus_ds.optimizer.problem import Problem

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class EventLevel:
    """Events whose arcs on one side come from earlier levels only.

    Attributes:
        events: Shape (n,).
        arcs: Their arcs on that side, grouped by event.
        first: Shape (n,): where each event's group of arcs starts.
    """

    events: Indices
    arcs: Indices
    first: Indices


class Network:
    """Events and arcs; event 0 is the start of the iteration, the last one its end.

    Attributes:
        tail: Shape (arcs,): event at which each arc starts. The first ``len(problem.node)`` arcs are
            the decisions, in their order; the others are fixed durations and plain precedences.
        head: Shape (arcs,): event at which each arc ends.
        least_s: Shape (arcs,): the least time each arc takes [s].
        edge_arc: Shape (edges of the DAG,): the arc that carries a DAG edge, else -1.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        builder = _Builder(problem)
        names, ends = np.unique(np.array([builder.tail, builder.head]), return_inverse=True)
        tail, head = ends.reshape(2, -1)
        # Names sort as start, the others, end: see _Builder.
        self.events = len(names)
        decision_of = np.full(len(problem.dag.nodes), -1, dtype=np.intp)
        decision_of[problem.node] = np.arange(len(problem.node))
        work = np.array(builder.work, dtype=np.intp)
        decision = np.where(work >= 0, decision_of[work], -1)
        # Stable: decisions in their own order, then the rest as generated, which is topological.
        order = np.argsort(np.where(decision >= 0, decision, len(work)), kind="stable")
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        self._topological = position
        self.tail, self.head = tail[order], head[order]
        least_s = np.where(work >= 0, problem.durations_s(problem.fastest)[work], 0.0)
        self.least_s = least_s[order]
        edge_arc = np.array(builder.edge_arc, dtype=np.intp)
        self.edge_arc = np.where(edge_arc >= 0, position[edge_arc], -1) if len(edge_arc) else edge_arc
        self._other_work = work[order[len(problem.node) :]]
        self._instant = builder.instant
        self._to_end = {node: int(position[arc]) for node, arc in builder.to_end.items()}

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
    def forward(self) -> list[EventLevel]:
        """All events but the start, each level's arcs coming from earlier levels."""
        return _levels(self.tail, self.head, self._topological, self.events)

    @cached_property
    def backward(self) -> list[EventLevel]:
        """All events but the end, each level's arcs going to levels that come earlier in this list."""
        return _levels(self.head, self.tail, self._topological[::-1], self.events)

    def earliest_s(self, duration_s: Floats) -> Floats:
        """Return when each event happens at the earliest [s].

        Args:
            duration_s: Shape (arcs, ...) [s].

        Returns:
            Shape (events, ...).
        """
        result = np.zeros((self.events, *duration_s.shape[1:]))
        for level in self.forward:
            finish = result[self.tail[level.arcs]] + duration_s[level.arcs]
            result[level.events] = np.maximum.reduceat(finish, level.first, axis=0)
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
            start = result[self.head[level.arcs]] - duration_s[level.arcs]
            result[level.events] = np.minimum.reduceat(start, level.first, axis=0)
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
        before = self.problem.dag.predecessors
        first = np.concatenate(([0], np.cumsum([len(b) for b in before]))).tolist()
        # The arcs whose flows pass through each node.
        through: list[list[int]] = [[] for _ in before]
        for decision, node in enumerate(self.problem.node.tolist()):
            through[node] = [decision]
        for number, node in enumerate(self._other_work.tolist(), self.decisions):
            if node >= 0:
                through[node] = [number]
        for node, arc in self._to_end.items():
            through[node] = [arc]
        edges: list[list[int]] = [[] for _ in range(first[-1])]
        edge_arc = self.edge_arc.tolist()
        for node in range(len(before) - 1, -1, -1):
            for edge, other in enumerate(before[node], first[node]):
                arc = edge_arc[edge]
                # Not carried by an arc: all of the node's flow comes this way, or all of the other's goes it.
                edges[edge] = [arc] if arc >= 0 else through[node] if len(before[node]) == 1 else through[other]
                if self._instant[other]:
                    through[other] = through[other] + edges[edge]
        source = [[] if preceding else arcs for preceding, arcs in zip(before, through, strict=True)]
        return _sums_of(edges, len(self.tail)), _sums_of(source, len(self.tail))


def _sums_of(lists: list[list[int]], columns: int) -> csr_array:
    """Return the matrix whose rows add up the listed columns."""
    begins = np.concatenate(([0], np.cumsum([len(row) for row in lists])))
    indices = np.array([column for row in lists for column in row], dtype=np.intp)
    return csr_array((np.ones(len(indices)), indices, begins), shape=(len(lists), columns))


class _Builder:
    """Names events and lists arcs, in an order in which an event's arcs in precede its arcs out.

    Start and end of node v are named 2v+1 and 2v+2, the iteration's start 0, its end the largest.
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
        self.start = [0] * len(dag.nodes)
        self.end = [0] * len(dag.nodes)
        for node in range(len(dag.nodes)):
            self._add(node)

    def _add(self, node: int) -> None:
        before, after = self.before[node], self.after[node]
        # A node with one predecessor can start as soon as that ends, without loss, and then last longer.
        self.start[node] = 0 if not before else self.end[before[0]] if len(before) == 1 else 2 * node + 1
        for other in before:
            carried = self.end[other] != self.start[node]
            self.edge_arc.append(len(self.tail) if carried else -1)
            if carried:
                self._arc(self.end[other], self.start[node], -1)
        if self.instant[node]:
            self.end[node] = self.start[node]
            if not after:
                self.to_end[node] = len(self.tail)
                self._arc(self.end[node], self.last, -1)
            return
        # A node with one successor can end when that starts, without loss.
        merges = len(after) == 1 and len(self.before[after[0]]) > 1
        self.end[node] = self.last if not after else 2 * after[0] + 1 if merges else 2 * node + 2
        self._arc(self.start[node], self.end[node], node)

    def _arc(self, tail: int, head: int, work: int) -> None:
        self.tail.append(tail)
        self.head.append(head)
        self.work.append(work)


def _levels(tail: Indices, head: Indices, order: Indices, events: int) -> list[EventLevel]:
    depth = [0] * events
    heads, tails = head.tolist(), tail.tolist()
    for arc in order.tolist():
        depth[heads[arc]] = max(depth[heads[arc]], depth[tails[arc]] + 1)
    depths = np.array(depth)[head]
    arcs = np.lexsort((head, depths))
    bounds = np.flatnonzero(np.diff(depths[arcs])) + 1
    result = []
    for group in np.split(arcs, bounds):
        names, first = np.unique(head[group], return_index=True)
        result.append(EventLevel(names, group, first))
    return result
