"""The DAG as a network of events, with arcs for the minimum time between two events.

An instruction is an arc from the event at which it starts to the event at which it ends. Nodes that take no time are
left out, and an end and a start that may always coincide are one event. So the network has about a third of the
variables that finish times of all DAG nodes would have.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from perseus_ds.optimizer.problem import Floats, Problem
from perseus_ds.pipeline.dag import DagLevel, levels


class Network:
    """Events and arcs, with event 0 the start of the iteration and the last event its end.

    Attributes:
        tail: Shape (arcs,): event at which each arc starts. The first ``len(problem.node)`` arcs are the decisions, in
            their order. The others are fixed durations and plain precedences.
        head: Shape (arcs,): event at which each arc ends.
        work: Shape (arcs,): the node of the DAG that each arc represents, or -1 for a plain precedence.
        least_s: Shape (arcs,): minimum duration of each arc [s].
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        built = _NetworkBuilder(problem)
        # Names sort as start, inner events, end; see _NetworkBuilder.
        names, ends = np.unique(np.array([built.tail, built.head]), return_inverse=True)
        tail, head = ends.reshape(2, -1)
        self.events = len(names)
        work = np.array(built.work, dtype=np.intp)
        decision = np.where(work >= 0, problem.decision_of[work], -1)
        # Stable sort: the decisions in their order, then the other arcs as generated, which is topological.
        order = np.argsort(np.where(decision >= 0, decision, len(work)), kind="stable")
        # The index of each arc, in the order in which the arcs were generated.
        self._topological = np.argsort(order)
        self.tail, self.head, self.work = tail[order], head[order], work[order]
        self.least_s = np.where(self.work >= 0, problem.durations_s(problem.fastest)[self.work], 0.0)

    @property
    def decisions(self) -> int:
        """Number of arcs that have a clock to choose."""
        return len(self.problem.node)

    @cached_property
    def position(self) -> Floats:
        """Relative start of each arc with all instructions at their fastest clocks, from 0 to 1."""
        earliest_s = self.earliest_s(self.least_s)
        return earliest_s[self.tail] / float(earliest_s[-1])

    @cached_property
    def forward(self) -> list[DagLevel]:
        """All events except the start, in levels whose arcs come from earlier levels."""
        return levels(self.tail, self.head, self._topological)

    @cached_property
    def backward(self) -> list[DagLevel]:
        """All events except the end, in levels whose arcs lead to earlier levels of this list."""
        return levels(self.head, self.tail, self._topological[::-1])

    def earliest_s(self, duration_s: Floats) -> Floats:
        """Return the earliest time of each event, shape (events, ...), for durations of shape (arcs, ...) [s]."""
        result = np.zeros((self.events, *duration_s.shape[1:]))
        for level in self.forward:
            finish = result[level.others] + duration_s[level.edges]
            result[level.nodes] = np.maximum.reduceat(finish, level.first, axis=0)
        return result

    def latest_s(self, duration_s: Floats, deadline_s: Floats | float) -> Floats:
        """Return the latest time of each event with which the end meets the deadline, shape (events, ...) [s]."""
        result = np.zeros((self.events, *np.broadcast(duration_s[0], deadline_s).shape))
        result[-1] = deadline_s
        for level in self.backward:
            start = result[level.others] - duration_s[level.edges]
            result[level.nodes] = np.minimum.reduceat(start, level.first, axis=0)
        return result


class _NetworkBuilder:
    """Names events and lists arcs so that an event's incoming arcs precede its outgoing ones.

    Start and end of node v are named 2v+1 and 2v+2, the iteration's start 0 and its end the largest number.

    Attributes:
        tail, head: Start and end event of each arc.
        work: The node of the DAG that each arc represents, or -1 for a plain precedence.
        instant: For each node, whether it takes no time.
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
        self.end = [0] * len(dag.nodes)
        for node in range(len(dag.nodes)):
            self._add(node)

    def _add(self, node: int) -> None:
        before, after = self.before[node], self.after[node]
        # A node with a single predecessor can start as soon as that ends and take longer instead, without loss.
        start = 0 if not before else self.end[before[0]] if len(before) == 1 else 2 * node + 1
        for other in before:
            if self.end[other] != start:
                self._arc(self.end[other], start, -1)
        if self.instant[node]:
            self.end[node] = start
            if not after:
                self._arc(self.end[node], self.last, -1)
            return
        # A node with a single successor can end when that starts, without loss.
        merges = len(after) == 1 and len(self.before[after[0]]) > 1
        self.end[node] = self.last if not after else 2 * after[0] + 1 if merges else 2 * node + 2
        self._arc(start, self.end[node], node)

    def _arc(self, tail: int, head: int, work: int) -> None:
        self.tail.append(tail)
        self.head.append(head)
        self.work.append(work)
