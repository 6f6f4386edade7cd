"""Finds plans with a dwell time, the minimum duration of a run at one clock.

Clocks without a dwell time are chosen by the same dynamic program, with runs of any length.

A run is the time at one clock. It begins when the last instruction at another clock ends, includes waiting, and
continues across the end of the iteration, which repeats.

Plans are found for each deadline as follows.

1. The relaxed problem gives the price of a second of each instruction, and a plan without a dwell time gives the end of
   each instruction. With these, dynamic programming over the begins and clocks of runs yields the exact best clocks of
   a rank: the least cost of all instructions before a place is the least cost before the begin of the last run, plus
   the cost of that run.
2. The runs are kept and their clocks searched: raised if a path of the DAG is too long, lowered one by one in the order
   of energy saved per additional time, then exchanged in pairs. Paths are added when a plan is found to be late.
3. Runs that are too short in the plan's own times are extended at the expense of slower neighbours, and the clocks are
   searched again.

The same is done with one clock per rank, and with the runs into which the plan without a dwell time is cut if none of
its instructions may become slower. A deadline receives the best of all these plans, of the plans for shorter deadlines,
and of the given initial plans. For the time of default clocks, at which most jobs run, the runs found for all other
deadlines are tried too. So a plan is never worse than the best of those shapes or than a given plan for a longer dwell
time. It is not necessarily the optimum, and the frontier's lower bound does not take the dwell time into account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Clocks, Floats, Indices, Problem
from perseus_ds.optimizer.search import evenly, options_at
from perseus_ds.planning import DwellTimes

Sequences = list[Indices]
"""A sequence for each rank: indices into the rank's clocks in program order."""

_PLACES = 128
"""Maximum number of a rank's instructions at which its runs may begin, evenly spaced."""
_CUTS = 8
"""Number of places in the iteration at which dynamic programming starts, as it cannot join the first and last run."""
_MARGIN = 1.03
"""Factor on the dwell time when runs are priced, because the plan's times differ from those assumed."""
_NEAR = 0.97
"""Paths shorter than this fraction of the deadline are ignored in exchanges."""
_EXCHANGES, _MOST_PAIRS = 8, 2000
"""Maximum number of exchanges of clocks, and of pairs of runs tried for each, in the order of energy saved."""
_MOST_RUNS, _MOST_SEARCHED = 64, 256
"""Maximum number of runs for which pairs are tried, and for which clocks are searched at all."""
_SEARCHED = 8
"""Number of deadlines at which plans are searched from the beginning; others also start from those plans."""
_MANY = 20_000
"""With fewer instructions than this, the runs found for other deadlines are tried at the time of default clocks."""
_MOST_PATHS, _MORE_PATHS = 40, 16
"""Number of longest paths with which clocks are searched, and number of paths added when a plan is late."""
_LOWERINGS = 12
_REPAIRS = 4
_FITS = 1 + 1e-9
_SHORTER, _MOST_STEPS = 1.5, 3
"""Dwell times that are shorter by this factor are planned separately, up to this number of times."""


_NEARLY_EQUAL, _WORTH_A_CHANGE = 3e-5, 0.02
"""Minimum saving of a clock change, as a fraction of a mean instruction's energy, without and with a dwell time.

Until a change has taken effect, instructions do not run at their planned clocks. Of three simulated jobs in which a
change delays the next pass by 2 ms, two keep their plans with this minimum, and one without it. Jobs without such a
delay save the same either way.
"""
_NOT = 1e6
"""Price of a clock that does not fit, in energies of a mean instruction, which exceeds the total possible saving."""
_NEVER = 1e3
"""Time and energy at a clock that was not measured, in those of all instructions together."""
_MOST_AT_ONCE = 4_000_000
"""Maximum number of instructions times clocks for which clocks are chosen together, to limit memory."""


def _mean_j(problem: Problem) -> float:
    return float(np.abs(problem.table.cost_j).mean())


