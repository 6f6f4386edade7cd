"""The layout of the memory that a rank shares with its agent.

The client writes the header. The agent writes its heartbeat and whether it revoked the lease.
"""

from __future__ import annotations

import struct

from perseus_ds.errors import GpuError

VERSION = 1
LENGTH = 4096
"""Length of the memory [bytes]."""
_MAGIC = b"PERSEUS\0"
_HEADER = struct.Struct("=8sII")  # magic, version, length
_HEARTBEAT, _REVOKED = 2, 3  # words of 8 bytes


class RankMemory:
    """A rank's memory, in the client or in the agent.

    Attributes:
        heartbeat_s: When the agent last looked at this rank, in monotonic time [s]; 0 if it never did.
        is_revoked: Whether the agent has ended the lease, since the rank's process received a termination signal.
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
