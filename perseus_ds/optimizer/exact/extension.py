"""From a shortened iteration to the whole one: flows that prove bounds, and times of events.

A cut divides the shorter iteration into what comes before the periods that it lacks and what comes after them. The
flow over an edge that crosses the cut is carried on, period after period, along the way from the edge's end to the
beginning of the same edge a period later. So a flow that is conserved stays conserved. In the missing
periods, events happen as in the first period after the cut, each time a period later.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array

from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.repetition import Repetition, Shape, parts_of
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.operations import Compute, Load, Other, Wait

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class ExtensionError(Exception):
    """The shorter iteration's DAG is not the whole one's with periods left out."""


class Cut:
    """A cut through the DAG of a shortened iteration, where the periods that it lacks are put in.

    Attributes:
        after: Shape (nodes of the shorter DAG,): whether each comes after the cut.
    """

    def __init__(self, whole: Problem, short: Problem, repetition: Repetition, periods: int) -> None:
        """Compare both DAGs.

        Args:
            whole: The problem of the whole iteration.
            short: That of the shorter one.
            repetition: How the one results from the other.
            periods: How many periods of the middle come before the cut.

        Raises:
            ExtensionError: They do not fit together.
        """
        self.whole, self.short, self.left_out = whole, short, repetition.left_out
        names = _Names(repetition)
        in_short, in_whole = names.add(short.dag), names.add(whole.dag)
        self._in_short, self._in_whole = _Lookup(*in_short, names), _Lookup(*in_whole, names)
        self.after = _is_after(short.dag, repetition.cut(periods))
        tail, head = short.edges
        if np.any(self.after[tail] & ~self.after[head]):
            raise ExtensionError("the cut is not one through every rank at the same place")
        self._copy = np.where(self.after, self.left_out, 0)

    def moved(self) -> Indices:
        """Return for each node of the shorter DAG the one of the whole DAG that it is."""
        return self.later(np.arange(len(self.after)), self._copy)

    def later(self, nodes: Indices, periods: Indices | int) -> Indices:
        """Return the nodes of the whole DAG that are those of the shorter one so many periods later."""
        found = self._in_short.shifted(nodes, periods, self._in_whole)
        if np.any(found < 0):
            raise ExtensionError("a node of the shorter DAG is missing in the whole one")
        return found

    def later_in_short(self, nodes: Indices, periods: int) -> Indices:
        """Return the nodes of the shorter DAG that are so many periods later, -1 where there is none."""
        return self._in_short.shifted(nodes, periods, self._in_short)

    def repeated(self) -> tuple[Indices, Indices]:
        """Return for each node of the whole DAG the one of the shorter DAG that it repeats, and how many periods later.

        The missing periods repeat the first one after the cut.
        """
        of_node, later = np.full((2, len(self.whole.dag.nodes)), -1, dtype=np.intp)
        moved = self.moved()
        of_node[moved], later[moved] = np.arange(len(self.after)), self._copy
        earlier = self.later_in_short(np.arange(len(self.after)), -1)
        copied = np.flatnonzero(self.after & ((earlier < 0) | ~self.after[earlier]) & self._in_short.repeats)
        for period in range(self.left_out):
            at = self.later(copied, period)
            of_node[at], later[at] = copied, period
        if np.any(of_node < 0):
            raise ExtensionError("the whole DAG has a node that is not in a period")
        return of_node, later


class FlowExtension:
    """Extends flows through the shorter DAG to the whole one."""

    def __init__(self, cut: Cut) -> None:
        """Find the ways along which flows are carried on.

        Raises:
            ExtensionError: The DAGs do not fit together.
        """
        self._cut = cut
        self._tail, self._head = cut.short.edges
        self._crosses = ~cut.after[self._tail] & cut.after[self._head]
        self._edges, self._sources = self._matrices()

    def flow(self, edge_flow_w: Floats, source_flow_w: Floats) -> tuple[Floats, Floats]:
        """Return a flow of the whole DAG from one of the shorter one [W]."""
        return self._edges @ edge_flow_w, self._sources @ source_flow_w

    def period_s(self, finish_s: Floats, periods: int) -> float:
        """Return how long a period takes around the cut, the mean over so many periods on either side [s].

        Args:
            finish_s: Shape (nodes of the shorter DAG,) [s].
            periods: At most half of those that the shorter schedule has.
        """
        last = np.unique(self._tail[self._crosses])
        first, later = (self._cut.later_in_short(last, by) for by in (-periods, periods))
        known = (first >= 0) & (later >= 0)
        return float((finish_s[later[known]] - finish_s[first[known]]).mean() / (2 * periods))

    def _matrices(self) -> tuple[csr_array, csr_array]:
        cut, tail, head = self._cut, self._tail, self._head
        whole_edges = _Edges(cut.whole)
        inner, crossing = np.flatnonzero(~self._crosses), np.flatnonzero(self._crosses)
        at = cut.moved()
        rows, columns = [whole_edges.find(at[tail[inner]], at[head[inner]])], [inner]
        durations_s = cut.short.durations_s(cut.short.fastest).tolist()
        steps = np.array(
            [(edge, *step) for edge in crossing.tolist() for step in self._path(edge, durations_s)], dtype=np.intp
        )
        for period in range(cut.left_out + 1):
            rows.append(whole_edges.find(cut.later(tail[crossing], period), cut.later(head[crossing], period)))
            columns.append(crossing)
            if period < cut.left_out and len(steps):
                rows.append(whole_edges.find(cut.later(steps[:, 1], period), cut.later(steps[:, 2], period)))
                columns.append(steps[:, 0])
        row, column = np.concatenate(rows), np.concatenate(columns)
        edges = coo_array((np.ones(len(row)), (row, column)), shape=(len(whole_edges), len(tail))).tocsr()
        first = np.flatnonzero([not before for before in cut.short.dag.predecessors])
        shape = (len(cut.whole.dag.nodes), len(at))
        return edges, coo_array((np.ones(len(first)), (at[first], first)), shape=shape).tocsr()

    def _path(self, edge: int, durations_s: list[float]) -> list[tuple[int, int]]:
        """Return the edges of the longest way from the end of an edge to where the edge begins a period later."""
        begin = int(self._head[edge])
        goal = int(self._cut.later_in_short(self._tail[edge : edge + 1], 1)[0])
        reached: dict[int, tuple[float, int]] = {begin: (0.0, -1)}
        for node in range(begin + 1, goal + 1):
            ways = [
                (reached[before][0] + durations_s[node], before)
                for before in self._cut.short.dag.predecessors[node]
                if before in reached
            ]
            if ways:
                reached[node] = max(ways)
        if goal not in reached:
            raise ExtensionError("no way leads from the cut to the cut a period later")
        path = [goal]
        while path[-1] != begin:
            path.append(reached[path[-1]][1])
        return list(pairwise(path[::-1]))


class _Names:
    """Numbers for the shapes of work."""

    def __init__(self, repetition: Repetition) -> None:
        self.of: dict[Shape, int] = {}
        self.repeating = repetition.repeating
        self.micro_batches = repetition.micro_batches

    def add(self, dag: Dag) -> tuple[Indices, Indices]:
        """Return the shape's number and the micro-batch of every node."""
        parts = [parts_of(node.work) for node in dag.nodes]
        shape = np.array([self.of.setdefault(shape, len(self.of)) for shape, _ in parts], dtype=np.intp)
        return shape, np.array([number for _, number in parts], dtype=np.intp)


