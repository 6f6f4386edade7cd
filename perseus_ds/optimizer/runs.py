"""Finds plans with a dwell time, the minimum duration of a run at one clock.

A *run* is the time at one clock. It begins when the last instruction at another clock ends, includes waiting, and
continues across the end of the iteration, which repeats. A plan is *held* if each of its runs lasts the dwell time of
its clock. A plan is *free* if it was made without a dwell time. The *shape* of a plan is where its runs begin.

Plans are found for each deadline as follows.

1. Shapes are made: one clock per rank; and from a free plan, the runs into which it is cut if none of its instructions
   may become slower, and the runs of least cost at the prices of the relaxed problem
   (:mod:`perseus_ds.optimizer.run_choice`).
2. The runs of a shape are kept and their clocks searched (:mod:`perseus_ds.optimizer.run_clocks`).
3. Runs that are too short in the plan's own times are extended at the expense of slower neighbours, and the clocks are
   searched again.

A deadline receives the best of all these plans, of the plans for shorter deadlines, and of the given initial plans. For
the time of default clocks, at which most jobs run, the shapes of all other deadlines are tried too. So a plan is never
worse than the best of those shapes or than a given plan for a longer dwell time. It is not necessarily the optimum, and
the frontier's lower bound does not take the dwell time into account.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Clocks, Floats, Indices, Problem
from perseus_ds.optimizer.run_choice import best_runs, least_saving_j
from perseus_ds.optimizer.run_clocks import ClocksOfRank, Paths, RunClockSearch, Sequences, begins_run
from perseus_ds.optimizer.search import evenly
from perseus_ds.planning import DwellTimes

_PLACES = 128
"""Maximum number of a rank's instructions at which its runs may begin, evenly spaced."""
_MARGIN = 1.03
"""Factor on the dwell time when runs are priced, because the plan's times differ from those assumed."""
_NEVER = 1e3
"""Cost of a clock that would make an instruction slower, in the largest of the rank's costs."""
_NEAR = 0.97
"""Paths shorter than this fraction of the deadline are ignored at first."""
_MOST_RUNS, _MOST_SEARCHED = 64, 256
"""Maximum number of runs for which pairs are exchanged, and for which clocks are searched at all."""
_SEARCHED = 8
"""Number of deadlines at which plans are searched from the beginning; others also start from those plans."""
_MANY = 20_000
"""With fewer instructions than this, the runs found for other deadlines are tried at the time of default clocks."""
_MOST_PATHS, _MORE_PATHS = 40, 16
"""Number of longest paths with which clocks are searched, and number of paths added when a plan is late."""
_LOWERINGS = 12
"""Number of times that clocks are lowered. Then they are only raised, until no path is late."""
_REPAIRS = 4
_FITS = 1 + 1e-9
"""Tolerance of deadlines and dwell times."""
_SHORT_S = -1e-12
"""A run is too short if it lasts less than its dwell time by more than this [s]."""
_SHORTER, _MOST_STEPS = 1.5, 3
"""Dwell times that are shorter by this factor are planned separately, up to this number of times."""


def searched_of(count: int) -> Indices:
    """Return the indices of the deadlines at which plans are searched from the beginning."""
    return evenly(count, _SEARCHED)


def dwell_ladder(least_dwell_s: DwellTimes) -> list[DwellTimes]:
    """Return the dwell times to plan for one after the other, in decreasing order.

    A run must last as long as its next clock needs to take effect. So either all clocks of a rank have the dwell time
    of the slowest one to take effect, or slow ones are used only for whole iterations.
    """
    if not isinstance(least_dwell_s, Mapping):
        return [least_dwell_s]
    steps_s: list[float] = []
    for dwell_s in sorted(least_dwell_s.values(), reverse=True):
        if not steps_s or (_SHORTER * dwell_s < steps_s[-1] and len(steps_s) < _MOST_STEPS):
            steps_s.append(dwell_s)
    return [_step_of_ladder(least_dwell_s, step_s) for step_s in steps_s]


def _step_of_ladder(least_dwell_s: Mapping[int, float], step_s: float) -> DwellTimes:
    """Return one dwell time for the clocks that take effect in it. Other clocks are used only for whole iterations."""
    return {clock_mhz: step_s if own_s <= step_s else np.inf for clock_mhz, own_s in least_dwell_s.items()}


