"""Trains at default clocks for a while: after a fault, or after a plan has lost; the longer the more often."""

from __future__ import annotations

from collections.abc import Callable

from perseus_ds.runtime.phases import NextIteration, Outlook, Phase, one_iteration

_LONGER = 4
_LONG_AGO = 20
# The reports of the iteration after a fault are the first that say which ranks have fallen back.
_UNTIL_TOLD = 2


class Rests:
    """How long rests are, the same on all ranks: counted in iterations.

    Each is four times as long as the one before, unless that is long ago.

    Args:
        first: Iterations of the first one.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._last = 0
        self._until = 0

    def next(self, step: int) -> int:
        """Return how many iterations the rest is to take that begins after a step of the job."""
        is_long_ago = step - self._until > _LONG_AGO * self._last
        self._last = self._first if is_long_ago else _LONGER * self._last
        self._until = step + self._last
        return self._last


def rest(iterations: int, following: str) -> Phase[None]:
    """Train at default clocks for so many iterations, before another phase."""
    for _ in range(iterations):
        yield from one_iteration(NextIteration("observe", outlook=Outlook(following)))


def after_a_fault(start: Callable[[], Phase[None]], iterations: int) -> Phase[None]:
    """Train at default clocks for so many iterations and until no rank is fallen back; then begin a mode again."""
    done = 0
    while True:
        seen = yield from one_iteration(NextIteration("observe"))
        done += 1
        is_told = done >= max(iterations, _UNTIL_TOLD) and seen.reports is not None
        if is_told and seen.reports is not None and not seen.reports.failed:
            break
    yield from start()