def _least_saving_j(problem: Problem) -> float:
    """Return the minimum energy that a clock change must save [J]."""
    share = _WORTH_A_CHANGE if problem.settings.longest_dwell_s else _NEARLY_EQUAL
    return share * _mean_j(problem)


def choose_clocks(network: Network, event_s: Floats) -> Indices:
    """Choose clocks that fit between the events, at the least energy plus price of clock changes.

    With fixed events, every rank is an independent chain, with runs of any length. Events have shape (events, plans),
    and the result, the option of every decision, has shape (decisions, plans).
    """
    problem, table = network.problem, network.problem.table
    not_j = _NOT * _mean_j(problem)
    slowest = options_at(network, event_s)
    clocks, index = np.unique(table.clock_mhz, return_inverse=True)
    option_of = np.full((len(table.begin), len(clocks)), -1, dtype=np.intp)
    for group, (begin, last) in enumerate(zip(table.begin, table.last, strict=True)):
        option_of[group, index[begin : last + 1]] = np.arange(begin, last + 1)
    result = slowest.copy()
    for chain in problem.rank_decisions:
        if not len(chain):  # a rank without passes
            continue
        options = option_of[problem.group[chain]]
        cost_j = np.where(options >= 0, table.cost_j[options], not_j)
        places = np.arange(len(chain), dtype=np.intp)
        parts = 1 + options.size * event_s.shape[1] // _MOST_AT_ONCE
        for own in np.array_split(np.arange(event_s.shape[1]), parts):
            here = np.ix_(chain, own)
            too_slow = options > slowest[here].T[:, :, None]
            chosen = best_runs(
                cost_j + not_j * too_slow,
                np.tile(places.astype(float), (len(own), 1)),
                np.full(len(own), float(len(chain))),
                dwell_s=np.zeros(len(clocks)),
                change_j=np.full((len(own), len(chain), 1), _least_saving_j(problem)),
                places=places,
                most_cuts=1,
            )
            result[here] = options[places[:, None], chosen.T]
    return result


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
    return [
        {clock_mhz: step_s if own_s <= step_s else np.inf for clock_mhz, own_s in least_dwell_s.items()}
        for step_s in steps_s
    ]


def begins_run(clocks: Indices) -> npt.NDArray[np.bool_]:
    """Return a mask of clocks that differ from the previous one, cyclically along the last axis."""
    result = np.empty(clocks.shape, dtype=np.bool_)
    np.not_equal(clocks[..., 1:], clocks[..., :-1], out=result[..., 1:])
    np.not_equal(clocks[..., :1], clocks[..., -1:], out=result[..., :1])
    return result


class _Rank:
    """A rank's instructions at every clock."""

    def __init__(self, network: Network, decisions: Indices, dwell_s: DwellTimes) -> None:
        problem = network.problem
        self.decisions = decisions
        self.group = problem.group[decisions]
        measured = {group: problem.groups[group].measured for group in np.unique(self.group).tolist()}
        self.clock_mhz = np.unique(np.concatenate([options.clock_mhz for options in measured.values()]))
        self.time_s = np.full((len(decisions), len(self.clock_mhz)), np.nan)
        self.cost_j = np.full((len(decisions), len(self.clock_mhz)), np.nan)
        for group, options in measured.items():
            rows = np.ix_(self.group == group, np.searchsorted(self.clock_mhz, options.clock_mhz))
            self.time_s[rows] = options.time_s
            self.cost_j[rows] = options.effective_energy_j(problem.blocking_power_w)
        # A kind may lack rows of clocks at which others were measured. No search uses such a clock for it.
        self.time_s = np.where(np.isnan(self.time_s), _NEVER * np.nansum(self.time_s), self.time_s)
        self.cost_j = np.where(np.isnan(self.cost_j), _NEVER * np.nansum(np.abs(self.cost_j)), self.cost_j)
        table = dwell_s if isinstance(dwell_s, Mapping) else dict.fromkeys(self.clock_mhz.tolist(), dwell_s)
        longest_s = max(table.values())
        self.dwell_s = np.array([table.get(clock, longest_s) for clock in self.clock_mhz.tolist()])
        # For each known path, 1 for each instruction on it and 0 for the others.
        self.on_path = np.zeros((0, len(decisions)))

    def durations_s(self, clocks: Indices) -> Floats:
        """Return the times of instructions for a sequence of clocks [s]."""
        duration_s: Floats = self.time_s[np.arange(len(self.decisions)), clocks]
        return duration_s


