"""Layout of the memory that a rank shares with its agent.

It has four parts: a header, words written by the client (progress of the host, program of each iteration), a
word written by the agent (its heartbeat), and the marks, which are written by the client's CPU or its GPU.

A mark is a word of 8 bytes. It is 0 until the GPU reaches its position. Then it is the time [s] if the CPU wrote it, or
1 in the lower half if the GPU wrote it. Marks are cleared when an iteration begins on the GPU.
"""

from __future__ import annotations

import struct

from perseus_ds.errors import GpuError

VERSION = 12
"""Version of the layout and of the messages."""
POSITIONS = 8192
"""Number of instructions of an iteration that have marks."""
NEXT_WITHIN_S = 0.005
"""Time after the end of an iteration after which the clock is the default one, unless the next iteration has begun."""
IDLE_S = 2.0
"""The same time within the tail of an iteration, which the user's code continues."""
DRIVER_HANGS_S = 3.0
"""Time after which an unanswered driver call is given up."""
PAUSED = -1.0
"""Value of ``idle_since_s`` of a client that requests default clocks immediately."""
DEFAULT_CLOCKS = 255
"""Number of the program that runs at default clocks."""
OTHER_ORDERS = 254
"""Number of the program of all orders with an unknown schedule. The others are numbered from 0."""
MARKS_OFFSET = 4096
"""Offset of the marks [bytes]. Each position has two words."""
LENGTH = MARKS_OFFSET + 16 * POSITIONS
"""Length of the memory [bytes]."""
BEGUN_OFFSET, ENDED_OFFSET = 8 * 8, 8 * 10
"""Offsets of the numbers of the last iterations that the GPU has begun and ended [bytes]."""
REMEMBERED = 64
"""Number of iterations that have a program."""
_MAGIC = b"PERSEUS\0"
_HEADER = struct.Struct("=8sII")  # magic, version, length
# Indices of words of 8 bytes, written by the client (further ones are below):
_BEGUN, _BEGUN_S, _ENDED, _ENDED_S = 8, 9, 10, 11
_PROGRAMS = 64
_FIRST_MARK = MARKS_OFFSET // 8


class _Word:
    """A word that is an unsigned integer."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, memory: RankMemory, owner: type) -> int:
        return memory.words[self._index]

    def __set__(self, memory: RankMemory, value: int) -> None:
        memory.words[self._index] = value


class _Number:
    """A word that is a double."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, memory: RankMemory, owner: type) -> float:
        return memory.numbers[self._index]

    def __set__(self, memory: RankMemory, value: float) -> None:
        memory.numbers[self._index] = value


class RankMemory:
    """Memory of a rank, as seen by the client or the agent.

    Attributes:
        progress: Number of starts and ends of iterations. It is odd within an iteration.
        idle_since_s: Time from which on the client expects no more work at the program's clocks [s]. 0 if it expects
            work, and :data:`PAUSED` if it requests default clocks immediately.
        heartbeat_s: Monotonic time when the agent last handled this rank [s]. 0 before the first time.
        unmarked: Number of the last iteration in which a mark could not be written. 0 if none.
        begun_s: When the GPU has begun the last iteration [s]. 0 if the GPU wrote the mark.
        ended_s: When it has ended one [s]. 0 if the GPU wrote the mark.
        words: The memory as integers of 8 bytes.
        numbers: The memory as doubles.
    """

    # Written by the client:
    progress = _Word(4)
    idle_since_s = _Number(6)
    unmarked = _Word(7)
    begun_s, ended_s = _Number(_BEGUN_S), _Number(_ENDED_S)
    # Written by the agent:
    heartbeat_s = _Number(16)

    def __init__(self, view: memoryview) -> None:
        """Wrap memory with this layout.

        Raises:
            GpuError: The memory has another layout.
        """
        found = _HEADER.unpack_from(view) if view.nbytes >= _HEADER.size else None
        if found != (_MAGIC, VERSION, LENGTH) or view.nbytes < LENGTH:
            raise GpuError(
                f"The memory of a rank is damaged or of another version: expected {_MAGIC!r}, version {VERSION} and "
                f"{LENGTH} bytes, got {found} in {view.nbytes} bytes. Use the same version of perseus-ds on the node."
            )
        self._bytes = view[:LENGTH]
        self.numbers = self._bytes.cast("d")
        self.words = self._bytes.cast("Q")
        self._halves = self._bytes.cast("I")

    @classmethod
    def create(cls, view: memoryview | None = None) -> RankMemory:
        """Write the header into empty memory, by default new memory of this process."""
        if view is None:
            view = memoryview(bytearray(LENGTH))
        _HEADER.pack_into(view, 0, _MAGIC, VERSION, LENGTH)
        memory = cls(view)
        for number in range(REMEMBERED):
            memory.words[_PROGRAMS + number] = DEFAULT_CLOCKS
        return memory

    @property
    def iteration(self) -> int:
        """Number of the last iteration that the host has begun. The first is 1, and 0 means none."""
        return (self.progress + 1) // 2

    def begin_iteration(self, program: int = DEFAULT_CLOCKS) -> int:
        """Record that the host begins an iteration with a program, and return the iteration's number."""
        progress = (self.progress + 1) | 1
        number = (progress + 1) // 2
        self.words[_PROGRAMS + number % REMEMBERED] = program
        self.idle_since_s = 0.0
        self.progress = progress
        return number

    def end_iteration(self) -> None:
        """Record that the host has issued the current iteration, if any."""
        self.progress += self.progress & 1

    def program(self, iteration: int) -> int:
        """Return the number of the program of an iteration."""
        return self.words[_PROGRAMS + iteration % REMEMBERED]

    def change_program(self, program: int) -> None:
        """Run the rest of the current iteration with another program."""
        self.words[_PROGRAMS + self.iteration % REMEMBERED] = program

    # Marks written by the CPU.

    def mark_begun(self, number: int, now_s: float, positions: int) -> None:
        """Mark that the GPU begins an iteration, and clear the marks of the given number of positions."""
        if positions:
            self._bytes[MARKS_OFFSET : MARKS_OFFSET + 16 * positions] = bytes(16 * positions)
        self.begun_s = now_s
        self.words[_BEGUN] = number % 2**32

    def mark_ended(self, number: int, now_s: float) -> None:
        """Mark that the GPU has finished an iteration."""
        self.ended_s = now_s
        self.words[_ENDED] = number % 2**32

    @property
    def slots(self) -> memoryview[float]:
        """Times of the marks [s]: the start of the instruction at a position in slot ``2 * position``, then its end."""
        return self.numbers[_FIRST_MARK:]

    # Marks read by the agent.

    @property
    def begun(self) -> int:
        """Lower half of the number of the last iteration that the GPU has begun."""
        return self._halves[2 * _BEGUN]

    @property
    def ended(self) -> int:
        """Lower half of the number of the last iteration that the GPU has ended."""
        return self._halves[2 * _ENDED]

    def marked_s(self, slot: int) -> float | None:
        """Return when the GPU reached a slot [s].

        About 0 if it wrote the mark itself, None if it has not reached it.
        """
        return self.numbers[_FIRST_MARK + slot] if self.words[_FIRST_MARK + slot] else None
