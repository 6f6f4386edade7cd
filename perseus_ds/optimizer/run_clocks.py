"""Searches the best clocks for given runs.

Words:

- a *sequence* has the clock of each instruction of a rank in program order, as an index into the rank's clocks;
- a *run* consists of consecutive instructions of a rank at one clock. The last run of an iteration continues as the
  first one of the next if their clocks are equal;
- a *path* leads from the start of the network to its end. A plan meets a deadline if no path is longer than that.

There are too many paths to consider all, so the search knows some long ones, and gets more if a plan is found to be
late. All runs have clocks at any time, which change in three ways: they are *raised* while a known path is too long,
*lowered* one by one in the order of energy saved per additional time, and *exchanged* in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices
from perseus_ds.planning import DwellTimes

Sequences = list[Indices]
"""A sequence for each rank, each of shape (instructions,)."""

_NEVER = 1e3
"""Time and energy at a clock that was not measured, in those of all instructions together."""
_NEAR = 0.97
"""Paths shorter than this fraction of the deadline are ignored in exchanges."""
_EXCHANGES, _MOST_PAIRS = 8, 2000
"""Maximum number of exchanges, and of pairs of changes tried for each, in the order of energy saved."""
_STEPS = np.array([-2, -1, 1, 2])
"""Steps from a run's clock to those tried in exchanges."""


def begins_run(clocks: Indices) -> npt.NDArray[np.bool_]:
    """Return a mask of clocks that differ from the previous one, cyclically along the last axis."""
    result = np.empty(clocks.shape, dtype=np.bool_)
    np.not_equal(clocks[..., 1:], clocks[..., :-1], out=result[..., 1:])
    np.not_equal(clocks[..., :1], clocks[..., -1:], out=result[..., :1])
    return result


class ClocksOfRank:
    """A rank's instructions at each of its clocks.

    Attributes:
        decisions: Shape (instructions,): the rank's decisions in program order.
        group: Shape (instructions,): the group of each.
        clock_mhz: Shape (clocks,): clocks at which any of the instructions was measured, rising [MHz].
        time_s, cost_j: Shape (instructions, clocks): time [s] and effective energy [J].
        dwell_s: Shape (clocks,): dwell time at each clock [s].
    """

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
        of_clock_s = dwell_s if isinstance(dwell_s, Mapping) else dict.fromkeys(self.clock_mhz.tolist(), dwell_s)
        longest_s = max(of_clock_s.values())
        self.dwell_s = np.array([of_clock_s.get(clock, longest_s) for clock in self.clock_mhz.tolist()])

    def durations_s(self, clocks: Indices) -> Floats:
        """Return the times of instructions for a sequence, shape (instructions,) [s]."""
        duration_s: Floats = self.time_s[np.arange(len(self.decisions)), clocks]
        return duration_s

    def costs_j(self, clocks: Indices) -> float:
        """Return the effective energy of all instructions for a sequence [J]."""
        return float(self.cost_j[np.arange(len(self.decisions)), clocks].sum())


class Paths:
    """The known paths through a network.

    Attributes:
        fixed_s: Shape (paths,): time of each path outside of decisions [s].
        on_path: For each rank, shape (paths, instructions): 1 for each instruction on the path and 0 for the others.
    """

    def __init__(self, network: Network, ranks: Sequence[ClocksOfRank]) -> None:
        self._network, self._ranks = network, ranks
        self.fixed_s = np.zeros(0)
        self.on_path = [np.zeros((0, len(rank.decisions))) for rank in ranks]
        self._known: set[tuple[int, ...]] = set()
        # The arcs into each event: those of event e are _into[_first[e]:_first[e + 1]].
        self._into = np.argsort(network.head, kind="stable")
        self._first = np.searchsorted(network.head[self._into], np.arange(network.events + 1))

    def __len__(self) -> int:
        return len(self.fixed_s)

    def lengths_s(self, duration_s: Floats) -> Floats:
        """Return the length of each path for durations of shape (arcs,), shape (paths,) [s]."""
        in_ranks_s = [on @ duration_s[rank.decisions] for rank, on in zip(self._ranks, self.on_path, strict=True)]
        lengths_s: Floats = self.fixed_s + sum(in_ranks_s)
        return lengths_s

    def add_longest(self, duration_s: Floats) -> bool:
        """Add a longest path for durations of shape (arcs,) [s], and return whether it was new."""
        arcs = self._longest(duration_s)
        if tuple(arcs) in self._known:
            return False
        self._known.add(tuple(arcs))
        path = np.array(arcs, dtype=np.intp)
        is_decision = path < self._network.decisions
        on_path = np.zeros((1, len(self._network.tail)))
        on_path[0, path] = 1.0
        self.fixed_s = np.append(self.fixed_s, self._network.least_s[path[~is_decision]].sum())
        own = zip(self.on_path, self._ranks, strict=True)
        self.on_path = [np.concatenate([known, on_path[:, rank.decisions]]) for known, rank in own]
        return True

    def _longest(self, duration_s: Floats) -> list[int]:
        """Return the arcs of a longest path, from its end."""
        network = self._network
        event_s = network.earliest_s(duration_s)
        event, arcs = network.events - 1, []
        while event:
            into = self._into[self._first[event] : self._first[event + 1]]
            ends_s = event_s[network.tail[into]] + duration_s[into]
            arc = int(into[ends_s.argmax()])
            arcs.append(arc)
            event = int(network.tail[arc])
        return arcs


