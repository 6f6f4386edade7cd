"""The layout of the memory that a rank shares with its agent.

The client writes the header, how far its rank is, and whether the clock may be locked. The agent writes its heartbeat,
how many times it has reset the clock, and whether it revoked the lease.
"""

from __future__ import annotations

import struct

from perseus_ds.errors import GpuError

VERSION = 2
"""Of the layout and of the messages."""
LENGTH = 4096
"""Length of the memory [bytes]."""
_MAGIC = b"PERSEUS\0"
_HEADER = struct.Struct("=8sII")  # magic, version, length
_HEARTBEAT, _REVOKED, _RESETS, _LOCKED, _PROGRESS = range(2, 7)  # words of 8 bytes


class RankMemory:
    """A rank's memory, in the client or in the agent.

    Attributes:
        heartbeat_s: When the agent last looked at this rank, in monotonic time [s]; 0 if it never did.
        is_revoked: Whether the agent has ended the lease, since the rank's process received a termination signal.
        resets: Number of times that the agent has reset the clock while the lease lasts.
        may_be_locked: Whether the clock may be locked; set before it is.
        progress: Number of times that an iteration has begun or ended. It is odd within an iteration.
    """

    def __init__(self, view: memoryview) -> None:
        """Use memory that has this layout.

        Raises:
            GpuError: It has another one.
        """
        found = _HEADER.unpack_from(view) if view.nbytes >= _HEADER.size else None
        if found != (_MAGIC, VERSION, LENGTH) or view.nbytes < LENGTH:
            raise GpuError(
                f"The memory of a rank is damaged or of another version: expected {_MAGIC!r}, version {VERSION} and "
                f"{LENGTH} bytes, got {found} in {view.nbytes} bytes. Use the same version of perseus-ds on the node."
            )
        self._numbers = view[:LENGTH].cast("d")
        self._words = view[:LENGTH].cast("Q")

    @classmethod
    def create(cls, view: memoryview) -> RankMemory:
        """Write the header into empty memory."""
        _HEADER.pack_into(view, 0, _MAGIC, VERSION, LENGTH)
        return cls(view)

    @property
    def heartbeat_s(self) -> float:
        return self._numbers[_HEARTBEAT]

    @heartbeat_s.setter
    def heartbeat_s(self, now_s: float) -> None:
        self._numbers[_HEARTBEAT] = now_s

    @property
    def is_revoked(self) -> bool:
        return self._words[_REVOKED] != 0

    def revoke(self) -> None:
        """Forbid the rank to lock the clock from now on."""
        self._words[_REVOKED] = 1

    @property
    def resets(self) -> int:
        return self._words[_RESETS]

    def count_reset(self) -> None:
        """Note that the agent is about to reset the clock."""
        self._words[_RESETS] = (self._words[_RESETS] + 1) % 2**64  # whatever the client has written there

    @property
    def may_be_locked(self) -> bool:
        return self._words[_LOCKED] != 0

    @may_be_locked.setter
    def may_be_locked(self, locked: bool) -> None:
        self._words[_LOCKED] = locked

    @property
    def progress(self) -> int:
        return self._words[_PROGRESS]

    def begin_iteration(self) -> None:
        """Note that an iteration begins."""
        self._words[_PROGRESS] = (self._words[_PROGRESS] + 1) | 1

    def end_iteration(self) -> None:
        """Note that the iteration has ended, if there is one."""
        self._words[_PROGRESS] += self._words[_PROGRESS] & 1
