"""A guardian's watch over the other guardian of its node."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from dataclasses import asdict

from perseus_ds.device import guardian_process, local_socket
from perseus_ds.device.guarded_ranks import GuardedRanks
from perseus_ds.errors import GpuError
from perseus_ds.timebase import Timebase

_LOOK_S = 0.2
_APPEARS_WITHIN_S = 2.0
_TRY_AGAIN_S = 2.0


class Peer:
    """The other guardian. If it ends while ranks live, it is started again and gets this guardian's connections.

    Those are copies: a rank need not do anything, and notices nothing, which matters where it hangs or is stopped.

    Args:
        name: Of the other guardian.
        ranks: That this guardian watches.
        timebase: The time to live in.
    """

    def __init__(self, name: str, ranks: GuardedRanks, timebase: Timebase) -> None:
        self._name = name
        self._ranks = ranks
        self._time = timebase

    def watch(self) -> None:
        """Watch it for as long as this process lives."""
        # Ranks start both guardians at the same time; it need not listen yet.
        missing_from_s = self._time.now_s() + _APPEARS_WITHIN_S
        while True:
            was_missing = self._time.now_s() >= missing_from_s
            link = self._connect(may_start=was_missing)
            if link is not None:
                with link, suppress(OSError):
                    self._greet(link, hands_over=was_missing)
                    link.recv(1)  # returns when it has ended
                missing_from_s = self._time.now_s()
            # It may have ended with the last rank, whose end is seen here as well after a moment.
            self._time.sleep(_TRY_AGAIN_S if link is None and was_missing else _LOOK_S)

    def _connect(self, *, may_start: bool) -> socket.socket | None:
        starts = may_start and self._ranks.are_living
        with suppress(GpuError, OSError):  # such as no memory for another process: tried again
            return guardian_process.connect_or_start(self._name) if starts else guardian_process.connect(self._name)
        return None

    def _greet(self, link: socket.socket, *, hands_over: bool) -> None:
        """Say that this is a guardian; give a successor copies of the connections with all ranks."""
        copies = self._ranks.copies() if hands_over else []
        with ExitStack() as until_sent:
            sockets = [until_sent.enter_context(copy) for _, copy in copies]
            local_socket.send(link, {"ranks": [asdict(registration) for registration, _ in copies]}, sockets)
        link.settimeout(None)
