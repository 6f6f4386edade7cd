"""Reads the same commands iteration after iteration: what was read once is remembered."""

from __future__ import annotations

from typing import Any

from perseus_ds.pipeline.commands import CommandReader, phase_of
from perseus_ds.pipeline.operations import Operation


class RepeatedReader:
    """Returns what :class:`CommandReader` does, at the price of a comparison while an iteration is like the last one.

    Args:
        rank: Pipeline rank.
        ranks: Pipeline ranks.
        batched: Sends and receives are only queued until the next ``CommitP2P``.
    """

    def __init__(self, rank: int, ranks: int, batched: bool) -> None:
        self._of_rank = rank, ranks, batched
        # Of the iteration: class and phase of each command, on which its operations depend, and these.
        self._known: list[tuple[type, int, tuple[Operation, ...]]] = []
        self._position = 0
        # Has read all that is known; made where a command is another one than in the iteration before.
        self._reader: CommandReader | None = None

    def begin_iteration(self) -> None:
        """The next command is the first of an iteration."""
        self._position = 0
        self._reader = None

    def read(self, command: Any) -> tuple[Operation, ...]:
        """Return the operations of the iteration's next command; none for a transfer that is only queued."""
        command_class, phase = type(command), phase_of(command)
        position = self._position
        self._position += 1
        if position < len(self._known):
            known_class, known_phase, operations = self._known[position]
            if known_class is command_class and known_phase == phase:
                return operations
            del self._known[position:]
            self._reader = None
        if self._reader is None:
            self._reader = CommandReader(*self._of_rank)
            for known_class, known_phase, _ in self._known:
                self._reader.read(known_class, known_phase)
        operations = self._reader.read(command_class, phase)
        self._known.append((command_class, phase, operations))
        return operations
