"""Shapes and lengths of the inputs of an iteration's forwards, as numbers."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Hashable, Sequence

_MOST_LENGTHS, _LONGEST = 4096, 1e15


@functools.lru_cache(maxsize=4096)
def number_of_inputs(inputs: Hashable) -> float:
    """Return a number for the shapes of a forward's inputs. It is the same in every process and never 0."""
    return float(int.from_bytes(hashlib.blake2b(repr(inputs).encode(), digest_size=4).digest(), "little") + 1)


@functools.lru_cache(maxsize=4096)
def length_of_inputs(inputs: Hashable) -> float:
    """Return the number of elements of a forward's first input, as a measure of its tokens.

    ``inputs`` holds the shapes of all inputs, or of one of them. The length is NaN if unknown.
    """
    if isinstance(inputs, int | float):
        return float(inputs)
    if not isinstance(inputs, tuple) or not inputs:
        return math.nan
    if all(isinstance(size, int) for size in inputs):
        return float(math.prod(inputs))
    return length_of_inputs(inputs[0])


def check_lengths(lengths: Sequence[float]) -> None:
    """Raise a ``ValueError`` if the lengths of the micro-batches of an iteration are invalid."""
    wrong = [number for number, length in enumerate(lengths) if not 0 < length < _LONGEST]
    if wrong or not 1 <= len(lengths) <= _MOST_LENGTHS:
        given = f"{lengths[wrong[0]]!r} of micro-batch {wrong[0]}" if wrong else f"{len(lengths)} lengths"
        raise ValueError(
            f"next_lengths: expected the length of each micro-batch of an iteration, such as its number of tokens, "
            f"each above 0; given {given}. Give one number for each micro-batch."
        )


class InputShapes:
    """The shapes of the inputs of one iteration, as numbers: that of the first forward, and their sum."""

    def __init__(self) -> None:
        self.first = self.total = self._lengths = 0.0
        self._forwards = 0

    def add(self, inputs: Hashable) -> bool:
        """Add the inputs of a forward. Returns True if it is the first one."""
        shape = number_of_inputs(inputs)
        self.total += shape
        self._lengths += length_of_inputs(inputs)
        self._forwards += 1
        if self._forwards == 1:
            self.first = shape
        return self._forwards == 1

    @property
    def length(self) -> float:
        """Mean length of the inputs of all forwards so far. NaN before the first one, or if it is unknown."""
        return self._lengths / self._forwards if self._forwards else math.nan
