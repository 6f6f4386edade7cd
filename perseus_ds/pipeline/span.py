"""An operation of an iteration as it ran, and its encoding in messages."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perseus_ds.pipeline.schedule import Operation

_SPAN = struct.Struct("=Hdd")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran.

    Attributes:
        start_s: Start, relative to the iteration's start [s].
        end_s: End, relative to the iteration's start [s].
    """

    operation: Operation
    start_s: float
    end_s: float

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


def encode(spans: Iterable[Span], places: Mapping[Operation, int]) -> bytes:
    """Return spans as bytes, 18 for each. Operations without a place are omitted.

    Args:
        spans: The operations of one iteration of a rank.
        places: Index of each operation in the stream of the rank, below 65536.
    """
    return b"".join(
        _SPAN.pack(places[span.operation], span.start_s, span.end_s) for span in spans if span.operation in places
    )


def decode(content: bytes, stream: Sequence[Operation]) -> list[Span]:
    """Return the spans encoded by :func:`encode`. Those with a place outside of the stream are omitted."""
    whole = content[: len(content) // _SPAN.size * _SPAN.size]
    return [
        Span(stream[place], start_s, end_s) for place, start_s, end_s in _SPAN.iter_unpack(whole) if place < len(stream)
    ]
