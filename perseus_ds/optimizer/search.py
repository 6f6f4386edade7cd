"""Finds plans at measured clocks by rounding a relaxed optimum and by local search.

Words:

- a *decision* is an instruction with a clock to choose; its *options* are its clocks, sorted from the fastest one;
- *event times* have shape (events, plans): the time of each event of the network in several plans, searched together;
- the *window* of an arc is the time between its two events.

Event times represent plans: each instruction runs at the slowest clock that fits into its window. If each window is at
least the minimum duration of its arc, the plan meets its deadline, which is the time of the last event.

:func:`round_late` makes such event times from those of a relaxed optimum, and :func:`splice` from two plans.
:class:`Descent` improves them: it moves one event after the other to the time at which the adjacent instructions cost
least.
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
_BISECTIONS = 10
"""Number of bisections of the time at which one plan continues as another one."""
_EQUAL_J = 1e-9
"""Costs with a smaller difference are treated as equal [J]."""


def evenly(count: int, most: int) -> Indices:
    """Return at most ``most`` evenly spaced indices of ``count`` values."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.intp)


def options_at(network: Network, event_s: Floats) -> Indices:
    """Return the slowest option of every decision that fits between its events, shape (decisions, plans)."""
    decisions = slice(network.decisions)
    window_s = event_s[network.head[decisions]] - event_s[network.tail[decisions]]
    return network.problem.table.longest_within(network.problem.group[:, None], window_s)


def durations_at(network: Network, options: Indices) -> Floats:
    """Return the duration of every arc, shape (arcs, plans) [s]."""
    duration_s = np.repeat(network.least_s[:, None], options.shape[1], axis=1)
    duration_s[: network.decisions] = network.problem.table.time_s[options]
    return duration_s


def round_late(network: Network, table: OptionTable, target_s: Floats, deadline_s: Floats) -> Floats:
    """Choose clocks, from last to first, so that instructions start at their target or later.

    The part of its window that an instruction cannot use is added to the window of the previous one, so that little is
    lost along a path even if clocks are coarse.

    Args:
        network: The network.
        table: The options to choose from.
        target_s: Shape (events, plans): event times of relaxed optima [s].
        deadline_s: Shape (plans,) [s].

    Returns:
        Event times, shape (events, plans) [s].
    """
    group = network.problem.group[:, None]
    earliest_s = network.earliest_s(network.least_s)
    typical_s = float(network.least_s[: network.decisions].mean())
    target_s = np.maximum(target_s - _SNAP * typical_s, earliest_s[:, None])
    result = np.zeros_like(target_s)
    result[-1] = deadline_s
    for level in network.backward:
        arcs = level.edges
        end_s = result[level.others]  # shape (arcs of the level, plans)
        begin_s = end_s - network.least_s[arcs][:, None]
        is_decision = arcs < network.decisions
        decisions = arcs[is_decision]
        if len(decisions):
            window_s = end_s[is_decision] - target_s[network.tail[decisions]]
            options = table.longest_within(group[decisions], window_s)
            begin_s[is_decision] = end_s[is_decision] - table.time_s[options]
        result[level.nodes] = np.minimum.reduceat(begin_s, level.first, axis=0)
    result[0] = 0.0
    return result


def splice(network: Network, slow_s: Floats, fast_s: Floats, deadline_s: Floats, *, slow_first: bool) -> Floats:
    """Combine a slower and a faster plan, each for a part of the iteration.

    The middle of an iteration repeats the same sequence of instructions. For a deadline between those of two good
    plans, executing a part of the iteration as in each of them is often better than one plan throughout. The time of
    the change is the latest (or earliest) one that meets the deadline.

    Args:
        network: The network.
        slow_s: Shape (arcs, plans): durations in the slower plans [s].
        fast_s: Shape (arcs, plans): durations in the faster plans [s].
        deadline_s: Shape (plans,) [s].
        slow_first: Whether the iteration begins as the slower plan.

    Returns:
        Event times, shape (events, plans) [s].
    """
    from_begin = network.position if slow_first else 1.0 - network.position

    def durations_s(change: Floats) -> Floats:
        """Return durations, with the slower plan up to a relative time, shape (arcs, plans) [s]."""
        return np.where(from_begin[:, None] <= change, slow_s, fast_s)

    low = np.full(len(deadline_s), -1e-9)
    high = np.full(len(deadline_s), 1.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = network.earliest_s(durations_s(middle))[-1] <= deadline_s
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle)
    result = network.latest_s(durations_s(low), deadline_s)
    result[0] = 0.0
    return result


@dataclass(frozen=True)
class _Arcs:
    """The arcs on one side of several events, in rows that are padded to the same number of columns.

    Attributes:
        other: Shape (events, columns): the event at the arc's other end.
        least_s: Shape (events, columns, 1): minimum duration, -inf for padding [s].
        row, column: Shape (decisions,): where the arcs with a clock to choose are.
        group: Shape (decisions,): the groups of these arcs.
    """

    other: Indices
    least_s: Floats
    row: Indices
    column: Indices
    group: Indices

    @property
    def most_decisions(self) -> int:
        """Number of columns that contain decisions, which come first in each row."""
        return int(self.column.max(initial=-1)) + 1


@dataclass(frozen=True)
class _Level:
    """Events without arcs between them, which are moved together, with the arcs that end and begin at them."""

    events: Indices
    before: _Arcs
    after: _Arcs


