"""What the thread that sets clocks is asked to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from perseus_ds.device.held_clock import HeldClock
from perseus_ds.device.moments import Moment


class ClockRequest(NamedTuple):
    """A clock to apply; a tuple, because the training thread makes one for every change of the clock.

    Attributes:
        clock_mhz: The clock; None for the default.
        after: Not before the GPU has passed this moment; None for now.
        delay_s: How long after that moment, unless the next request is due first [s]; None for one that must be done.
    """

    clock_mhz: int | None
    after: Moment | None
    delay_s: float | None = None


def next_request(items: Iterable[object]) -> ClockRequest | None:
    """Return the first request that must be done; None if there is none, or something else comes before it."""
    for item in tuple(items):
        if not isinstance(item, ClockRequest):
            return None
        if item.delay_s is None:
            return item
    return None


class Trial:
    """A driver that has failed is asked once more for all that plans need.

    Attributes:
        is_over: Whether it was asked.
        works: Whether it did everything.
    """

    def __init__(self) -> None:
        self.is_over = self.works = False

    def make(self, clock: HeldClock) -> None:
        """Ask it.

        Raises:
            GpuError: It refused.
        """
        try:
            clock.try_out()
            self.works = True
        finally:
            self.is_over = True
