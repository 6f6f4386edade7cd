"""The layout of the memory that a rank shares with its agent.

It has four parts: a header; words that the client writes (how far the host is, which program an iteration runs); words
that the agent writes (its heartbeat, whether the clock may be locked, what it did and read); and the marks, which the
client's CPU or its GPU writes.

A mark is a word of 8 bytes: 0 as long as the GPU has not reached its position, and afterwards the time [s] if the CPU
wrote it, or 1 in the lower half if the GPU did. Marks are cleared when an iteration begins on the GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import NamedTuple

from perseus_ds.errors import GpuError

VERSION = 3
"""Of the layout and of the messages."""
POSITIONS = 8192
"""Number of instructions of an iteration that have marks."""
IDLE_S = 2.0
"""How long the clock of a program is kept after the client has become idle."""
DRIVER_HANGS_S = 3.0
"""A driver that has not answered for so long is not waited for."""
PAUSED = -1.0
"""Since when a client is idle that wants default clocks at once."""
DEFAULT_CLOCKS = 255
"""The number of the program that runs at default clocks."""
MARKS_OFFSET = 4096
"""Where the marks begin [bytes]; two words for each position."""
LENGTH = MARKS_OFFSET + 16 * POSITIONS
"""Length of the memory [bytes]."""
BEGUN_OFFSET, ENDED_OFFSET = 8 * 8, 8 * 10
"""Where the numbers of the iterations are that the GPU has begun and ended last [bytes]."""
REMEMBERED = 64
"""So many iterations have a program and a record."""
_MAGIC = b"PERSEUS\0"
_HEADER = struct.Struct("=8sII")  # magic, version, length
# Words of 8 bytes. Of the client:
_PROGRESS, _IDLE, _BEGUN, _BEGUN_S, _ENDED, _ENDED_S = 4, 6, 8, 9, 10, 11
_PROGRAMS = 64
# Of the agent:
_LOCKED = 3
_HEARTBEAT, _REVOKED, _RESETS, _RECORDED, _STATUS = 16, 17, 18, 19, 20
_RECORDS = _PROGRAMS + REMEMBERED
_FIRST_MARK = MARKS_OFFSET // 8
_STATUS_STRUCT = struct.Struct("=9d")


class ClockStatus(NamedTuple):
    """What the agent did to the clock of a GPU, and read of it.

    Attributes:
        changes: Number of clock changes.
        overtaken: Number of requests that were skipped because a later one was already due.
        asked_mhz: The clock that was read back last, as requested [MHz]; NaN at default clocks.
        reached_mhz: As read [MHz].
        late_s: How late the agent follows marks, nine times of ten at most [s].
        busy_since_s: Since when the driver has not answered, or refuses because it is busy [s]; 0 if it works.
        limit_w: The power limit, if it is lower than profiled [W]; infinite otherwise.
        limit_mhz: The highest clock that is reached, if it is lower than profiled [MHz]; infinite otherwise.
        default_mhz: The clock of the busy GPU while nobody has locked it [MHz]; 0 if it was not read.
    """

    changes: float = 0.0
    overtaken: float = 0.0
    asked_mhz: float = math.nan
    reached_mhz: float = math.nan
    late_s: float = 0.0
    busy_since_s: float = 0.0
    limit_w: float = math.inf
    limit_mhz: float = math.inf
    default_mhz: float = 0.0


class IterationEnergy(NamedTuple):
    """What the agent has recorded of an iteration.

    Attributes:
        begun_s: When it began on the GPU [s]; NaN if that was not seen.
        energy_j: The energy that the GPU used [J]; NaN if it cannot be read.
    """

    begun_s: float = math.nan
    energy_j: float = math.nan


_BUSY = _STATUS + ClockStatus._fields.index("busy_since_s")


class RankMemory:
    """A rank's memory, in the client or in the agent.

    Attributes:
        heartbeat_s: When the agent last looked at this rank, in monotonic time [s]; 0 if it never did.
        is_revoked: Whether the agent has ended the lease, since the rank's process received a termination signal.
        resets: Number of times that the agent has reset the clock while the lease lasts.
        may_be_locked: Whether the clock may be locked; set before it is.
        progress: Number of times that an iteration has begun or ended. It is odd within an iteration.
        idle_since_s: Since when the client expects no more work at the program's clocks [s]; 0 if it does, and
            :data:`PAUSED` if it wants default clocks at once.
        status: What the agent did and read.
        on_mark: Called when the client writes a mark, if client and agent are one process.
        on_record: Called when the agent has recorded an iteration, likewise.
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
        self._bytes = view[:LENGTH]
        self._numbers = self._bytes.cast("d")
        self._words = self._bytes.cast("Q")
        self._halves = self._bytes.cast("I")
        self.on_mark: Callable[[], None] = _nothing
        self.on_record: Callable[[], None] = _nothing

    @classmethod
    def create(cls, view: memoryview | None = None) -> RankMemory:
        """Write the header into empty memory; without any, into memory of this process."""
        if view is None:
            view = memoryview(bytearray(LENGTH))
        _HEADER.pack_into(view, 0, _MAGIC, VERSION, LENGTH)
        memory = cls(view)
        memory.status = ClockStatus()
        for number in range(REMEMBERED):
            memory._words[_PROGRAMS + number] = DEFAULT_CLOCKS
        return memory

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
        """Forbid to lock the clock from now on."""
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

    @property
    def iteration(self) -> int:
        """Number of the iteration that the host has begun last, 1 first; 0 before it."""
        return (self._words[_PROGRESS] + 1) // 2

    def begin_iteration(self, program: int = DEFAULT_CLOCKS) -> int:
        """Note that the host begins an iteration under a program; return the iteration's number."""
        progress = (self._words[_PROGRESS] + 1) | 1
        number = (progress + 1) // 2
        self._words[_PROGRAMS + number % REMEMBERED] = program
        self._numbers[_IDLE] = 0.0
        self._words[_PROGRESS] = progress
        return number

    def end_iteration(self) -> None:
        """Note that the host has issued the iteration, if there is one."""
        self._words[_PROGRESS] += self._words[_PROGRESS] & 1

    def program(self, iteration: int) -> int:
        """Return the number of an iteration's program."""
        return self._words[_PROGRAMS + iteration % REMEMBERED]

    def change_program(self, program: int) -> None:
        """Run the rest of the iteration that the host has begun last under another program."""
        self._words[_PROGRAMS + self.iteration % REMEMBERED] = program
        self.on_mark()

    @property
    def idle_since_s(self) -> float:
        return self._numbers[_IDLE]

    @idle_since_s.setter
    def idle_since_s(self, since_s: float) -> None:
        self._numbers[_IDLE] = since_s

    # Marks by the CPU.

    def mark_begun(self, number: int, now_s: float, positions: int) -> None:
        """Mark that the GPU begins an iteration, and clear the marks of so many positions."""
        if positions:
            self._bytes[MARKS_OFFSET : MARKS_OFFSET + 16 * positions] = bytes(16 * positions)
        self._numbers[_BEGUN_S] = now_s
        self._words[_BEGUN] = number % 2**32
        self.on_mark()

    def mark_ended(self, number: int, now_s: float) -> None:
        """Mark that the GPU has done an iteration."""
        self._numbers[_ENDED_S] = now_s
        self._words[_ENDED] = number % 2**32
        self.on_mark()

    def mark(self, slot: int, now_s: float) -> None:
        """Mark that the GPU reaches a slot: twice the position where its instruction begins, one more at its end."""
        self._numbers[_FIRST_MARK + slot] = now_s
        self.on_mark()

    # What the agent reads of marks.

    @property
    def begun(self) -> int:
        """The lower half of the number of the iteration that the GPU has begun last."""
        return self._halves[2 * _BEGUN]

    @property
    def ended(self) -> int:
        """Likewise of the iteration that it has ended last."""
        return self._halves[2 * _ENDED]

    @property
    def begun_s(self) -> float:
        """When it did [s]; 0 if the GPU wrote the mark."""
        return self._numbers[_BEGUN_S]

    @property
    def ended_s(self) -> float:
        """When it did [s]; 0 if the GPU wrote the mark."""
        return self._numbers[_ENDED_S]

    def marked_s(self, slot: int) -> float | None:
        """Return when the GPU reached a slot [s]: about 0 if it wrote the mark itself, None if it has not yet."""
        return self._numbers[_FIRST_MARK + slot] if self._words[_FIRST_MARK + slot] else None

    # What the agent tells.

    @property
    def status(self) -> ClockStatus:
        return ClockStatus._make(_STATUS_STRUCT.unpack_from(self._bytes, 8 * _STATUS))

    @status.setter
    def status(self, status: ClockStatus) -> None:
        _STATUS_STRUCT.pack_into(self._bytes, 8 * _STATUS, *status)

    @property
    def busy_since_s(self) -> float:
        """As in :class:`ClockStatus`."""
        return self._numbers[_BUSY]

    @busy_since_s.setter
    def busy_since_s(self, since_s: float) -> None:
        self._numbers[_BUSY] = since_s

    def record(self, iteration: int, begun_s: float, begun_j: float, ended_j: float) -> None:
        """Record when an iteration began on the GPU [s], and the energy counter at its begin and end [J]."""
        word = _RECORDS + 4 * (iteration % REMEMBERED)
        self._words[word] = 0
        self._numbers[word + 1], self._numbers[word + 2], self._numbers[word + 3] = begun_s, begun_j, ended_j
        self._words[word] = iteration
        self._words[_RECORDED] = iteration
        self.on_record()

    def recorded(self, iteration: int) -> IterationEnergy | None:
        """Return what the agent has recorded of an iteration; None if it has not yet."""
        word = _RECORDS + 4 * (iteration % REMEMBERED)
        if self._words[word] != iteration:
            return IterationEnergy() if self._words[_RECORDED] > iteration else None
        begun_s, begun_j, ended_j = self._numbers[word + 1], self._numbers[word + 2], self._numbers[word + 3]
        return IterationEnergy(begun_s, ended_j - begun_j)


def _nothing() -> None:
    """Nobody in this process waits for it."""
