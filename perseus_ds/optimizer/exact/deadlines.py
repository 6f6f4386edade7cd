"""The iteration times to plan for: more of them where the slope of the frontier changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_FLAT = 2e-6
"""Two tangents this close to the curve, relative to its height, need no third between them."""
_SAME = 1e-9
"""Between two times this close, relative to them, there is no other worth planning for."""


@dataclass(frozen=True)
class Tangent:
    """A point of the bound's curve.

    Attributes:
        time_s: Where.
        energy_j: Its height there.
        slope_w: How fast it falls: energy saved per second more, >= 0.
    """

    time_s: float
    energy_j: float
    slope_w: float


def refine(left: Tangent, right: Tangent, at: Callable[[float], Tangent], count: int) -> list[Tangent]:
    """Return tangents of a falling curve, convex but near its left end, each new one where the curve is least known.

    Args:
        left: The fastest.
        right: The slowest.
        at: Returns the tangent at a time.
        count: How many at most, ``left`` and ``right`` included.
    """
    found = [left, right]
    queue = [_unknown(left, right)]
    while queue and len(found) < count:
        unknown_j, _, left, right = heapq.heappop(queue)
        if -unknown_j <= _FLAT * right.energy_j:
            break
        if right.time_s - left.time_s <= _SAME * right.time_s:
            continue
        middle = at((left.time_s + right.time_s) / 2)
        found.append(middle)
        for pair in ((left, middle), (middle, right)):
            heapq.heappush(queue, _unknown(*pair))
    return sorted(found, key=lambda tangent: tangent.time_s)


def _unknown(left: Tangent, right: Tangent) -> tuple[float, float, Tangent, Tangent]:
    """The largest distance between the chord of two points and their tangents, negated, for a heap."""
    span_s = right.time_s - left.time_s
    chord_w = (left.energy_j - right.energy_j) / span_s
    above, below = left.slope_w - chord_w, max(chord_w - right.slope_w, 0.0)
    # Just after T_min more clocks become possible and the curve falls faster than its tangent says.
    unknown_j = span_s * (above * below / (above + below) if above + below > 0 < above else below / 2)
    return -unknown_j, left.time_s, left, right


def spread(time_s: Floats, energy_j: Floats, count: int) -> Floats:
    """Return deadlines, those given among them, that divide the curve evenly along its length.

    Length is measured with the whole curve's time and energy as units.

    Args:
        time_s: Shape (n,), ascending.
        energy_j: Shape (n,), falling.
        count: How many to return, at least n.
    """
    length = np.hypot(np.diff(time_s) / np.ptp(time_s), np.diff(energy_j) / max(np.ptp(energy_j), 1e-300))
    parts = np.ones(len(length), dtype=np.intp)
    for _ in range(count - len(time_s)):
        parts[np.argmax(length / parts)] += 1
    inner = [np.linspace(a, b, n, endpoint=False) for a, b, n in zip(time_s[:-1], time_s[1:], parts, strict=True)]
    return np.append(np.concatenate(inner), time_s[-1])