@dataclass(frozen=True)
class HeldPlan:
    """A plan that respects the dwell time."""

    clocks: Sequences
    time_s: float
    cost_j: float


class RunSearch:
    """Finds plans in which each run lasts at least the dwell time."""

    def __init__(self, network: Network, dwell_s: DwellTimes) -> None:
        self._network = network
        self._change_j = _least_saving_j(network.problem)
        self._chains = network.problem.rank_decisions  # some ranks may have no passes
        self.ranks = [_Rank(network, chain, dwell_s) for chain in self._chains if len(chain)]
        self._fixed_s = np.zeros(0)
        self._known: set[tuple[int, ...]] = set()
        self._into = np.argsort(network.head, kind="stable")
        self._first = np.searchsorted(network.head[self._into], np.arange(network.events + 1))
        for clocks in (self._one_clock(0), self._one_clock(-1)):
            self._add_path(self._durations_s(clocks))

    def plans(
        self,
        deadline_s: Floats,
        free: Sequence[tuple[Sequences, Floats]] = (),
        start: Sequence[HeldPlan] = (),
        progress: Callable[[float], None] = lambda done: None,
    ) -> list[HeldPlan | None]:
        """Return a plan for each of rising deadlines, or None for deadlines at which none was found.

        Args:
            deadline_s: Rising [s].
            free: For each deadline in ``searched_of``, a plan without a dwell time and the price of a second of each
                decision [W]. May be empty.
            start: Initial plans that are valid for this dwell time, such as those for a longer one.
            progress: Called with the completed fraction, 0 to 1.
        """
        searched = searched_of(len(deadline_s))
        time_s = deadline_s[searched]
        found = self._shapes(time_s, free)
        begun = [_cheapest(plans) for plans in zip(*found, strict=True)]
        known = [*start, *(plan for plan in begun if plan is not None)]
        most_used = int(np.searchsorted(deadline_s, self._network.problem.no_slower_s * (1 - 1e-12)))
        result: list[HeldPlan | None] = []
        for number, limit_s in enumerate(deadline_s.tolist()):
            progress(0.5 + 0.5 * number / len(deadline_s))
            best = _cheapest(plan for plan in known if plan.time_s <= limit_s * _FITS)
            near = begun[int(np.abs(time_s - limit_s).argmin())]
            starts = [near, best]
            if number == most_used and self._network.decisions < _MANY:
                starts += [plan for plans in found for plan in plans]
            own = {id(plan): plan for plan in starts if plan is not None}
            tried = [self._held(plan.clocks, limit_s, exchange=number in searched) for plan in own.values()]
            known += [plan for plan in tried if plan is not None]
            result.append(_cheapest([best, *tried]))
        return result

    def _shapes(self, deadline_s: Floats, free: Sequence[tuple[Sequences, Floats]]) -> list[list[HeldPlan | None]]:
        """Return the plans from which the search starts, by shape and deadline, as described at the top."""
        times_s = deadline_s.tolist()
        result = [[self._held(self._one_clock(-1), time_s, exchange=True) for time_s in times_s]]
        if free:
            runs = [self._runs(*own, time_s) for own, time_s in zip(free, times_s, strict=True)]
            for shape in zip(*runs, strict=True):
                result += [[self._held(own, time_s) for own, time_s in zip(shape, times_s, strict=True)]]
        return result

    def beyond_dwell_s(self, clocks: Sequences) -> list[Floats]:
        """Return, for each rank, the excess of each run over its dwell time, in the plan's own times [s]."""
        begins_s, length_s = self._changes_s(self._durations_s(clocks))
        result = []
        for rank, own, times_s in zip(self.ranks, clocks, begins_s, strict=True):
            first = np.flatnonzero(begins_run(own))
            ends_s = np.append(times_s[first[1:]], times_s[first[:1]] + length_s)
            result.append(ends_s - times_s[first] - rank.dwell_s[own[first]])
        return result

    def clocks_mhz(self, clocks: Sequences) -> tuple[tuple[int, ...], ...]:
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

    # Times and paths

    def _durations_s(self, clocks: Sequences) -> Floats:
        """Return the duration of every arc, with those of decisions first [s]."""
        result = self._network.least_s.copy()
        for rank, own in zip(self.ranks, clocks, strict=True):
            result[rank.decisions] = rank.durations_s(own)
        return result

    def _changes_s(self, duration_s: Floats) -> tuple[list[Floats], float]:
        """Return the times of possible clock changes by rank, and the iteration time [s]."""
        event_s = self._network.earliest_s(duration_s)
        end_s = event_s[self._network.tail] + duration_s
        length_s = float(event_s[-1])
        ends_s = [end_s[rank.decisions] for rank in self.ranks]
        return [np.concatenate([own_s[-1:] - length_s, own_s[:-1]]) for own_s in ends_s], length_s

    def _add_path(self, duration_s: Floats) -> bool:
        """Add a longest path, and return whether it was new."""
        network, event_s = self._network, self._network.earliest_s(duration_s)
        event, path = network.events - 1, []
        while event:
            into = self._into[self._first[event] : self._first[event + 1]]
            arc = int(into[(event_s[network.tail[into]] + duration_s[into]).argmax()])
            path.append(arc)
            event = int(network.tail[arc])
        if tuple(path) in self._known:
            return False
        self._known.add(tuple(path))
        arcs = np.array(path, dtype=np.intp)
        decided = arcs < network.decisions
        on_path = np.zeros((1, len(network.tail)))
        on_path[0, arcs] = 1.0
        self._fixed_s = np.append(self._fixed_s, network.least_s[arcs[~decided]].sum())
        for rank in self.ranks:
            rank.on_path = np.concatenate([rank.on_path, on_path[:, rank.decisions]])
        return True

    def _one_clock(self, clock: int) -> Sequences:
        return [np.full(len(rank.decisions), range(len(rank.clock_mhz))[clock], dtype=np.intp) for rank in self.ranks]

    def _runs(self, clocks: Sequences, price_w: Floats, time_s: float) -> tuple[Sequences, Sequences]:
        """Return two plans in runs: one in which no instruction is slower, and the one of least price."""
        begins_s, length_s = self._changes_s(self._durations_s(clocks))
        found = []
        for rank, own, times_s in zip(self.ranks, clocks, begins_s, strict=True):
            allowed_s = rank.time_s[np.arange(len(own)), own] * _FITS
            own_w = price_w[rank.decisions]
            cut_j = np.where(rank.time_s <= allowed_s[:, None], rank.cost_j, _NEVER * np.abs(rank.cost_j).max())
            found.append(
                best_runs(
                    np.stack([cut_j, rank.cost_j + own_w[:, None] * rank.time_s]),
                    np.stack([times_s, times_s]),
                    np.full(2, max(length_s, time_s)),
                    dwell_s=rank.dwell_s * _MARGIN,
                    change_j=np.full((2, len(own), 1), self._change_j),
                    places=evenly(len(own), _PLACES),
                )
            )
        return [rank_runs[0] for rank_runs in found], [rank_runs[1] for rank_runs in found]

    # Clocks of given runs

    def _held(self, clocks: Sequences, time_s: float, *, exchange: bool = False) -> HeldPlan | None:
        """Search clocks for a plan's runs and return the best plan that respects the dwell time, or None.

        The given plan is one of those compared, if it meets the deadline and dwell time.
        """
        given = self.checked(clocks, time_s)
        for _ in range(_REPAIRS):
            runs = sum(max(1, int(begins_run(own).sum())) for own in clocks)
            found = self._polished(clocks, time_s, exchange) if runs <= _MOST_SEARCHED else clocks
            if found is None:
                return given
            clocks, is_held = self._repaired(found)
            if is_held:
                break
        return _cheapest([given, self.checked(clocks, time_s)])

    def checked(self, clocks: Sequences, time_s: float) -> HeldPlan | None:
        """Return the plan if it meets the deadline and the dwell time, otherwise None."""
        end_s = float(self._network.earliest_s(self._durations_s(clocks))[-1])
        if end_s > time_s * _FITS or min(float(s.min(initial=0.0)) for s in self.beyond_dwell_s(clocks)) < -1e-12:
            return None
        of_ranks = zip(self.ranks, clocks, strict=True)
        cost_j = sum(float(rank.cost_j[np.arange(len(own)), own].sum()) for rank, own in of_ranks)
        return HeldPlan(clocks, end_s, cost_j)

    def _repaired(self, clocks: Sequences) -> tuple[Sequences, bool]:
        """Extend runs that are too short, and return whether there were none."""
        was_held = True
        clocks = [own.copy() for own in clocks]
        for _ in range(sum(len(own) for own in clocks)):
            short = False
            for own, beyond_s in zip(clocks, self.beyond_dwell_s(clocks), strict=True):
                if len(beyond_s) and float(beyond_s.min()) < -1e-12:
                    _extend(own, int(beyond_s.argmin()))
                    short = True
            if not short:
                break
            was_held = False
        return clocks, was_held

    def _polished(self, clocks: Sequences, time_s: float, exchange: bool) -> Sequences | None:
        """Return the same runs at other clocks that meet the deadline, or None if none were found."""
        search = _ClockSearch(self.ranks, clocks)
        limit_s = time_s * _FITS
        exchange = exchange and search.count <= _MOST_RUNS
        attempt = 0
        while True:
            duration_s = self._durations_s(clocks)
            length_s = self._fixed_s + sum(rank.on_path @ duration_s[rank.decisions] for rank in self.ranks)
            length_s[search.paths] = 0.0
            longest = np.argsort(-length_s)[: _MOST_PATHS if attempt == 0 else _MORE_PATHS]
            fresh = longest[length_s[longest] > (limit_s if attempt else _NEAR * time_s)]
            if attempt and not len(fresh):
                if float(self._network.earliest_s(duration_s)[-1]) <= limit_s:
                    return clocks
                if not self._add_path(duration_s):
                    return None
                fresh = np.array([len(self._fixed_s) - 1])
            search.add_paths(fresh, self._fixed_s[fresh])
            if not search.raise_clocks(limit_s):
                return None
            # Paths are many. While most are unknown, repeated lowering would lead from one late path to the next.
            if attempt < _LOWERINGS:
                search.lower_clocks(limit_s)
                if exchange:
                    search.exchange_clocks(limit_s)
            clocks = search.sequences()
            attempt += 1


