"""Chooses the blocking power: the power that a GPU draws while it waits for another one.

It is measured separately, while all ranks wait for one (:mod:`perseus_ds.client.measuring`), and in the bubbles of the
iterations in which the profile is measured, pooled over ranks. Plans replace the latter kind of waiting, but its power
is less certain the less ranks wait. It is used if it differs significantly from the former.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# Relative difference that is negligible, and number of standard errors above which a difference is significant.
_AGREES, _SURE = 0.03, 3.0


class WaitingPower(NamedTuple):
    """Power while a GPU waits, and its standard error [W]."""

    power_w: float
    error_w: float


def pooled(found: Iterable[WaitingPower | None]) -> WaitingPower | None:
    """Return the mean of several measurements, weighted by their errors. None if there are none."""
    known = [one for one in found if one is not None and 0 < one.error_w < math.inf]
    if not known:
        return None
    weights = [1 / one.error_w**2 for one in known]
    power_w = sum(weight * one.power_w for weight, one in zip(weights, known, strict=True)) / sum(weights)
    return WaitingPower(power_w, 1 / math.sqrt(sum(weights)))


def chosen_power_w(alone_w: float, bubbles: WaitingPower | None) -> tuple[float, str | None]:
    """Return the blocking power for plans [W], and a message if the measurements differ.

    Args:
        alone_w: Power while all ranks wait for one [W].
        bubbles: Power in the bubbles of iterations, pooled over ranks. None if unknown.
    """
    if bubbles is None or abs(bubbles.power_w - alone_w) <= _AGREES * alone_w:
        return alone_w, None
    differ = (
        f"a waiting GPU draws {bubbles.power_w:.1f} +/- {2 * bubbles.error_w:.1f} W in the bubbles of iterations, and "
        f"{alone_w:.1f} W where all ranks wait for one"
    )
    if abs(bubbles.power_w - alone_w) > _SURE * bubbles.error_w:
        return bubbles.power_w, f"{differ}: plans are made for the former, the waiting that they replace"
    return alone_w, f"{differ}: plans are made for the latter, as the former is not certain to differ"
