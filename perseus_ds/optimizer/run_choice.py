"""Chooses the runs of a rank by dynamic programming, at given times and prices.

Words:

- a *run* consists of consecutive instructions at one clock. It may continue across the end of the iteration, which
  repeats, and must last at least the *dwell time* of its clock;
- a *place* is an instruction at which a run may begin. The instructions from one place to the next are a *block*;
- a *cut* is a place at which dynamic programming starts. It cannot join the first and the last run, so it starts at
  several cuts, and the best result counts.

The principle: the least cost of all blocks before a place is the least cost before the begin of the last run, plus the
cost of that run. So for each place, the best clock and begin of the run that ends there are computed from those of
earlier places.
"""

from __future__ import annotations

import numpy as np

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices, Problem
from perseus_ds.optimizer.run_clocks import begins_run
from perseus_ds.optimizer.search import evenly, options_at

_CUTS = 8
"""Maximum number of cuts."""
_FITS = 1 + 1e-9
"""Tolerance of dwell times."""
_NEARLY_EQUAL, _WORTH_A_CHANGE = 3e-5, 0.02
"""Minimum saving of a clock change, as a fraction of a mean instruction's energy, without and with a dwell time.

Until a change has taken effect, instructions do not run at their planned clocks. Of three simulated jobs in which a
change delays the next pass by 2 ms, two keep their plans with this minimum, and one without it. Jobs without such a
delay save the same either way.
"""
_TOO_SLOW = 1e6
"""Cost of a clock that does not fit, in energies of a mean instruction, which exceeds the total possible saving."""
_MOST_AT_ONCE = 4_000_000
"""Maximum number of instructions times clocks for which clocks are chosen together, to limit memory."""


def least_saving_j(problem: Problem) -> float:
    """Return the minimum energy that a clock change must save [J]."""
    share = _WORTH_A_CHANGE if problem.settings.longest_dwell_s else _NEARLY_EQUAL
    return share * _mean_j(problem)


def _mean_j(problem: Problem) -> float:
    return float(np.abs(problem.table.cost_j).mean())