class Descent:
    """Improves event times by moving one level of events after the other."""

    def __init__(self, network: Network) -> None:
        self._network, self._table = network, network.problem.table
        ins: list[list[int]] = [[] for _ in range(network.events)]
        outs: list[list[int]] = [[] for _ in range(network.events)]
        for arc, (tail, head) in enumerate(zip(network.tail.tolist(), network.head.tolist(), strict=True)):
            ins[head].append(arc)
            outs[tail].append(arc)
        self._levels: list[_Level] = []
        for level in network.forward:
            events = level.nodes[level.nodes != network.events - 1]
            if len(events):
                before = self._arcs([ins[event] for event in events], network.tail)
                after = self._arcs([outs[event] for event in events], network.head)
                self._levels.append(_Level(events, before, after))

    def cost_j(self, event_s: Floats) -> Floats:
        """Return the effective energy of each plan, shape (plans,) [J]."""
        cost_j: Floats = self._table.cost_j[options_at(self._network, event_s)].sum(axis=0)
        return cost_j

    def run(self, event_s: Floats, sweeps: int) -> Floats:
        """Return improved event times, with which no plan gets worse or misses its deadline.

        Each sweep visits every event, alternately from the start and from the end.
        """
        event_s = event_s.copy()
        for sweep in range(sweeps):
            is_forward = sweep % 2 == 0
            for level in self._levels if is_forward else reversed(self._levels):
                event_s[level.events] = self._best_s(event_s, level, early=is_forward)
        return event_s

    def _best_s(self, event_s: Floats, level: _Level, *, early: bool) -> Floats:
        """Return the best times of a level's events, the earliest or the latest of equally good ones.

        Tried are the present times, the earliest and the latest possible ones, and those at which an instruction before
        the event would end at another clock.
        """
        before, after = level.before, level.after
        begin_s = event_s[before.other]  # shape (events, arcs before, plans)
        end_s = event_s[after.other]  # shape (events, arcs after, plans)
        now_s = event_s[level.events][:, None]  # shape (events, 1, plans), as the next two
        low_s = (begin_s + before.least_s).max(axis=1, keepdims=True)
        high_s = (end_s - after.least_s).min(axis=1, keepdims=True)
        high_s = np.maximum(high_s, low_s)
        others_s = self._ends_at_other_clocks(begin_s, now_s, before)
        tried_s = np.concatenate([now_s, low_s, high_s, *others_s], axis=1)  # shape (events, tried, plans)
        np.clip(tried_s, low_s, high_s, out=tried_s)
        cost_j = self._cost_j(tried_s[:, None] - begin_s[:, :, None], before)
        cost_j += self._cost_j(end_s[:, :, None] - tried_s[:, None], after)
        is_best = cost_j <= cost_j.min(axis=1, keepdims=True) + _EQUAL_J
        best_s: Floats
        if early:
            best_s = np.where(is_best, tried_s, np.inf).min(axis=1)
        else:
            best_s = np.where(is_best, tried_s, -np.inf).max(axis=1)
        return best_s

    def _ends_at_other_clocks(self, begin_s: Floats, now_s: Floats, before: _Arcs) -> list[Floats]:
        """Return the times at which instructions before the events would end at clocks near their own.

        There is an array for each column with decisions, shape (events, clocks tried, plans) [s].
        """
        if not len(before.row):
            return []
        begin_s = begin_s[before.row, before.column]  # shape (decisions, plans)
        group = before.group[:, None]
        present = self._table.longest_within(group, now_s[before.row, 0] - begin_s)
        steps = np.arange(-_REACH, _REACH + 1)
        options = present[:, None] + steps[None, :, None]  # shape (decisions, clocks tried, plans)
        options = np.clip(options, self._table.begin[group][:, :, None], self._table.last[group][:, :, None])
        result = []
        for column in range(before.most_decisions):
            # Events without a decision in this column try their present time again.
            tried_s = np.repeat(now_s, len(steps), axis=1)
            here = before.column == column
            tried_s[before.row[here]] = begin_s[here][:, None] + self._table.time_s[options[here]]
            result.append(tried_s)
        return result

    def _cost_j(self, window_s: Floats, arcs: _Arcs) -> Floats:
        """Return the costs of arcs in windows of shape (events, columns, tried, plans), summed over columns [J]."""
        events, _, tried, plans = window_s.shape
        result = np.zeros((events, tried, plans))
        options = self._table.longest_within(arcs.group[:, None, None], window_s[arcs.row, arcs.column])
        cost_j = self._table.cost_j[options]  # shape (decisions, tried, plans)
        # An event may have several decisions, but at most one in each column.
        for column in range(arcs.most_decisions):
            here = arcs.column == column
            result[arcs.row[here]] += cost_j[here]
        return result

    def _arcs(self, arcs_of: list[list[int]], ends: Indices) -> _Arcs:
        """Return the given arcs of each event, whose other ends are in ``ends``."""
        columns = max(len(arcs) for arcs in arcs_of)
        padded = np.full((len(arcs_of), columns), -1, dtype=np.intp)
        for number, arcs in enumerate(arcs_of):
            # Decisions have the lowest numbers, so that few columns contain any.
            padded[number, : len(arcs)] = sorted(arcs)
        exists = padded >= 0
        # Padding repeats the first arc's other end and is never binding.
        other = ends[np.where(exists, padded, padded[:, :1])]
        least_s = np.where(exists, self._network.least_s[padded], -np.inf)[:, :, None]
        row, column = np.nonzero(exists & (padded < self._network.decisions))
        return _Arcs(other, least_s, row, column, self._network.problem.group[padded[row, column]])
