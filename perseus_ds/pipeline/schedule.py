"""The schedule of a pipeline: the operations of each rank, in program order and as they ran."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from perseus_ds.pipeline.instruction import Instruction, Kind

Payload = Literal["activation", "grad"]
_SPAN = struct.Struct("=Hdd")


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an instruction."""

    instruction: Instruction

    def __str__(self) -> str:
        return str(self.instruction)


@dataclass(frozen=True, slots=True)
class Load:
    """Load the data of one micro-batch."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"load of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Other:
    """Run a command that perseus-ds does not know and that has no clock to choose.

    Attributes:
        command: Class name of the command.
        stage: The stage that runs it.
        number: Number of commands of this class that the stage has run before in the iteration.
    """

    command: str
    stage: int
    number: int

    def __str__(self) -> str:
        return f"{self.command} {self.number} on stage {self.stage}"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Transfer of one tensor between neighbouring stages.

    The k-th send over a boundary in one direction matches the k-th receive there.
    """

    payload: Payload
    source: int
    """Sending stage."""
    target: int
    """Receiving stage."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.payload} of micro-batch {self.micro_batch} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Transfers that one rank launches together."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.sends + self.receives

    def __str__(self) -> str:
        return ", ".join([f"send {t}" for t in self.sends] + [f"receive {t}" for t in self.receives])


@dataclass(frozen=True, slots=True)
class Exchange(_Transfers):
    """Launch the transfers together and wait until all of them are complete."""


@dataclass(frozen=True, slots=True)
class Launch(_Transfers):
    """Launch transfers without waiting for them."""

    def __str__(self) -> str:
        return f"launch {_Transfers.__str__(self)}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until transfers that were launched earlier are complete."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return "wait for " + ", ".join(map(str, self.transfers))


Operation: TypeAlias = Compute | Load | Other | Exchange | Launch | Wait


@dataclass(frozen=True)
class Schedule:
    """The operations of every rank of a pipeline in one iteration, in program order.

    Attributes:
        name: Class of the schedule, as ``package.module:Class``. It is only a label and is never imported.
        micro_batches: Number of micro-batches per iteration.
        ranks: One stream of operations per pipeline rank.
    """

    name: str
    micro_batches: int
    ranks: tuple[tuple[Operation, ...], ...]

    @property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """The compute instructions of every rank, in program order."""
        return tuple(tuple(op.instruction for op in stream if isinstance(op, Compute)) for stream in self.ranks)

    @property
    def keys(self) -> list[tuple[int, Kind]]:
        """The (stage, kind) of all instructions, ascending."""
        return sorted({(i.stage, i.kind) for stream in self.instructions for i in stream})

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        """The stages of every rank, ascending."""
        return [sorted({i.stage for i in stream}) for stream in self.instructions]

    @property
    def transfers(self) -> set[Transfer]:
        """The transfers between all stages."""
        return {t for stream in self.ranks for op in stream if isinstance(op, _Transfers) for t in op.transfers}

    @property
    def num_stages(self) -> int:
        return 1 + max(i.stage for stream in self.instructions for i in stream)


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran, with start and end relative to the iteration's start [s]."""

    operation: Operation
    start_s: float
    end_s: float

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


def encode_spans(spans: Iterable[Span], places: Mapping[Operation, int]) -> bytes:
    """Return spans of a rank as bytes, 18 for each.

    ``places`` has the index of each operation in the stream of the rank, below 65536. Other operations are omitted.
    """
    return b"".join(
        _SPAN.pack(places[span.operation], span.start_s, span.end_s) for span in spans if span.operation in places
    )


def decode_spans(content: bytes, stream: Sequence[Operation]) -> list[Span]:
    """Return the spans encoded by :func:`encode_spans`.

    Those with a place outside of the stream are omitted.
    """
    whole = content[: len(content) // _SPAN.size * _SPAN.size]
    return [
        Span(stream[place], start_s, end_s) for place, start_s, end_s in _SPAN.iter_unpack(whole) if place < len(stream)
    ]