def choose_clocks(network: Network, event_s: Floats) -> Indices:
    """Choose clocks that fit between the events, at the least energy plus least saving of clock changes.

    With fixed events, every rank is an independent chain, with runs of any length.

    Args:
        network: The network.
        event_s: Event times, shape (events, plans) [s].

    Returns:
        The option of every decision, shape (decisions, plans).
    """
    problem, table = network.problem, network.problem.table
    too_slow_j = _TOO_SLOW * _mean_j(problem)
    slowest = options_at(network, event_s)
    clocks, clock_of = np.unique(table.clock_mhz, return_inverse=True)
    # Shape (groups, clocks): the option of each group at each clock, or -1.
    option_of = np.full((len(table.begin), len(clocks)), -1, dtype=np.intp)
    for group, (begin, last) in enumerate(zip(table.begin, table.last, strict=True)):
        option_of[group, clock_of[begin : last + 1]] = np.arange(begin, last + 1)
    result = slowest.copy()
    plans = event_s.shape[1]
    for chain in problem.rank_decisions:
        if not len(chain):  # a rank without passes
            continue
        options = option_of[problem.group[chain]]  # shape (instructions, clocks), as the next one
        cost_j = np.where(options >= 0, table.cost_j[options], too_slow_j)
        places = np.arange(len(chain), dtype=np.intp)
        parts = 1 + options.size * plans // _MOST_AT_ONCE
        for own in np.array_split(np.arange(plans), parts):
            here = np.ix_(chain, own)
            is_too_slow = options > slowest[here].T[:, :, None]  # shape (plans, instructions, clocks)
            chosen = best_runs(
                cost_j + too_slow_j * is_too_slow,
                np.tile(places.astype(float), (len(own), 1)),
                np.full(len(own), float(len(chain))),
                dwell_s=np.zeros(len(clocks)),
                change_j=np.full((len(own), len(chain), 1), least_saving_j(problem)),
                places=places,
                most_cuts=1,
            )
            result[here] = options[places[:, None], chosen.T]
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

    The result is exact among the sequences of one clock and those with a run that begins at a cut or lasts long enough
    on both sides of it.

    Args:
        priced_j: Shape (prices, instructions, clocks): cost of each instruction [J].
        begins_s: Shape (prices, instructions): time of a clock change before each instruction, rising [s].
        length_s: Shape (prices,): time after which instructions repeat [s].
        dwell_s: Shape (clocks,): dwell time at each clock [s].
        change_j: Shape (prices, instructions, clocks or 1): cost of a change to a clock before each instruction [J].
        places: Rising: instructions at which runs may begin.
        most_cuts: Maximum number of cuts.

    Returns:
        Indices of clocks, shape (prices, instructions).
    """
    prices, count, clocks = priced_j.shape
    blocks = len(places)
    # The last block continues across the end, so instructions are counted from the first place.
    from_first = (np.arange(count) + places[0]) % count
    blocks_j = np.add.reduceat(priced_j[:, from_first], places - places[0], axis=1)  # shape (prices, blocks, clocks)
    block_of = np.empty(count, dtype=np.intp)
    block_of[from_first] = np.searchsorted(places - places[0], np.arange(count), side="right") - 1
    block_change_j = change_j[:, places]

    # Shape (cuts, blocks): the blocks as they follow each cut. Rows are prices times cuts.
    cuts = evenly(blocks, most_cuts)
    sequences = (np.arange(blocks) + cuts[:, None]) % blocks
    rows = prices * len(cuts)
    is_in_next_iteration = sequences < cuts[:, None]
    at_s = begins_s[:, places][:, sequences] + np.where(is_in_next_iteration, length_s[:, None, None], 0.0)
    at_s = (at_s - at_s[:, :, :1]).reshape(rows, blocks)
    from_cuts = _best_runs_from_begin(
        blocks_j[:, sequences].reshape(rows, blocks, clocks),
        at_s,
        np.repeat(length_s, len(cuts)),
        dwell_s,
        block_change_j[:, sequences].reshape(rows, blocks, -1),
    )

    # Shape (prices, 1 + cuts, blocks): one clock throughout, and the result from each cut.
    tried = np.empty((prices, len(cuts) + 1, blocks), dtype=np.intp)
    tried[:, 0] = blocks_j.sum(axis=1).argmin(axis=1)[:, None]
    np.put_along_axis(tried[:, 1:], sequences[None], from_cuts.reshape(prices, len(cuts), blocks), axis=2)
    total_j = _of_clocks(blocks_j, tried).sum(axis=2)
    # The first and last run of a sequence may have the same clock.
    changes_j = _of_clocks(np.broadcast_to(block_change_j, blocks_j.shape), tried)
    total_j += (changes_j * begins_run(tried)).sum(axis=2)
    best: Indices = tried[np.arange(prices), total_j.argmin(axis=1)]
    return best[:, block_of]


def _of_clocks(values: Floats, tried: Indices) -> Floats:
    """Select values of shape (prices, blocks, clocks) by clocks of shape (prices, tried, blocks)."""
    selected: Floats = np.take_along_axis(values[:, None], tried[..., None], axis=3)[..., 0]
    return selected


def _best_runs_from_begin(cost_j: Floats, at_s: Floats, length_s: Floats, dwell_s: Floats, change_j: Floats) -> Indices:
    """Return the best clocks of sequences of blocks of which the first one begins a run.

    Args:
        cost_j: Shape (rows, blocks, clocks): cost of each block [J].
        at_s: Shape (rows, blocks): time of each block's begin, from 0 [s].
        length_s: Shape (rows,): time of the end of the last block [s].
        dwell_s: Shape (clocks,): dwell time at each clock [s].
        change_j: Shape (rows, blocks, clocks or 1): cost of a change to a clock at each block's begin [J].

    Returns:
        Indices of clocks, shape (rows, blocks).
    """
    rows, blocks, clocks = cost_j.shape
    row, clock = np.arange(rows), np.arange(clocks)
    # Cost of all blocks before each end at one clock, so that a run costs the difference between its end and begin.
    sums_j = np.zeros((rows, blocks + 1, clocks))
    np.cumsum(cost_j, axis=1, out=sums_j[:, 1:])
    latest = _latest_begins(at_s, length_s, dwell_s)
    # Shape (rows, blocks, clocks), by place and clock: the least cost before a run of that clock that begins there or
    # earlier, minus ``sums_j`` where it begins; and where that is.
    before_j = np.zeros((rows, blocks, clocks))
    before_j[:, 0] = change_j[:, 0]
    begin = np.zeros((rows, blocks, clocks), dtype=np.intp)
    # Shape (rows, blocks + 1), by end: clock and begin of the best run that ends there.
    best_clock = np.zeros((rows, blocks + 1), dtype=np.intp)
    best_begin = np.zeros((rows, blocks + 1), dtype=np.intp)
    for end in range(1, blocks + 1):
        last = latest[:, end]
        before_run_j = np.where(last >= 0, before_j[row[:, None], last, clock], np.inf)
        until_end_j = before_run_j + sums_j[:, end]  # shape (rows, clocks)
        best = until_end_j.argmin(axis=1)
        best_clock[:, end] = best
        best_begin[:, end] = begin[row, last[row, best], best]
        if end < blocks:
            here_j = until_end_j[row, best][:, None] + change_j[:, end] - sums_j[:, end]
            is_better = here_j < before_j[:, end - 1]
            before_j[:, end] = np.where(is_better, here_j, before_j[:, end - 1])
            begin[:, end] = np.where(is_better, end, begin[:, end - 1])
    return _runs_from_ends(best_clock, best_begin)


def _latest_begins(at_s: Floats, length_s: Floats, dwell_s: Floats) -> Indices:
    """Return the last place at which a run may begin to last its dwell time, or -1.

    The result has shape (rows, blocks + 1, clocks), for each end and clock of a run.
    """
    rows, blocks = at_s.shape
    ends_s = np.concatenate([at_s, length_s[:, None]], axis=1)
    latest = np.empty((rows, blocks + 1, len(dwell_s)), dtype=np.intp)
    distinct_s, which = np.unique(dwell_s, return_inverse=True)
    for number in range(rows):
        own_s = ends_s[number]
        of_distinct = np.searchsorted(own_s, own_s[:, None] - distinct_s * _FITS, side="right") - 1
        latest[number] = of_distinct[:, which]
    np.minimum(latest, np.arange(blocks + 1)[:, None] - 1, out=latest)
    latest[:, blocks] = np.maximum(latest[:, blocks], 0)  # one clock throughout is always possible
    return latest


def _runs_from_ends(best_clock: Indices, best_begin: Indices) -> Indices:
    """Return the clocks of the runs that follow backwards from the last end, shape (rows, blocks)."""
    rows, ends = best_clock.shape
    result = np.empty((rows, ends - 1), dtype=np.intp)
    for number in range(rows):
        end = ends - 1
        while end > 0:
            begin = int(best_begin[number, end])
            result[number, begin:end] = best_clock[number, end]
            end = begin
    return result