def respects_dwell_time(problem: Problem, clocks: Clocks) -> bool:
    """Return whether a plan holds all its clocks for the dwell time of the problem."""
    if not problem.has_short_instructions:
        return True
    search = RunSearch(Network(problem), problem.settings.least_dwell_s or 0.0)
    return search.checked(search.of_clocks(clocks), np.inf) is not None


@dataclass(frozen=True)
class HeldPlan:
    """A plan that respects the dwell time."""

    clocks: Sequences
    time_s: float
    cost_j: float


class FreePlan(NamedTuple):
    """A plan without a dwell time, from which held plans start.

    Attributes:
        clocks: The sequences of the ranks.
        price_w: Shape (decisions,): price of a second of each decision [W].
    """

    clocks: Sequences
    price_w: Floats


class _Changes(NamedTuple):
    """When clocks may change in a plan.

    Attributes:
        times_s: For each rank, shape (instructions,): the time of a change before each instruction, which is the end of
            the previous one. That before the first one is in the previous iteration [s].
        length_s: The iteration time [s].
    """

    times_s: list[Floats]
    length_s: float


class RunSearch:
    """Finds plans in which each run lasts at least the dwell time."""

    def __init__(self, network: Network, dwell_s: DwellTimes) -> None:
        self._network = network
        self._chains = network.problem.rank_decisions  # some ranks may have no passes
        self.ranks = [ClocksOfRank(network, chain, dwell_s) for chain in self._chains if len(chain)]
        self._paths = Paths(network, self.ranks)
        for clocks in (self._one_clock(0), self._one_clock(-1)):
            self._paths.add_longest(self._durations_s(clocks))

    def plans(
        self,
        deadline_s: Floats,
        free: Sequence[FreePlan] = (),
        start: Sequence[HeldPlan] = (),
        progress: Callable[[float], None] = lambda done: None,
    ) -> list[HeldPlan | None]:
        """Return a plan for each of rising deadlines, or None for deadlines at which none was found.

        Args:
            deadline_s: Rising [s].
            free: A free plan for each deadline in ``searched_of``. May be empty.
            start: Initial plans that are valid for this dwell time, such as those for a longer one.
            progress: Called with the completed fraction, 0 to 1.
        """
        searched = searched_of(len(deadline_s))
        searched_s = deadline_s[searched]
        of_shapes = self._plans_of_shapes(searched_s, free)  # a list for each shape, with a plan for each of searched_s
        best_of_shapes = [_cheapest(plans) for plans in zip(*of_shapes, strict=True)]
        known = [*start, *(plan for plan in best_of_shapes if plan is not None)]
        default_clocks_s = self._network.problem.no_slower_s * (1 - 1e-12)
        of_default_clocks = int(np.searchsorted(deadline_s, default_clocks_s))  # the deadline of most jobs
        result: list[HeldPlan | None] = []
        for number, limit_s in enumerate(deadline_s.tolist()):
            progress(0.5 + 0.5 * number / len(deadline_s))
            best = _cheapest(plan for plan in known if plan.time_s <= limit_s * _FITS)
            nearest = int(np.abs(searched_s - limit_s).argmin())
            starts = [best_of_shapes[nearest], best]
            if number == of_default_clocks and self._network.decisions < _MANY:
                starts += itertools.chain.from_iterable(of_shapes)
            distinct = {id(plan): plan for plan in starts if plan is not None}
            tried = [self._held(plan.clocks, limit_s, exchange=number in searched) for plan in distinct.values()]
            known += [plan for plan in tried if plan is not None]
            result.append(_cheapest([best, *tried]))
        return result

    def _plans_of_shapes(self, deadline_s: Floats, free: Sequence[FreePlan]) -> list[list[HeldPlan | None]]:
        """Return, for each shape, the plan of each deadline from which the search starts."""
        times_s = deadline_s.tolist()
        one_clock = self._one_clock(-1)
        result = [[self._held(one_clock, time_s, exchange=True) for time_s in times_s]]
        if free:
            shapes = [self._shapes(plan, time_s) for plan, time_s in zip(free, times_s, strict=True)]
            for of_deadlines in zip(*shapes, strict=True):
                pairs = zip(of_deadlines, times_s, strict=True)
                result.append([self._held(clocks, time_s) for clocks, time_s in pairs])
        return result

    def _shapes(self, free: FreePlan, time_s: float) -> tuple[Sequences, Sequences]:
        """Return a free plan in runs so that no instruction is slower, and the runs of least cost at its prices."""
        changes = self._changes(self._durations_s(free.clocks))
        no_slower, priced = [], []
        for rank, clocks, times_s in zip(self.ranks, free.clocks, changes.times_s, strict=True):
            allowed_s = rank.durations_s(clocks)
            too_slow_j = _NEVER * np.abs(rank.cost_j).max()
            # Shape (instructions, clocks): the costs of the two shapes.
            no_slower_j = np.where(rank.time_s <= allowed_s[:, None], rank.cost_j, too_slow_j)
            priced_j = rank.cost_j + free.price_w[rank.decisions][:, None] * rank.time_s
            runs = best_runs(
                np.stack([no_slower_j, priced_j]),
                np.stack([times_s, times_s]),
                np.full(2, max(changes.length_s, time_s)),
                dwell_s=rank.dwell_s * _MARGIN,
                change_j=np.full((2, len(clocks), 1), least_saving_j(self._network.problem)),
                places=evenly(len(clocks), _PLACES),
            )
            no_slower.append(runs[0])
            priced.append(runs[1])
        return no_slower, priced

    def beyond_dwell_s(self, clocks: Sequences) -> list[Floats]:
        """Return, for each rank, the excess of each run over its dwell time, in the plan's own times [s]."""
        changes = self._changes(self._durations_s(clocks))
        result = []
        for rank, own, times_s in zip(self.ranks, clocks, changes.times_s, strict=True):
            first = np.flatnonzero(begins_run(own))
            begins_s = times_s[first]
            ends_s = np.append(begins_s[1:], begins_s[:1] + changes.length_s)
            result.append(ends_s - begins_s - rank.dwell_s[own[first]])
        return result

    def clocks_mhz(self, clocks: Sequences) -> Clocks:
        """Return the clocks of a plan, by rank and in program order."""
        own = iter(tuple(rank.clock_mhz[one].tolist()) for rank, one in zip(self.ranks, clocks, strict=True))
        return tuple(next(own) if len(chain) else () for chain in self._chains)

    def sequences(self, clock_mhz: Indices) -> Sequences:
        """Convert the clock of every decision to sequences, rounding up to the rank's clocks."""
        return [
            np.minimum(np.searchsorted(rank.clock_mhz, clock_mhz[rank.decisions]), len(rank.clock_mhz) - 1)
            for rank in self.ranks
        ]

    def of_clocks(self, clocks_mhz: Clocks) -> Sequences:
        """Convert measured clocks, by rank and in program order, to sequences."""
        of_ranks = [np.array(clocks) for clocks in clocks_mhz if clocks]
        return [np.searchsorted(rank.clock_mhz, own) for rank, own in zip(self.ranks, of_ranks, strict=True)]

    def checked(self, clocks: Sequences, time_s: float) -> HeldPlan | None:
        """Return the plan if it meets the deadline and the dwell time, otherwise None."""
        end_s = float(self._network.earliest_s(self._durations_s(clocks))[-1])
        if end_s > time_s * _FITS:
            return None
        if min(float(beyond_s.min(initial=0.0)) for beyond_s in self.beyond_dwell_s(clocks)) < _SHORT_S:
            return None
        cost_j = sum(rank.costs_j(own) for rank, own in zip(self.ranks, clocks, strict=True))
        return HeldPlan(clocks, end_s, cost_j)

    def _durations_s(self, clocks: Sequences) -> Floats:
        """Return the duration of every arc, shape (arcs,) [s]."""
        result = self._network.least_s.copy()
        for rank, own in zip(self.ranks, clocks, strict=True):
            result[rank.decisions] = rank.durations_s(own)
        return result

    def _changes(self, duration_s: Floats) -> _Changes:
        """Return when clocks may change, for durations of shape (arcs,) [s]."""
        event_s = self._network.earliest_s(duration_s)
        length_s = float(event_s[-1])
        end_s = event_s[self._network.tail] + duration_s  # shape (arcs,)
        times_s = []
        for rank in self.ranks:
            own_s = end_s[rank.decisions]
            in_previous_iteration_s = own_s[-1:] - length_s
            times_s.append(np.concatenate([in_previous_iteration_s, own_s[:-1]]))
        return _Changes(times_s, length_s)

    def _one_clock(self, clock: int) -> Sequences:
        """Return sequences of one clock, given its index from the lowest or, if negative, the highest one."""
        return [np.full(len(rank.decisions), clock % len(rank.clock_mhz), dtype=np.intp) for rank in self.ranks]

    def _held(self, clocks: Sequences, time_s: float, *, exchange: bool = False) -> HeldPlan | None:
        """Search clocks for a plan's runs and return the best plan that respects the dwell time, or None.

        The given plan is one of those compared, if it meets the deadline and dwell time.
        """
        given = self.checked(clocks, time_s)
        for _ in range(_REPAIRS):
            runs = sum(max(1, int(begins_run(own).sum())) for own in clocks)
            if runs <= _MOST_SEARCHED:
                found = self._with_best_clocks(clocks, time_s, exchange)
                if found is None:
                    return given
                clocks = found
            extended = self._with_longer_runs(clocks)
            if extended is None:
                break
            clocks = extended
        return _cheapest([given, self.checked(clocks, time_s)])

    def _with_best_clocks(self, clocks: Sequences, time_s: float, exchange: bool) -> Sequences | None:
        """Return the same runs at other clocks that meet the deadline, or None if none were found.

        The search begins with the longest known paths. If the plan is then late, it continues with the late paths.
        """
        search = RunClockSearch(self.ranks, self._paths, clocks)
        limit_s = time_s * _FITS
        exchange = exchange and search.count <= _MOST_RUNS
        paths = self._longest_paths(search, self._durations_s(clocks), _NEAR * time_s, _MOST_PATHS)
        for attempt in itertools.count():
            search.add_paths(paths)
            if not search.raise_clocks(limit_s):
                return None
            # Paths are many. While most are unknown, repeated lowering would lead from one late path to the next.
            if attempt < _LOWERINGS:
                search.lower_clocks(limit_s)
                if exchange:
                    search.exchange_clocks(limit_s)
            clocks = search.sequences()
            duration_s = self._durations_s(clocks)
            paths = self._longest_paths(search, duration_s, limit_s, _MORE_PATHS)
            if not len(paths):
                if float(self._network.earliest_s(duration_s)[-1]) <= limit_s:
                    break
                if not self._paths.add_longest(duration_s):
                    return None
                paths = np.array([len(self._paths) - 1])
        return clocks

    def _longest_paths(self, search: RunClockSearch, duration_s: Floats, beyond_s: float, most: int) -> Indices:
        """Return the longest known paths above a length that a search does not consider yet."""
        length_s = self._paths.lengths_s(duration_s)
        length_s[search.paths] = 0.0
        longest = np.argsort(-length_s)[:most]
        return longest[length_s[longest] > beyond_s]

    def _with_longer_runs(self, clocks: Sequences) -> Sequences | None:
        """Extend runs until none is too short, as far as possible, or return None if none was."""
        clocks = [own.copy() for own in clocks]
        was_extended = False
        for _ in range(sum(len(own) for own in clocks)):
            is_short = False
            for own, beyond_s in zip(clocks, self.beyond_dwell_s(clocks), strict=True):
                if len(beyond_s) and float(beyond_s.min()) < _SHORT_S:
                    _extend(own, int(beyond_s.argmin()))
                    is_short = True
            if not is_short:
                break
            was_extended = True
        return clocks if was_extended else None


def _extend(clocks: Indices, run: int) -> None:
    """Extend a run by an instruction of its slower neighbour, or raise it to that clock if both are faster."""
    first = np.flatnonzero(begins_run(clocks))
    count = len(clocks)
    begin, end = int(first[run]), int(first[(run + 1) % len(first)])
    own, before, after = int(clocks[begin]), int(clocks[begin - 1]), int(clocks[end])
    slower = min(before, after)
    if slower > own:
        length = (end - begin) % count
        clocks[(begin + np.arange(length)) % count] = slower
    elif slower == after:
        clocks[end] = own
    else:
        clocks[begin - 1] = own


def _cheapest(plans: Iterable[HeldPlan | None]) -> HeldPlan | None:
    return min((plan for plan in plans if plan is not None), key=attrgetter("cost_j"), default=None)
