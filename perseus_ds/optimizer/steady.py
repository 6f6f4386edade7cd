"""Plans whose power changes less from one second to the next, as fast, with nearly as little energy.

The largest change is where some instructions happen to begin or end at the same moment. Moving them apart costs hardly
anything: clocks of one or two of them are changed by a few steps, at random, and what makes the largest changes smaller
is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import NEARLY, FrequencyPlan
from perseus_ds.optimizer.problem import PowerSeconds, Problem

_TRIES = 100
_STEPS = (-4, -2, -1, 1, 2, 4)
_BESIDE_S = 0.3
_SECONDS_S = 2.0
# A norm of so high a degree is nearly the largest change, but gets smaller too if one of several such changes does.
_DEGREE = 40
_TOLERANCE = 1e-9


def steadied(problem: Problem, plan: FrequencyPlan) -> FrequencyPlan:
    """Return a plan that is as fast and whose power changes less, or the plan itself where none is found.

    What a change of clock delays is in its time; no clock is held for a shorter time than the least one, but where the
    plan does so already.
    """
    draw = np.random.default_rng(0)
    places = [(rank, number) for rank, stream in enumerate(problem.instructions) for number in range(len(stream))]
    best, power = plan, PowerSeconds.of(problem, plan)
    for _ in range(_TRIES):
        clocks = [list(of_rank) for of_rank in best.clocks_mhz]
        ranks = set()
        for place in draw.choice(_near(power, best.time_s), draw.integers(1, 3)):
            rank, number = places[place]
            alone = not problem.least_dwell_s or draw.random() < 0.5
            _change(problem, rank, number, clocks[rank], int(draw.choice(_STEPS)), alone=alone)
            ranks.add(rank)
        if any(_held_s(problem, rank, clocks) < _held_s(problem, rank, best.clocks_mhz) for rank in ranks):
            continue
        found = problem.evaluate(tuple(map(tuple, clocks)))
        if found.time_s > plan.time_s * (1 + _TOLERANCE) or found.energy_j > plan.energy_j * (1 + NEARLY):
            continue
        theirs = PowerSeconds.of(problem, found)
        if _size_w(theirs) < _size_w(power):
            best, power = found, theirs
    return best


def _size_w(power: PowerSeconds) -> float:
    return float((power.changes_w**_DEGREE).sum() ** (1 / _DEGREE))


def _near(power: PowerSeconds, time_s: float) -> npt.NDArray[np.intp]:
    """Return the instructions that begin or end in the two seconds between which power changes most."""
    first_s = power.first_s[power.changes_w.argmax()] - _BESIDE_S
    last_s = first_s + _SECONDS_S + 2 * _BESIDE_S
    near = np.zeros(len(power.begin_s), dtype=bool)
    for edge_s in (power.begin_s, power.end_s):
        for iteration_s in (-2 * time_s, -time_s, 0.0, time_s):  # a second may begin before the iteration
            near |= (first_s <= edge_s + iteration_s) & (edge_s + iteration_s <= last_s)
    return np.flatnonzero(near if near.any() else ~near)


def _change(problem: Problem, rank: int, number: int, of_rank: list[int], steps: int, *, alone: bool) -> None:
    """Change an instruction's clock by some of the measured ones, alone or with all that run at it in a row."""
    stream, before_mhz, first, end = problem.instructions[rank], of_rank[number], number, number + 1
    while not alone and first > 0 and of_rank[first - 1] == before_mhz:
        first -= 1
    while not alone and end < len(stream) and of_rank[end] == before_mhz:
        end += 1
    measured = [problem.profile.options(i.stage, i.kind).clock_mhz.tolist() for i in stream[first:end]]
    common = sorted(set(measured[0]).intersection(*measured[1:]))
    mhz = common[min(max(common.index(before_mhz) + steps, 0), len(common) - 1)]
    of_rank[first:end] = [mhz] * (end - first)


def _held_s(problem: Problem, rank: int, clocks: Sequence[Sequence[int]]) -> float:
    """Return for how long the clock of a rank is held that is held for the shortest time, or what is long enough."""
    if not problem.least_dwell_s:
        return 0.0
    stream = zip(problem.instructions[rank], clocks[rank], strict=True)
    timed = [(mhz, problem.profile.at(i.stage, i.kind, mhz).time_s) for i, mhz in stream]
    held_s = [sum(time_s for _, time_s in run) for _, run in itertools.groupby(timed, key=lambda one: one[0])]
    return min(problem.least_dwell_s, *held_s)
