"""Computes the frontier from the relaxed problem: proven bounds, and plans close to them.

1. The relaxed problem is solved at ``T_min``, at ``T*``, and where the curve of lower bounds is least known.
2. Deadlines are spread evenly along that curve.
3. *Free* plans, without a dwell time, are searched from the relaxed optima, which are interpolated between the solved
   deadlines. Each one starts from several optima and from mixtures of two plans, and the best result counts.
4. If the dwell time is longer than an instruction, *held* plans, in which each run lasts the dwell time, are searched
   from the free ones.

Simple settings, such as one clock for all GPUs, are among the plans if they hold their clocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.optimizer.alternatives import simple_plans
from perseus_ds.optimizer.bounds import Bounds, Tangent
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Clocks, Floats, Indices, OptionTable, Problem, Progress
from perseus_ds.optimizer.relaxation import Relaxation, Relaxed
from perseus_ds.optimizer.run_choice import choose_clocks
from perseus_ds.optimizer.runs import FreePlan, HeldPlan, RunSearch, dwell_ladder, searched_of
from perseus_ds.optimizer.search import (
    Descent,
    durations_at,
    evenly,
    options_at,
    round_late,
    splice,
)

_deadline_s = attrgetter("deadline_s")
_NEAR = 1e-7
"""Relative increase of ``T_min`` for the relaxed problem, which has no interior at ``T_min`` itself."""
_FLAT = 2e-6
"""Two tangents this close to the curve, relative to its height, need no third one between them."""
_SAME = 1e-9
"""Two times with a relative difference below this are treated as equal."""
_FIRST_SWEEPS, _LATER_SWEEPS = 2, 3
_TURNS = (2, 3, 4, 5)
"""Periods, in micro-batches, of the alternating relaxed optima from which plans are also searched."""
_LONG = 20_000
"""In iterations of at least this many instructions, plans are searched at the solved deadlines only."""
_LONG_PLANS = 12
"""Number of deadlines in such iterations if clocks have a dwell time."""


@dataclass(frozen=True)
class _Optima:
    """The relaxed optima of several deadlines.

    Attributes:
        time_s: Shape (optima,): their deadlines, rising [s].
        event_s: Shape (events, optima): event times [s].
        price_w: Shape (decisions, optima): price of a second of each decision [W].
    """

    time_s: Floats
    event_s: Floats
    price_w: Floats


def solve_exact(problem: Problem, progress: Progress) -> tuple[list[FrequencyPlan], Bounds]:
    """Return about ``settings.plans`` plans from ``T_min`` to ``T*``, and their bounds."""
    network = Network(problem)
    bounds = Bounds(network)
    relaxed = _relaxed(network, bounds, progress)
    deadline_s = _deadlines(problem, relaxed, bounds)
    simple = simple_plans(problem)
    event_s = _free_plans(network, relaxed, deadline_s, progress)
    options = choose_clocks(network, event_s)
    if problem.has_short_instructions:
        free_s = event_s[-1]
        price_w = _interpolated(relaxed.price_w, relaxed.time_s, free_s)
        free = _FreePlans(free_s, problem.table.clock_mhz[options], price_w)
        return _held_plans(network, free, deadline_s, simple, progress), bounds
    choices = [*options.T, problem.most_frugal]
    return [*map(problem.plan, choices), *map(problem.evaluate, simple)], bounds


def lower_bounds(problem: Problem) -> Bounds:
    """Return only the bounds of :func:`solve_exact`."""
    network = Network(problem)
    bounds = Bounds(network)
    _relaxed(network, bounds, progress=lambda what, done: None)
    return bounds


def _deadlines(problem: Problem, relaxed: _Optima, bounds: Bounds) -> Floats:
    """Return the deadlines of the plans, rising [s]. The time of default clocks is one of them."""
    if len(relaxed.time_s) == 1:
        # In a flat profile, the least energy costs no time.
        deadline_s = np.unique([relaxed.time_s[0], problem.time_s(problem.most_frugal)])
    else:
        deadline_s = spread(relaxed.time_s, bounds.energies_j, problem.settings.plans)
    if deadline_s[0] < problem.no_slower_s < deadline_s[-1]:
        deadline_s = np.unique(np.append(deadline_s, problem.no_slower_s))
    return deadline_s


def _free_plans(network: Network, relaxed: _Optima, deadline_s: Floats, progress: Progress) -> Floats:
    """Return event times of plans without a dwell time, shape (events, plans) [s]."""
    if _is_long(network.problem):
        found_s = _round(network, [relaxed.event_s], relaxed.time_s, progress)
        # With many micro-batches, a change from one plan to another within the iteration costs almost nothing.
        other_s = np.setdiff1d(deadline_s, relaxed.time_s)
        _, mixed_s = _mixtures(network, found_s, relaxed.time_s, other_s, slow_first=True)
        return np.concatenate([found_s, mixed_s], axis=1)
    if network.problem.has_short_instructions:
        # Held plans start from free ones at some of the deadlines only. Their runs of instructions at one clock do not
        # alternate, so alternating optima do not help.
        deadline_s = deadline_s[searched_of(len(deadline_s))]
        optima_s = [relaxed.event_s]
    else:
        optima_s = [relaxed.event_s, *(_alternating_s(network, relaxed.time_s, turns) for turns in _TURNS)]
    targets_s = [_interpolated(optimum_s, relaxed.time_s, deadline_s) for optimum_s in optima_s]
    return _round(network, targets_s, deadline_s, progress)


@dataclass(frozen=True)
class _FreePlans:
    """Plans without a dwell time.

    Attributes:
        time_s: Shape (plans,): their deadlines [s].
        clock_mhz: Shape (decisions, plans): their clocks [MHz].
        price_w: Shape (decisions, plans): price of a second of each decision in the relaxed problem [W].
    """

    time_s: Floats
    clock_mhz: Indices
    price_w: Floats


def _held_plans(
    network: Network, free: _FreePlans, deadline_s: Floats, simple: Sequence[Clocks], progress: Progress
) -> list[FrequencyPlan]:
    """Return plans that respect the dwell time at rising deadlines, given plans without one.

    Of the free plans and the ``simple`` ones, those that respect the dwell time are among those returned. Plans for
    longer dwell times are where the search for shorter ones starts.
    """
    problem = network.problem
    by_time = np.argsort(free.time_s, kind="stable")
    if _is_long(problem):
        by_time = by_time[evenly(len(by_time), _LONG_PLANS)]
        deadline_s = free.time_s[by_time]
        by_time = by_time[searched_of(len(by_time))]
    searched = list(zip(free.clock_mhz.T[by_time], free.price_w.T[by_time], strict=True))
    # Plans that may respect a dwell time as they are, and those of them that do.
    given = [*simple, *map(problem.clocks_of_ranks, free.clock_mhz.T), problem.plan(problem.most_frugal).clocks_mhz]
    kept: list[Clocks] = []
    found: list[HeldPlan] = []
    ladder = dwell_ladder(problem.settings.least_dwell_s or 0.0)
    for number, dwell_s in enumerate(ladder):

        def report(done: float, before: int = number) -> None:
            progress("clocks", (before + done) / len(ladder))

        search = RunSearch(network, dwell_s)
        free_plans = [FreePlan(search.sequences(clock_mhz), price_w) for clock_mhz, price_w in searched]
        start = list(found)  # those for a longer dwell time
        for clocks in given:
            plan = search.checked(search.of_clocks(clocks), np.inf)
            if plan is not None:
                kept.append(clocks)
                start.append(plan)
        plans = search.plans(deadline_s, free_plans, start, report)
        found = [plan for plan in plans if plan is not None]
    clocks_mhz = [*(search.clocks_mhz(plan.clocks) for plan in found), *kept]
    return [problem.evaluate(clocks) for clocks in clocks_mhz] or [problem.baseline]


def _relaxed(network: Network, bounds: Bounds, progress: Progress) -> _Optima:
    """Solve the relaxed problem at ``T_min``, at ``T*`` and where the bound bends."""
    problem, relaxation = network.problem, Relaxation(network)
    count = max(2, min(problem.settings.plans, 4 + problem.settings.plans // 4))
    solved: list[Relaxed] = []

    def record(relaxed: Relaxed) -> Tangent:
        insort(solved, relaxed, key=_deadline_s)
        progress("bounds", len(solved) / (count + 1))
        return bounds.add(relaxed)

    def at(time_s: float) -> Tangent:
        if not _is_long(problem):
            return record(relaxation.solve(time_s))
        after = bisect(solved, time_s, key=_deadline_s)
        return record(relaxation.solve_between(time_s, solved[after - 1], solved[after]))

    fastest_s = problem.t_min_s * (1 + _NEAR)
    slowest_s = problem.time_s(problem.most_frugal)
    left = record(relaxation.solve(fastest_s))
    waiting_w = problem.waiting_power_w
    star = relaxation.solve(slowest_s, waiting_w=waiting_w) if waiting_w > 0 else None
    if star is None or star.deadline_s > slowest_s:
        star = relaxation.solve(max(slowest_s, fastest_s * (1 + _NEAR)))
    if star.deadline_s > fastest_s * (1 + 10 * _NEAR):
        refine(left, record(star), at, count)
    return _Optima(
        time_s=np.array([problem.t_min_s, *(relaxed.deadline_s for relaxed in solved[1:])]),
        event_s=np.stack([relaxed.event_s for relaxed in solved], axis=1),
        price_w=np.stack([relaxed.flow_w[: network.decisions] for relaxed in solved], axis=1),
    )


def refine(left: Tangent, right: Tangent, at: Callable[[float], Tangent], count: int) -> None:
    """Request tangents of a falling curve at the times at which it is least known.

    The curve is convex except near its left end. At most ``count`` tangents are known in the end.
    """
    known = 2
    parts = [_PartOfCurve.between(left, right)]
    while parts and known < count:
        part = heapq.heappop(parts)
        left, right = part.left, part.right
        if -part.minus_unknown_j <= _FLAT * right.energy_j:
            break
        if right.time_s - left.time_s <= _SAME * right.time_s:
            continue
        middle = at((left.time_s + right.time_s) / 2)
        known += 1
        heapq.heappush(parts, _PartOfCurve.between(left, middle))
        heapq.heappush(parts, _PartOfCurve.between(middle, right))


class _PartOfCurve(NamedTuple):
    """The part of a curve between two points. In a heap, the part that is least known is the first one.

    Attributes:
        minus_unknown_j: The largest distance between the chord of the points and their tangents, negated [J].
        from_s: Time of the first point. The earlier one of two equally unknown parts is the first one [s].
    """

    minus_unknown_j: float
    from_s: float
    left: Tangent
    right: Tangent

    @classmethod
    def between(cls, left: Tangent, right: Tangent) -> _PartOfCurve:
        span_s = right.time_s - left.time_s
        chord_w = (left.energy_j - right.energy_j) / span_s
        steeper_w = left.slope_w - chord_w
        flatter_w = max(chord_w - right.slope_w, 0.0)
        unknown_w = flatter_w / 2
        # Otherwise, just after T_min, more clocks become usable, and the curve falls faster than its tangent.
        if steeper_w > 0:
            unknown_w = steeper_w * flatter_w / (steeper_w + flatter_w)
        return cls(-span_s * unknown_w, left.time_s, left, right)


def spread(time_s: Floats, energy_j: Floats, count: int) -> Floats:
    """Return deadlines that include the given ones and divide the curve evenly along its length.

    The length is measured in units of the whole curve's time and energy.
    """
    length = np.hypot(np.diff(time_s) / np.ptp(time_s), np.diff(energy_j) / max(np.ptp(energy_j), 1e-300))
    parts = np.ones(len(length), dtype=np.intp)
    for _ in range(count - len(time_s)):
        parts[np.argmax(length / parts)] += 1
    divided_s = []
    for begin_s, end_s, count_of_part in zip(time_s[:-1], time_s[1:], parts, strict=True):
        divided_s.append(np.linspace(begin_s, end_s, count_of_part, endpoint=False))
    return np.append(np.concatenate(divided_s), time_s[-1])


def _is_long(problem: Problem) -> bool:
    return len(problem.node) >= _LONG


def _interpolated(values: Floats, known_s: Floats, wanted_s: Floats) -> Floats:
    """Interpolate columns of values linearly."""
    if len(known_s) == 1:
        return np.repeat(values, len(wanted_s), axis=1)
    right = np.clip(np.searchsorted(known_s, wanted_s), 1, len(known_s) - 1)
    share = (wanted_s - known_s[right - 1]) / (known_s[right] - known_s[right - 1])
    return values[:, right - 1] * (1 - share) + values[:, right] * share


def _alternating_s(network: Network, deadline_s: Floats, turns: int) -> Floats:
    """Return event times of relaxed optima that alternate, shape (events, deadlines) [s]."""
    relaxation, earliest_s = Relaxation(network, turns=turns), network.problem.t_min_s * (1 + _NEAR)
    return np.stack([relaxation.solve(max(time_s, earliest_s)).event_s for time_s in deadline_s.tolist()], axis=1)


def _round(network: Network, targets_s: Sequence[Floats], deadline_s: Floats, progress: Progress) -> Floats:
    """Return event times of good plans at measured clocks, given those of several relaxed optima for each plan.

    All have shape (events, plans).
    """
    descent = Descent(network)
    hull = OptionTable(network.problem.groups, hull_only=True)
    starts = [(network.problem.table, targets_s[0]), *((hull, target_s) for target_s in targets_s)]
    rounded_s = []
    for number, (table, target_s) in enumerate(starts):
        progress("clocks", number / (2 * len(starts)))
        rounded_s.append(descent.run(round_late(network, table, target_s, deadline_s), _FIRST_SWEEPS))
    best_s = reduce(partial(_better, descent), reversed(rounded_s))
    for number, slow_first in enumerate((True, False)):
        progress("clocks", 0.5 + number / 4)
        mixed, start_s = _mixtures(network, best_s, deadline_s, deadline_s, slow_first=slow_first)
        best_s[:, mixed] = _better(descent, descent.run(start_s, _LATER_SWEEPS), best_s[:, mixed])
    progress("clocks", 1.0)
    return best_s


def _mixtures(
    network: Network, event_s: Floats, time_s: Floats, deadline_s: Floats, *, slow_first: bool
) -> tuple[Indices, Floats]:
    """Return the deadlines between plans on the lower hull, and mixtures of these plans."""
    options = options_at(network, event_s)
    cost_j = network.problem.table.cost_j[options].sum(axis=0) + network.problem.waiting_power_w * time_s
    on_hull = np.array(lower_hull(time_s, cost_j))
    right = np.clip(np.searchsorted(time_s[on_hull], deadline_s), 0, len(on_hull) - 1)
    left = np.where(time_s[on_hull[right]] <= deadline_s, right, right - 1)
    mixed = np.flatnonzero(left != right)
    durations_s = durations_at(network, options)
    slow_s, fast_s = durations_s[:, on_hull[right[mixed]]], durations_s[:, on_hull[left[mixed]]]
    return mixed, splice(network, slow_s, fast_s, deadline_s[mixed], slow_first=slow_first)


def _better(descent: Descent, new_s: Floats, old_s: Floats) -> Floats:
    """Return, for each pair of plans, the one of less energy."""
    return np.where(descent.cost_j(new_s) < descent.cost_j(old_s), new_s, old_s)