class _ClockSearch:
    """The search for the clocks of given runs, using the known paths."""

    def __init__(self, ranks: Sequence[_Rank], clocks: Sequences) -> None:
        self._ranks = ranks
        begins_of = [begins_run(own) for own in clocks]
        self._labels: list[Indices] = []
        self.count = 0
        for begins in begins_of:
            runs = max(int(begins.sum()), 1)
            self._labels.append((np.cumsum(begins) - 1) % runs + self.count)
            self.count += runs
        width = max(len(rank.clock_mhz) for rank in ranks)
        self._cost_j = np.full((self.count, width), np.inf)
        self._time_s = np.full((self.count, width), np.inf)
        self._now = np.empty(self.count, dtype=np.intp)
        for rank, own, label in zip(ranks, clocks, self._labels, strict=True):
            self._now[label] = own
            own_runs = np.unique(label)
            for sums, values in ((self._cost_j, rank.cost_j), (self._time_s, rank.time_s)):
                own_sums = np.zeros((self.count, len(rank.clock_mhz)))
                np.add.at(own_sums, label, values)
                sums[own_runs, : len(rank.clock_mhz)] = own_sums[own_runs]
        self._parts = [_parts(rank, label) for rank, label in zip(ranks, self._labels, strict=True)]
        self._runs = np.arange(self.count)
        self.paths = np.zeros(0, dtype=np.intp)
        self._path_s = np.zeros((0, self.count, width))
        self._length_s = np.zeros(0)

    def add_paths(self, paths: Indices, fixed_s: Floats) -> None:
        """Add paths, with the time of each outside of decisions."""
        path_s = np.zeros((len(paths), *self._path_s.shape[1:]))
        for rank, parts in zip(self._ranks, self._parts, strict=True):
            on_path = rank.on_path[paths]
            for places, runs, first in parts:
                counts = np.add.reduceat(on_path[:, places], first, axis=1)
                path_s[:, runs, : len(rank.clock_mhz)] += counts[:, :, None] * rank.time_s[places[0]]
        self.paths = np.append(self.paths, paths)
        self._path_s = np.concatenate([self._path_s, path_s])
        self._length_s = np.append(self._length_s, fixed_s + path_s[:, self._runs, self._now].sum(axis=1))

    def sequences(self) -> Sequences:
        return [self._now[label] for label in self._labels]

    def _set(self, run: int, clock: int) -> None:
        self._length_s = self._length_s + self._path_s[:, run, clock] - self._path_s[:, run, self._now[run]]
        self._now[run] = clock

    def raise_clocks(self, limit_s: float) -> bool:
        """Raise clocks until every path meets the limit, and return whether this succeeded.

        Each change makes a run shorter, so that the loop ends even if a higher clock is slower for some instructions.
        """
        while (excess_s := self._length_s - limit_s).max(initial=0.0) > 0:
            late = excess_s > 0
            path_s = self._path_s[late]
            change_s = path_s - path_s[:, self._runs, self._now][:, :, None]
            gained_s = np.minimum(-change_s, excess_s[late, None, None]).sum(axis=0)
            more_j = self._cost_j - self._cost_j[self._runs, self._now][:, None]
            is_faster = self._time_s < self._time_s[self._runs, self._now][:, None]
            usable = (gained_s > 1e-9 * limit_s) & is_faster
            if not usable.any():
                return False
            least_j = 1e-6 * abs(float(self._cost_j[self._runs, self._now].mean()))
            value = np.where(usable, gained_s / np.maximum(more_j, least_j), 0.0)
            self._set(*divmod(int(value.argmax()), value.shape[1]))
        return True

    def lower_clocks(self, limit_s: float) -> None:
        """Lower clocks one by one, in the order of energy saved per time added to paths."""
        while True:
            now_j = self._cost_j[self._runs, self._now]
            less_j = now_j - 1e-12 * np.abs(now_j)
            cheaper = (self._cost_j < less_j[:, None]) & (np.arange(self._cost_j.shape[1]) < self._now[:, None])
            # The next lower clock with less energy.
            below = self._cost_j.shape[1] - 1 - cheaper[:, ::-1].argmax(axis=1)
            change_s = self._path_s[:, self._runs, below] - self._path_s[:, self._runs, self._now]
            fits = cheaper.any(axis=1) & (change_s <= (limit_s - self._length_s)[:, None]).all(axis=0)
            if not fits.any():
                return
            saved_j = now_j - self._cost_j[self._runs, below]
            value = np.where(fits, saved_j / (np.maximum(change_s.sum(axis=0), 0.0) + 1e-9 * limit_s), -np.inf)
            run = int(value.argmax())
            self._set(run, int(below[run]))

    def exchange_clocks(self, limit_s: float) -> None:
        """Change the clocks of pairs of runs by up to two steps each while this saves energy."""
        width = self._cost_j.shape[1]
        steps = np.array([-2, -1, 1, 2])
        for _ in range(_EXCHANGES):
            tried = self._now[:, None] + steps
            exists = (tried >= 0) & (tried < width)
            tried = np.clip(tried, 0, width - 1)
            now_j = self._cost_j[self._runs, self._now]
            more_j = np.where(exists, self._cost_j[self._runs[:, None], tried] - now_j[:, None], np.inf).ravel()
            near = np.flatnonzero(self._length_s > _NEAR * limit_s)
            path_s = self._path_s[near]
            change_s = path_s[:, self._runs[:, None], tried] - path_s[:, self._runs, self._now][:, :, None]
            change_s = change_s.reshape(len(near), len(more_j))
            run = np.repeat(self._runs, len(steps))
            first, second = np.nonzero(
                (more_j[:, None] + more_j < -1e-8 * abs(float(now_j.sum()))) & (run[:, None] < run)
            )
            order = np.argsort(more_j[first] + more_j[second], kind="stable")[:_MOST_PAIRS]
            first, second = first[order], second[order]
            spare_s = (limit_s - self._length_s[near])[:, None]
            fits = np.flatnonzero((change_s[:, first] + change_s[:, second] <= spare_s).all(axis=0))
            if not len(fits):
                return
            for move in (first[fits[0]], second[fits[0]]):
                self._set(int(run[move]), int(tried.ravel()[move]))
            if self._length_s.max(initial=0.0) > limit_s:  # a path that was not near the limit
                self.raise_clocks(limit_s)