class _Lookup:
    """Finds the nodes of a DAG by what they do.

    Attributes:
        repeats: Shape (nodes,): whether each is a part of the periods.
    """

    def __init__(self, shape: Indices, micro_batch: Indices, names: _Names) -> None:
        self._shape, self._micro_batch = shape, micro_batch
        repeats = np.array([name in names.repeating for name in names.of])
        self.repeats = repeats[shape]
        self._period = np.where(self.repeats, names.micro_batches, 0)
        self._table = np.full((len(names.of) + 1, int(micro_batch.max()) + 2), -1, dtype=np.intp)
        self._table[shape, micro_batch] = np.arange(len(shape))

    def shifted(self, nodes: Indices, periods: Indices | int, other: _Lookup) -> Indices:
        """Return the nodes of another DAG that do the same as these so many periods later, -1 where there is none."""
        micro_batch = self._micro_batch[nodes] + self._period[nodes] * periods
        last = other._table.shape[1] - 1
        outside = (micro_batch < 0) | (micro_batch > last)
        return other._table[self._shape[nodes], np.where(outside, last, micro_batch)]


class _Edges:
    """Finds the edges of a problem's DAG by their ends."""

    def __init__(self, problem: Problem) -> None:
        tail, head = problem.edges
        self._nodes = len(problem.dag.nodes)
        keys = tail * self._nodes + head
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, tail: Indices, head: Indices) -> Indices:
        """Return the numbers of edges in the order of ``dag.predecessors``."""
        wanted = tail * self._nodes + head
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        if np.any(self._keys[at] != wanted):
            raise ExtensionError("an edge of the shorter DAG is missing in the whole one")
        return self._order[at]


def _is_after(dag: Dag, cuts: list[int]) -> npt.NDArray[np.bool_]:
    """Return for every node of the shorter DAG whether it comes after the cut."""
    after: dict[object, bool] = {}
    for stream, cut in zip(dag.schedule.ranks, cuts, strict=True):
        for position, operation in enumerate(stream):
            if isinstance(operation, Compute):
                works: tuple[object, ...] = (operation.instruction,)
            elif isinstance(operation, Load | Other):
                works = (operation,)
            else:
                works = () if isinstance(operation, Wait) else operation.transfers
            for work in works:
                after[work] = after.get(work, False) or position >= cut
    return np.array([after[node.work] for node in dag.nodes])
