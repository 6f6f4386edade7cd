"""Plans made elsewhere, with time and energy computed from a profile's rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.zeus_plans import Pairs
from perseus_ds.errors import FrontierError, ProfileError
from perseus_ds.optimizer import frontier_of
from perseus_ds.optimizer.problem import Problem
from perseus_ds.pipeline.instruction import Kind


def evaluate(plans: Iterable[tuple[Path, Pairs]], problem: Problem) -> Frontier:
    """Return the frontier of plans made elsewhere, with time and energy computed from the profile's rows.

    Tails for which the profile has rows, but the plans no clock, run at the highest clock.

    Raises:
        FrontierError: A plan does not fit the schedule or the profile; the message names its file.
    """
    found = []
    for path, pairs in plans:
        clocks = _clocks(path, pairs, problem)
        try:
            found.append(problem.evaluate(clocks))
        except ProfileError as error:
            raise FrontierError(f"{path}: {error} Give the profile that the plans are for.") from None
    return frontier_of(problem, found, "imported")


def _clocks(path: Path, pairs: Pairs, problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the clock of every decision, after checking that the plan's instructions are the schedule's."""
    if len(pairs) != len(problem.instructions):
        raise FrontierError(f"{path}: {len(pairs)} ranks, the schedule has {len(problem.instructions)}.")
    result = []
    for rank, (entries, instructions) in enumerate(zip(pairs, problem.instructions, strict=True)):
        clocks = [clock for _, clock in entries]
        kinds = [kind for kind, _ in entries]
        if instructions and (last := instructions[-1]).kind is Kind.TAIL and Kind.TAIL.value not in kinds:
            kinds.append(Kind.TAIL.value)
            clocks.append(problem.profile.at_highest_clock(last.stage, last.kind).clock_mhz)
        expected = [instruction.kind.value for instruction in instructions]
        if kinds != expected:
            position = next(
                (i for i, (a, b) in enumerate(zip(kinds, expected, strict=False)) if a != b),
                min(len(kinds), len(expected)),
            )
            has, wants = ((x[position] if position < len(x) else "nothing") for x in (kinds, expected))
            raise FrontierError(
                f"{path}: rank {rank}, instruction {position}: the schedule {problem.dag.schedule.name} has {wants}, "
                f"the plan {has}. Give the schedule that the plans are for."
            )
        result.append(tuple(clocks))
    return tuple(result)
