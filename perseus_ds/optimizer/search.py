"""Finds plans at measured clocks by rounding the relaxed optimum and local search.

A set of plans is represented by the times of all events, shape (events, plans): each instruction runs at the slowest
clock that fits between its events. Event times with at least the minimum duration on every arc are a plan that meets
its deadline. Local search moves one event after the other to the time at which the adjacent instructions cost least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices, OptionTable

_SNAP = 2e-5
"""An error of the relaxed times up to this fraction of a typical instruction does not cause a faster clock."""
_REACH = 4
"""An instruction is tried at up to this many options faster and slower than its present one."""


def evenly(count: int, most: int) -> Indices:
    """Return at most ``most`` evenly spaced indices of ``count`` values."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.intp)


def options_at(network: Network, event_s: Floats) -> Indices:
    """Return the option of every decision, shape (decisions, plans)."""
    n = network.decisions
    window_s = event_s[network.head[:n]] - event_s[network.tail[:n]]
    return network.problem.table.longest_within(network.problem.group[:, None], window_s)


def durations_at(network: Network, options: Indices) -> Floats:
    """Return the duration of every arc, shape (arcs, plans) [s]."""
    duration_s = np.repeat(network.least_s[:, None], options.shape[1], axis=1)
    duration_s[: network.decisions] = network.problem.table.time_s[options]
    return duration_s


def round_late(network: Network, table: OptionTable, target_s: Floats, deadline_s: Floats) -> Floats:
    """Choose clocks, from last to first, so that instructions start at their target or later.

    The part of its window that an instruction cannot use is added to the window of the previous one, so that little is
    lost along a path even if clocks are coarse. Targets, the event times of relaxed optima, and the resulting event
    times have shape (events, plans).
    """
    n = network.decisions
    group = network.problem.group[:, None]
    earliest_s = network.earliest_s(network.least_s)
    target_s = np.maximum(target_s - _SNAP * float(network.least_s[:n].mean()), earliest_s[:, None])
    result = np.zeros_like(target_s)
    result[-1] = deadline_s
    for level in network.backward:
        arcs = level.edges
        least_s = network.least_s[arcs][:, None]
        end_s = result[level.others]
        begin_s = end_s - least_s
        chosen = arcs < n
        decisions = arcs[chosen]
        if len(decisions):
            window_s = end_s[chosen] - target_s[network.tail[decisions]]
            options = table.longest_within(group[decisions], window_s)
            begin_s[chosen] = end_s[chosen] - table.time_s[options]
        result[level.nodes] = np.minimum.reduceat(begin_s, level.first, axis=0)
    result[0] = 0.0
    return result


def splice(network: Network, slow_s: Floats, fast_s: Floats, deadline_s: Floats, *, slow_first: bool) -> Floats:
    """Combine a slower and a faster plan, each for a part of the iteration.

    The middle of an iteration repeats the same sequence of instructions. For a deadline between those of two good
    plans, executing a part of the iteration as in each of them is often better than one plan throughout. The time of
    the change is the latest (or earliest) one that meets the deadline.

    Durations in both plans have shape (arcs, plans), and the resulting event times (events, plans).
    """
    order = network.position if slow_first else 1.0 - network.position
    low, high = np.full(len(deadline_s), -1e-9), np.full(len(deadline_s), 1.0)
    for _ in range(10):
        middle = (low + high) / 2
        duration_s = np.where(order[:, None] <= middle, slow_s, fast_s)
        fits = network.earliest_s(duration_s)[-1] <= deadline_s
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    duration_s = np.where(order[:, None] <= low, slow_s, fast_s)
    result = network.latest_s(duration_s, deadline_s)
    result[0] = 0.0
    return result


@dataclass(frozen=True)
class _Arcs:
    """The arcs on one side of several events, padded to the same number of arcs.

    Attributes:
        other: Shape (events, width): the event at the arc's other end.
        least_s: Shape (events, width, 1): minimum duration, -inf for padding.
        decision: Indices (event, column) of the arcs that have a clock to choose.
        group: The groups of these arcs.
    """

    other: Indices
    least_s: Floats
    decision: tuple[Indices, Indices]
    group: Indices


