"""Instructions, to which a frequency plan assigns clocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(str, enum.Enum):
    """The computation of an instruction."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    """The part of a split backward that computes gradients of activations; the previous stage waits for them."""
    BACKWARD_WEIGHT = "backward_weight"
    """The part of a split backward that computes gradients of weights; no stage waits for them."""
    RECOMPUTE = "recompute"
    """A forward run again before its backward (activation checkpointing as a separate instruction)."""
    FORWARD_BACKWARD = "forward_backward"
    """A forward pass and a backward pass as one step, in general of two micro-batches, which overlap."""
    TAIL = "tail"
    """Gradient reduction and optimizer step, once per iteration."""

    def __str__(self) -> str:
        return self.value

    # Enum's hash is written in Python, and instructions are looked up during training.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One kind of work of one stage on one micro-batch.

    Attributes:
        stage: Stage index, 0 first. For ``forward_backward``, the stage of the forward pass.
        kind: The computation.
        micro_batch: Micro-batch index within the iteration, 0 first, and 0 for the tail. For ``forward_backward``, the
            micro-batch of the forward pass.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        if self.kind is Kind.TAIL:
            return f"tail of stage {self.stage}"
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"
