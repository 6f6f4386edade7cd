"""Keeps threads that serve clients to a small share of a processor, by pauses.

They share Python's interpreter lock with the training thread, so what they do is bounded, however many clients there
are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_PAUSE_S = 0.5


class ProcessorShare:
    """Tells how long to pause after work; may be used from any thread.

    A pause takes as long as the work divided by the share, in parts that are not too long for clients. Time in which
    nothing is done counts as a pause.

    Args:
        share: Of one processor.
        now_s: Returns the time [s].
    """

    def __init__(self, share: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._now_s = now_s
        self._lock = threading.Lock()
        self._until_s = now_s()

    def add(self, used_s: float) -> None:
        """Count processor time that was used [s]."""
        with self._lock:
            self._until_s = max(self._until_s, self._now_s()) + used_s / self._share

    def pause_s(self) -> float:
        """Return for how long to do nothing now [s]."""
        with self._lock:
            return min(LONGEST_PAUSE_S, max(0.0, self._until_s - self._now_s()))
