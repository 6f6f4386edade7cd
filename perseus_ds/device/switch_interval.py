"""How long a thread that computes in Python keeps the others of its process waiting."""

from __future__ import annotations

import sys

_INTERVAL_S = 0.0005


class ShortSwitchInterval:
    """Shortens the interpreter's switch interval until :meth:`close`, unless it is short already.

    A thread that computes in Python without calling anything that waits gives up the interpreter's lock only when
    another thread has waited for that interval, 5 ms by default. The clocks' thread takes the lock several times
    between the end of a pass and the request of a clock, which would then come tens of milliseconds late.
    """

    def __init__(self) -> None:
        self._before_s = sys.getswitchinterval()
        if self._before_s > _INTERVAL_S:
            sys.setswitchinterval(_INTERVAL_S)

    def close(self) -> None:
        """Restore the interval, unless somebody else has set another one; harmless when called again."""
        if self._before_s > _INTERVAL_S and sys.getswitchinterval() == _INTERVAL_S:
            sys.setswitchinterval(self._before_s)
