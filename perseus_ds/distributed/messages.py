"""Messages of ranks to rank 0: they go up the tree with the numbers of an exchange, in blocks of one size.

A block has, for each message, its length, its age and its content, and zeros after the last one.
"""

from __future__ import annotations

import struct
import time
from collections import deque

import torch

# Length of the content [bytes] and age [s].
_HEAD = struct.Struct("<Id")
_WORD = 8
MOST_MESSAGE_BYTES = 32_768
"""Of a block; what has no place in one goes with a later one."""


class Messages:
    """Messages of this rank, and those of others that it passes on; may be used from any thread."""

    def __init__(self) -> None:
        # When each was made, by this node's clock, and its content.
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def size(self) -> int:
        """Bytes that all of them take in a block."""
        return sum(_HEAD.size + len(content) for _, content in tuple(self._waiting)) if self._waiting else 0

    def add(self, content: bytes) -> None:
        """Add a message; one that is longer than a block is cut off."""
        self._waiting.append((time.monotonic(), content[: MOST_MESSAGE_BYTES - _HEAD.size]))

    def take_block(self, size: int) -> torch.Tensor:
        """Remove as many as have a place in a block, the oldest first; return the block, shape (words,).

        Args:
            size: Bytes of the block; it may have up to 7 more.
        """
        size = _WORD * words_of(size)
        block, now_s = bytearray(), time.monotonic()
        while self._waiting and len(block) + _HEAD.size + len(self._waiting[0][1]) <= size:
            made_s, content = self._waiting.popleft()
            block += _HEAD.pack(len(content), now_s - made_s) + content
        return torch.frombuffer(block.ljust(size, b"\0"), dtype=torch.float64)

    def add_block(self, block: torch.Tensor) -> None:
        """Add the messages of a block."""
        content, now_s, begin = block.numpy().tobytes(), time.monotonic(), 0
        while begin + _HEAD.size <= len(content):
            length, age_s = _HEAD.unpack_from(content, begin)
            begin += _HEAD.size
            if length:
                self._waiting.append((now_s - age_s, content[begin : begin + length]))
            begin += length or len(content)

    def take_all(self) -> list[tuple[float, bytes]]:
        """Remove all; return the age [s] and the content of each."""
        now_s = time.monotonic()
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return [(now_s - made_s, content) for made_s, content in taken]


def words_of(size: int) -> int:
    """Return how many numbers of 8 bytes a block of so many bytes has."""
    return -(-size // _WORD)
