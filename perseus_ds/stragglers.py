"""Recognises a pipeline that is slower than its data-parallel peers, and when it has recovered."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_SLOWER = 1.06
_RECOVERED = 1.03
_IN_A_ROW = 2


@dataclass(frozen=True)
class Straggler:
    """A pipeline all others wait for.

    Attributes:
        pipeline: Which.
        slowdown: How many times as long it takes as it would.
    """

    pipeline: int
    slowdown: float


class StragglerWatch:
    """Looks at how long each pipeline takes itself, relative to what its plan says.

    What a pipeline takes on purpose, under a slower plan, is in its plan; what it waits for others
    is not in its own time. A straggler is slower than expected by 6 % more than its peers are, twice
    in a row; it has recovered when it is within 3 %, twice in a row, so that one slow iteration
    changes nothing and a pipeline at the border does not flap.
    """

    def __init__(self) -> None:
        self._suspect: Straggler | None = None
        self._strikes = 0
        self.found: Straggler | None = None

    def update(self, ratios: Sequence[float]) -> Straggler | None:
        """Take in an iteration and return the straggler, if there is one.

        Args:
            ratios: For each pipeline, its own time over that of the plan it ran, > 0.
        """
        slowest = max(range(len(ratios)), key=lambda pipeline: ratios[pipeline])
        others = [ratio for pipeline, ratio in enumerate(ratios) if pipeline != slowest]
        if not others:
            return None
        relative = ratios[slowest] / statistics.median(others)
        bound = _RECOVERED if self.found and self.found.pipeline == slowest else _SLOWER
        seen = Straggler(slowest, relative) if relative > bound else None
        if (seen and seen.pipeline) != (self.found and self.found.pipeline):
            same = (seen and seen.pipeline) == (self._suspect and self._suspect.pipeline)
            self._strikes = self._strikes + 1 if same else 1
            self._suspect = seen
            if self._strikes >= _IN_A_ROW:
                self.found, self._strikes = seen, 0
        else:
            self._strikes = 0
            # A straggler that becomes slower or faster is followed, small changes are not.
            if seen and self.found and abs(seen.slowdown / self.found.slowdown - 1) > _RECOVERED - 1:
                self.found = seen
        return self.found