def _parts(rank: _Rank, label: Indices) -> list[tuple[Indices, Indices, Indices]]:
    """Return, for each group, its instructions by run, the runs, and the begin of each."""
    result = []
    for group in np.unique(rank.group):
        places = np.flatnonzero(rank.group == group)
        places = places[np.argsort(label[places], kind="stable")]
        result.append((places, *np.unique(label[places], return_index=True)))
    return result


def best_runs(
    priced_j: Floats,
    begins_s: Floats,
    length_s: Floats,
    *,
    dwell_s: Floats,
    change_j: Floats,
    places: Indices,
    most_cuts: int = _CUTS,
) -> Indices:
    """Return the sequences of least cost in which runs respect the dwell time, for several prices.

    Dynamic programming starts at several places of the cycle. The result is exact among the sequences of
    one clock and those with a run that begins at one of these places or lasts long enough on both sides of it.

    Args:
        priced_j: Shape (prices, instructions, clocks): cost of each instruction [J].
        begins_s: Shape (prices, instructions): time of a clock change before each instruction, rising [s].
        length_s: Shape (prices,): time after which instructions repeat [s].
        dwell_s: Shape (clocks,): dwell time at each clock [s].
        change_j: Shape (prices, instructions, clocks or 1): cost of a change to a clock before each instruction [J].
        places: Rising: instructions at which runs may begin.
        most_cuts: Maximum number of places at which dynamic programming starts.

    Returns:
        Indices of clocks, shape (prices, instructions).
    """
    prices, count, _ = priced_j.shape
    # Instructions between two places are one block; the last block continues across the end.
    turned = (np.arange(count) + places[0]) % count
    blocks_j = np.add.reduceat(priced_j[:, turned], places - places[0], axis=1)
    block_of = np.empty(count, dtype=np.intp)
    block_of[turned] = np.searchsorted(places - places[0], np.arange(count), side="right") - 1
    cuts = evenly(len(places), most_cuts)
    orders = (np.arange(len(places)) + cuts[:, None]) % len(places)
    at_s = begins_s[:, places][:, orders] + np.where(orders < cuts[:, None], length_s[:, None, None], 0.0)
    at_s = (at_s - at_s[:, :, :1]).reshape(prices * len(cuts), -1)
    costs_j = blocks_j[:, orders].reshape(prices * len(cuts), len(places), -1)
    changes_j = change_j[:, places][:, orders].reshape(prices * len(cuts), len(places), -1)
    clocks = _best_runs_from(costs_j, at_s, np.repeat(length_s, len(cuts)), dwell_s, changes_j)
    chosen = np.empty((prices, len(cuts) + 1, len(places)), dtype=np.intp)
    np.put_along_axis(chosen[:, 1:], orders[None], clocks.reshape(prices, len(cuts), -1), axis=2)
    chosen[:, 0] = blocks_j.sum(axis=1).argmin(axis=1)[:, None]
    total_j = np.take_along_axis(blocks_j[:, None], chosen[..., None], axis=3)[..., 0].sum(axis=2)
    # The first and last run of a sequence may have the same clock.
    changed_j = np.broadcast_to(change_j[:, places], blocks_j.shape)[:, None]
    changed_j = np.take_along_axis(changed_j, chosen[..., None], axis=3)[..., 0]
    total_j += (changed_j * begins_run(chosen)).sum(axis=2)
    whole: Indices = chosen[np.arange(prices), total_j.argmin(axis=1)][:, block_of]
    return whole