@dataclass(frozen=True)
class _GroupInRuns:
    """The instructions of one group on a rank, in the order of their runs.

    Attributes:
        places: Shape (instructions,): their places in the rank's program.
        runs: The runs that contain any.
        first: For each of these runs, the index of its first instruction in ``places``.
    """

    places: Indices
    runs: Indices
    first: Indices


class _Change(NamedTuple):
    """A run and its new clock."""

    run: int
    clock: int


class RunClockSearch:
    """The search for the clocks of given runs.

    Attributes:
        count: Number of runs of all ranks.
        paths: Shape (paths,): indices of the known paths that the search considers.
    """

    def __init__(self, ranks: Sequence[ClocksOfRank], known: Paths, sequences: Sequences) -> None:
        self._ranks, self._known = ranks, known
        # For each rank, shape (instructions,): the run of each instruction.
        self._run_of: list[Indices] = []
        self.count = 0
        for clocks in sequences:
            begins = begins_run(clocks)
            runs = max(int(begins.sum()), 1)
            self._run_of.append((np.cumsum(begins) - 1) % runs + self.count)
            self.count += runs
        self._runs = np.arange(self.count)
        width = max(len(rank.clock_mhz) for rank in ranks)
        # Shape (runs, clocks): effective energy [J] and time [s] of each run, inf for clocks that its rank lacks.
        self._cost_j = np.full((self.count, width), np.inf)
        self._time_s = np.full((self.count, width), np.inf)
        # Shape (runs,): the clock of each run.
        self._now = np.empty(self.count, dtype=np.intp)
        for rank, clocks, run_of in zip(ranks, sequences, self._run_of, strict=True):
            self._now[run_of] = clocks
            self._fill(self._cost_j, run_of, rank.cost_j)
            self._fill(self._time_s, run_of, rank.time_s)
        self._groups = [_groups_in_runs(rank, run_of) for rank, run_of in zip(ranks, self._run_of, strict=True)]
        self.paths = np.zeros(0, dtype=np.intp)
        # Shape (paths, runs, clocks): time of each run's instructions on each path [s].
        self._path_s = np.zeros((0, self.count, width))
        # Shape (paths,): length of each path at the present clocks [s].
        self._length_s = np.zeros(0)

    def _fill(self, of_runs: Floats, run_of: Indices, of_instructions: Floats) -> None:
        """Set the rows of a rank's runs to the sums over their instructions."""
        clocks = of_instructions.shape[1]
        sums = np.zeros((self.count, clocks))
        np.add.at(sums, run_of, of_instructions)
        own = np.unique(run_of)
        of_runs[own, :clocks] = sums[own]

    def add_paths(self, paths: Indices) -> None:
        """Consider more of the known paths."""
        path_s = np.zeros((len(paths), *self._path_s.shape[1:]))
        for rank, of_rank, on_path in zip(self._ranks, self._groups, self._known.on_path, strict=True):
            clocks = len(rank.clock_mhz)
            for group in of_rank:
                # Shape (paths, runs): number of the group's instructions on each path in each run.
                counts = np.add.reduceat(on_path[paths][:, group.places], group.first, axis=1)
                path_s[:, group.runs, :clocks] += counts[:, :, None] * rank.time_s[group.places[0]]
        self.paths = np.append(self.paths, paths)
        self._path_s = np.concatenate([self._path_s, path_s])
        lengths_s = self._known.fixed_s[paths] + path_s[:, self._runs, self._now].sum(axis=1)
        self._length_s = np.append(self._length_s, lengths_s)

    def sequences(self) -> Sequences:
        """Return the sequences of the present clocks."""
        return [self._now[run_of] for run_of in self._run_of]

    def _set(self, run: int, clock: int) -> None:
        """Change the clock of a run."""
        self._length_s = self._length_s + self._path_s[:, run, clock] - self._path_s[:, run, self._now[run]]
        self._now[run] = clock

    def raise_clocks(self, limit_s: float) -> bool:
        """Raise clocks until every path meets the limit, and return whether this succeeded.

        Each change makes a run shorter, so that the loop ends even if a higher clock is slower for some instructions.
        """
        while (excess_s := self._length_s - limit_s).max(initial=0.0) > 0:
            is_late = excess_s > 0
            path_s = self._path_s[is_late]
            change_s = path_s - path_s[:, self._runs, self._now][:, :, None]
            # Shape (runs, clocks), as the next three: excess that each change removes, summed over late paths.
            gained_s = np.minimum(-change_s, excess_s[is_late, None, None]).sum(axis=0)
            # Energy that it costs, and whether the run becomes shorter.
            more_j = self._cost_j - self._cost_j[self._runs, self._now][:, None]
            is_faster = self._time_s < self._time_s[self._runs, self._now][:, None]
            is_usable = (gained_s > 1e-9 * limit_s) & is_faster
            if not is_usable.any():
                return False
            least_j = 1e-6 * abs(float(self._cost_j[self._runs, self._now].mean()))
            value = np.where(is_usable, gained_s / np.maximum(more_j, least_j), 0.0)
            run, clock = divmod(int(value.argmax()), value.shape[1])
            self._set(run, clock)
        return True

    def lower_clocks(self, limit_s: float) -> None:
        """Lower clocks one by one, in the order of energy saved per time added to paths."""
        width = self._cost_j.shape[1]
        while True:
            now_j = self._cost_j[self._runs, self._now]
            saves = self._cost_j < (now_j - 1e-12 * np.abs(now_j))[:, None]
            is_cheaper = saves & (np.arange(width) < self._now[:, None])
            # Shape (runs,): the next lower clock with less energy.
            below = width - 1 - is_cheaper[:, ::-1].argmax(axis=1)
            change_s = self._path_s[:, self._runs, below] - self._path_s[:, self._runs, self._now]
            fits = (change_s <= (limit_s - self._length_s)[:, None]).all(axis=0) & is_cheaper.any(axis=1)
            if not fits.any():
                return
            saved_j = now_j - self._cost_j[self._runs, below]
            added_s = np.maximum(change_s.sum(axis=0), 0.0) + 1e-9 * limit_s
            value = np.where(fits, saved_j / added_s, -np.inf)
            run = int(value.argmax())
            self._set(run, int(below[run]))

    def exchange_clocks(self, limit_s: float) -> None:
        """Change the clocks of pairs of runs by up to two steps each while this saves energy."""
        for _ in range(_EXCHANGES):
            changes = self._best_exchange(limit_s)
            if not changes:
                return
            for change in changes:
                self._set(*change)
            if self._length_s.max(initial=0.0) > limit_s:  # a path that was not near the limit
                self.raise_clocks(limit_s)

    def _best_exchange(self, limit_s: float) -> list[_Change]:
        """Return the two changes of clocks that together save most and fit into the limit, or none."""
        width = self._cost_j.shape[1]
        tried = self._now[:, None] + _STEPS  # shape (runs, steps), as the next one
        exists = (tried >= 0) & (tried < width)
        tried = np.clip(tried, 0, width - 1)
        now_j = self._cost_j[self._runs, self._now]
        tried_j = self._cost_j[self._runs[:, None], tried]
        # Shape (changes,), all steps of all runs: the run, its new clock, and the energy that the change costs.
        run, clock = np.repeat(self._runs, len(_STEPS)), tried.ravel()
        more_j = np.where(exists, tried_j - now_j[:, None], np.inf).ravel()
        # Shape (near paths, changes): time that each change adds to the paths near the limit.
        near = np.flatnonzero(self._length_s > _NEAR * limit_s)
        path_s = self._path_s[near]
        added_s = path_s[:, self._runs[:, None], tried] - path_s[:, self._runs, self._now][:, :, None]
        added_s = added_s.reshape(len(near), len(more_j))
        # Shape (pairs,): the two changes of each pair that saves energy, those that save most first.
        saves = more_j[:, None] + more_j < -1e-8 * abs(float(now_j.sum()))
        first, second = np.nonzero(saves & (run[:, None] < run))
        best_first = np.argsort(more_j[first] + more_j[second], kind="stable")[:_MOST_PAIRS]
        first, second = first[best_first], second[best_first]
        spare_s = (limit_s - self._length_s[near])[:, None]
        fits = np.flatnonzero((added_s[:, first] + added_s[:, second] <= spare_s).all(axis=0))
        if not len(fits):
            return []
        best = fits[0]
        return [_Change(int(run[change]), int(clock[change])) for change in (first[best], second[best])]


def _groups_in_runs(rank: ClocksOfRank, run_of: Indices) -> list[_GroupInRuns]:
    """Return the instructions of each of the rank's groups, in the order of their runs."""
    result = []
    for group in np.unique(rank.group):
        places = np.flatnonzero(rank.group == group)
        places = places[np.argsort(run_of[places], kind="stable")]
        runs, first = np.unique(run_of[places], return_index=True)
        result.append(_GroupInRuns(places, runs, first))
    return result