class Descent:
    """Improves sets of plans by moving events. Those of one level have no arcs between them and are moved together."""

    def __init__(self, network: Network) -> None:
        self.network, self.table = network, network.problem.table
        ins: list[list[int]] = [[] for _ in range(network.events)]
        outs: list[list[int]] = [[] for _ in range(network.events)]
        for arc, (tail, head) in enumerate(zip(network.tail.tolist(), network.head.tolist(), strict=True)):
            ins[head].append(arc)
            outs[tail].append(arc)
        self._levels = []
        for level in network.forward:
            events = level.nodes[level.nodes != network.events - 1]
            if len(events):
                before = self._arcs([ins[e] for e in events], network.tail)
                self._levels.append((events, before, self._arcs([outs[e] for e in events], network.head)))

    def cost_j(self, event_s: Floats) -> Floats:
        """Return the effective energy of each plan, shape (plans,) [J]."""
        cost_j: Floats = self.table.cost_j[options_at(self.network, event_s)].sum(axis=0)
        return cost_j

    def run(self, event_s: Floats, sweeps: int) -> Floats:
        """Return improved event times, with which no plan gets worse or misses its deadline.

        Each sweep visits every event, alternately from the start and from the end.
        """
        event_s = event_s.copy()
        for sweep in range(sweeps):
            forward = sweep % 2 == 0
            for events, before, after in self._levels if forward else reversed(self._levels):
                event_s[events] = self._best(event_s, events, before, after, forward)
        return event_s

    def _best(self, event_s: Floats, events: Indices, before: _Arcs, after: _Arcs, early: bool) -> Floats:
        """Return the best times of some events, the earliest or the latest of equally good ones."""
        begin_s, end_s, now_s = event_s[before.other], event_s[after.other], event_s[events][:, None]
        low_s = (begin_s + before.least_s).max(axis=1)[:, None]
        high_s = np.maximum((end_s - after.least_s).min(axis=1)[:, None], low_s)
        tried_s = np.concatenate([now_s, low_s, high_s, *self._neighbours(begin_s, now_s, before)], axis=1)
        np.clip(tried_s, low_s, high_s, out=tried_s)
        cost_j = self._cost_j(tried_s[:, None] - begin_s[:, :, None], before)
        cost_j += self._cost_j(end_s[:, :, None] - tried_s[:, None], after)
        equal = cost_j <= cost_j.min(axis=1, keepdims=True) + 1e-9
        best_s: Floats = np.where(equal, tried_s, np.inf).min(1) if early else np.where(equal, tried_s, -np.inf).max(1)
        return best_s

    def _neighbours(self, begin_s: Floats, now_s: Floats, before: _Arcs) -> list[Floats]:
        """Return times at which an earlier instruction would end at a clock near its own."""
        row, column = before.decision
        if not len(row):
            return []
        begin_s = begin_s[row, column]
        group = before.group[:, None]
        present = self.table.longest_within(group, now_s[row, 0] - begin_s)[:, None]
        steps = np.arange(-_REACH, _REACH + 1)[None, :, None]
        options = np.clip(present + steps, self.table.begin[group][:, :, None], self.table.last[group][:, :, None])
        result = []
        for number in range(int(column.max()) + 1):
            # Events without a decision in this column try their present time again.
            tried_s = np.repeat(now_s, 2 * _REACH + 1, axis=1)
            here = column == number
            tried_s[row[here]] = begin_s[here][:, None] + self.table.time_s[options[here]]
            result.append(tried_s)
        return result

    def _cost_j(self, window_s: Floats, arcs: _Arcs) -> Floats:
        """Return the sum of the arcs' costs in windows of shape (events, width, tried, plans)."""
        row, column = arcs.decision
        result = np.zeros((len(window_s), *window_s.shape[2:]))
        window_s = window_s[row, column]
        options = self.table.longest_within(arcs.group[:, None, None], window_s)
        # An event may have several such arcs, but at most one in each column.
        cost_j = self.table.cost_j[options]
        for number in range(int(column.max(initial=-1)) + 1):
            here = column == number
            result[row[here]] += cost_j[here]
        return result

    def _arcs(self, lists: list[list[int]], ends: Indices) -> _Arcs:
        width = max(len(arcs) for arcs in lists)
        padded = np.full((len(lists), width), -1, dtype=np.intp)
        for row, arcs in enumerate(lists):
            # Decisions come first, so that few columns contain any.
            padded[row, : len(arcs)] = sorted(arcs)
        exists = padded >= 0
        # Padding repeats the first arc's other end and is never binding.
        other = ends[np.where(exists, padded, padded[:, :1])]
        least_s = np.where(exists, self.network.least_s[padded], -np.inf)[:, :, None]
        rows, columns = np.nonzero(exists & (padded < self.network.decisions))
        return _Arcs(other, least_s, (rows, columns), self.network.problem.group[padded[rows, columns]])