def _best_runs_from(cost_j: Floats, at_s: Floats, length_s: Floats, dwell_s: Floats, change_j: Floats) -> Indices:
    """Return the best clocks of sequences of blocks that begin with a run, see ``best_runs``."""
    rows, blocks, clocks = cost_j.shape
    row, clock = np.arange(rows), np.arange(clocks)
    sums_j = np.zeros((rows, blocks + 1, clocks))
    np.cumsum(cost_j, axis=1, out=sums_j[:, 1:])
    ends_s = np.concatenate([at_s, length_s[:, None]], axis=1)
    # For each end and clock of a run, the last place at which the run may begin.
    latest = np.empty((rows, blocks + 1, clocks), dtype=np.intp)
    each_s, which = np.unique(dwell_s, return_inverse=True)
    for number in range(rows):
        own_s = ends_s[number]
        latest[number] = (np.searchsorted(own_s, own_s[:, None] - each_s * _FITS, side="right") - 1)[:, which]
    latest = np.minimum(latest, np.arange(blocks + 1)[:, None] - 1)
    latest[:, blocks] = np.maximum(latest[:, blocks], 0)  # one clock throughout is always possible
    # By place and clock: the least cost before a run of that clock that begins there or earlier, minus the clock's sum.
    before_j = np.zeros((rows, blocks, clocks))
    before_j[:, 0] = change_j[:, 0]
    begin = np.zeros((rows, blocks, clocks), dtype=np.intp)
    end_clock = np.zeros((rows, blocks + 1), dtype=np.intp)
    end_begin = np.zeros((rows, blocks + 1), dtype=np.intp)
    for end in range(1, blocks + 1):
        last = latest[:, end]
        through_j = np.where(last >= 0, before_j[row[:, None], last, clock], np.inf) + sums_j[:, end]
        best = through_j.argmin(axis=1)
        total_j = through_j[row, best]
        end_clock[:, end], end_begin[:, end] = best, begin[row, last[row, best], best]
        if end < blocks:
            here_j = total_j[:, None] + change_j[:, end] - sums_j[:, end]
            better = here_j < before_j[:, end - 1]
            before_j[:, end] = np.where(better, here_j, before_j[:, end - 1])
            begin[:, end] = np.where(better, end, begin[:, end - 1])
    result = np.empty((rows, blocks), dtype=np.intp)
    for number in range(rows):
        end = blocks
        while end > 0:
            first = int(end_begin[number, end])
            result[number, first:end] = end_clock[number, end]
            end = first
    return result


def _extend(clocks: Indices, run: int) -> None:
    """Extend a run that is too short, or raise it if both neighbouring clocks are faster."""
    first = np.flatnonzero(begins_run(clocks))
    count = len(clocks)
    begin, end = int(first[run]), int(first[(run + 1) % len(first)])
    own, before, after = int(clocks[begin]), int(clocks[begin - 1]), int(clocks[end])
    if min(before, after) > own:
        length = (end - begin) % count
        clocks[(begin + np.arange(length)) % count] = min(before, after)
    elif (after <= before and after < own) or before > own:
        clocks[end] = own
    else:
        clocks[begin - 1] = own


def _cheapest(plans: Iterable[HeldPlan | None]) -> HeldPlan | None:
    return min((plan for plan in plans if plan is not None), key=attrgetter("cost_j"), default=None)
