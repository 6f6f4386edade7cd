"""Calls functions when the process ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable


class AtExit:
    """Calls a function once when this process ends, also if ``multiprocessing`` has forked it.

    Of several functions, the last one is called first. None is called in processes that are forked from this one.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._process = os.getpid()
        atexit.register(self._call)
        # Processes that multiprocessing forks end without atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self._call, exitpriority=0)

    def cancel(self) -> None:
        """Do not call the function any more."""
        atexit.unregister(self._call)
        self._finalizer.cancel()

    def _call(self) -> None:
        if os.getpid() == self._process:
            self.cancel()
            self._function()
