"""Runs this rank's forwards and backwards again, outside of training and without a trace in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation


@dataclass
class _Tape:
    """What the first forward and backward of one stage worked on."""

    forward_arguments: dict[str, Any]
    data: dict[tuple[str, int], Any]
    backward_arguments: dict[str, Any] = field(default_factory=dict)
    received: dict[tuple[str, int], Any] = field(default_factory=dict)
    output_grad: Any = None
    input_grads: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class Replay:
    """Keeps what one forward and backward of each stage of this rank worked on in a real iteration.

    Works for any engine that keeps its tensors in ``pipe_buffers`` and ``grad_layer``, as DeepSpeed's
    pipeline engines do, DualPipeV included.

    Args:
        engine: A DeepSpeed ``PipelineEngine``.
        execute: Runs one instruction: called with kind and the arguments of the engine's command.
    """

    def __init__(self, engine: Any, execute: Any) -> None:
        self._engine = engine
        self._execute = execute
        self._tapes: dict[int, _Tape] = {}

    @property
    def instructions(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that can be run; a frozen stage has no backward."""
        found = []
        for stage, tape in sorted(self._tapes.items()):
            found.append((stage, Kind.FORWARD))
            if tape.backward_arguments:
                found.append((stage, Kind.BACKWARD))
        return tuple(found)

    def record(self, operation: Operation, arguments: dict[str, Any]) -> None:
        """Keep what an instruction is about to work on, if it is the first of its stage and kind."""
        if not isinstance(operation, Compute) or operation.instruction.micro_batch != 0:
            return
        instruction: Instruction = operation.instruction
        buffers = self._engine.pipe_buffers
        slot = arguments.get("buffer_id", 0)
        if instruction.kind is Kind.FORWARD:
            data = {(k, slot): _copy(buffers[k][slot]) for k in ("inputs", "labels") if buffers[k][slot] is not None}
            self._tapes[instruction.stage] = _Tape(dict(arguments), data)
        elif instruction.kind is Kind.BACKWARD and instruction.stage in self._tapes:
            tape = self._tapes[instruction.stage]
            tape.backward_arguments = dict(arguments)
            tape.output_grad = _copy(self._engine.grad_layer)
            if "grads" in buffers and buffers["grads"][slot] is not None:
                tape.received = {("grads", slot): _copy(buffers["grads"][slot])}
            # Where a pipeline turns around on one rank, the gradient is left on the next stage's inputs.
            tape.input_grads = {i: _grads(value) for i, value in enumerate(buffers["inputs"]) if i != slot}

    def run(self, stage: int, kind: Kind) -> None:
        """Run a forward again, or the backward of the last forward run."""
        tape = self._tapes[stage]
        buffers = self._engine.pipe_buffers
        if kind is Kind.FORWARD:
            for (key, slot), value in tape.data.items():
                buffers[key][slot] = _copy(value)
            self._execute(kind, tape.forward_arguments)
            return
        self._engine.grad_layer = tape.output_grad
        for (key, slot), value in tape.received.items():
            buffers[key][slot] = value
        for slot, grads in tape.input_grads.items():
            for tensor, grad in zip(_tensors(buffers["inputs"][slot]), grads, strict=False):
                tensor.grad = grad
        self._execute(kind, tape.backward_arguments)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leave the engine, gradients, module buffers and random number generators as they were."""
        engine = self._engine
        attributes = dict(vars(engine))
        # Modules count too: PipelineModule numbers its forwards, to seed its layers.
        counters = [(module, _plain_values(module)) for module in engine.module.modules()]
        states = [(buffer, buffer.detach().clone()) for buffer in engine.module.buffers()]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        engine.pipe_buffers = {key: [None] * len(slots) for key, slots in engine.pipe_buffers.items()}
        engine.total_loss = None
        engine.fwd_outputs = []
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            with torch.no_grad():
                for buffer, kept in states:
                    buffer.copy_(kept)
            for module, values in counters:
                vars(module).update(values)
            vars(engine).clear()
            vars(engine).update(attributes)
            _drop_gradients(engine)


def _plain_values(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}


def _drop_gradients(engine: Any) -> None:
    """Drop gradients as the engine does after its own step."""
    engine.zero_grad()
    if hasattr(engine.optimizer, "zero_grad"):
        engine.optimizer.zero_grad()


def _tensors(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return [value] if torch.is_tensor(value) else [item for item in value if torch.is_tensor(item)]


def _grads(value: Any) -> list[torch.Tensor | None]:
    return [None if t.grad is None else t.grad.detach().clone() for t in _tensors(value)]


def _copy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(_copy(item) for item in value)
    return value
