"""Runs this rank's forwards and backwards again, outside of training and without changing it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from perseus_ds.engine.isolation import (
    differences,
    drop_checkpoints,
    isolated,
    optimizer_tensors,
    weights_fingerprint,
)
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Operation

_OUTPUTS = ("outputs", "output_tensors")
_LOSSES = ("loss", "outputs", "total_loss", "total_additional_losses")


def spare_cuda_bytes() -> float | None:
    """Return the memory of the GPU that training has left free at its peak; None without a GPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()


@dataclass
class _Tape:
    """Inputs of the first forward and backward of one stage."""

    forward_arguments: dict[str, Any]
    data: dict[tuple[str, int], Any]
    backward_arguments: dict[str, Any] = field(default_factory=dict)
    received: dict[tuple[str, int], Any] = field(default_factory=dict)
    output_grad: Any = None
    input_grads: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)
    # Inputs of the next forward, copied before its time is taken.
    next_data: dict[tuple[str, int], Any] = field(default_factory=dict)

    def kept(self) -> list[torch.Tensor]:
        """Return the tensors that are kept beside those of training."""
        values = [*self.data.values(), *self.received.values(), *self.input_grads.values(), self.output_grad]
        return [tensor for value in values for tensor in tensors_of(value)]


class Replay:
    """Keeps the inputs of one forward and one backward of each stage of this rank, and runs them again.

    Works for any engine that keeps its tensors in ``pipe_buffers`` and ``grad_layer``, as DeepSpeed's
    pipeline engines do, DualPipeV included.

    Args:
        engine: A DeepSpeed ``PipelineEngine``.
        execute: Runs one instruction: called with kind and the arguments of the engine's command.
        spare_bytes: Returns how much memory of the device training has left free at its peak; None where it has no
            limit of its own.
    """

    def __init__(
        self,
        engine: Any,
        execute: Callable[[Kind, dict[str, Any]], None],
        spare_bytes: Callable[[], float | None] = spare_cuda_bytes,
    ) -> None:
        self._engine = engine
        self._execute = execute
        self._spare_bytes = spare_bytes
        self._tapes: dict[int, _Tape] = {}
        self._unknown: set[Kind] = set()
        self._no_memory = ""

    @property
    def instructions(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that can be run; a frozen stage has no backward."""
        found = []
        for stage, tape in sorted(self._tapes.items()):
            found.append((stage, Kind.FORWARD))
            if tape.backward_arguments:
                found.append((stage, Kind.BACKWARD))
        return tuple(found)

    def forget(self) -> None:
        """Drop what was recorded: the engine goes on with another schedule."""
        self._tapes.clear()
        self._unknown.clear()
        self._no_memory = ""

    def record(self, operation: Operation, arguments: dict[str, Any]) -> None:
        """Keep the inputs of an instruction that is about to run, if it is the first of its stage and kind."""
        try:
            self._record(operation, arguments)
        except torch.cuda.OutOfMemoryError:  # training must go on
            self._tapes.clear()
            self._no_memory = "the GPU has no memory left for copies of their inputs"

    def _record(self, operation: Operation, arguments: dict[str, Any]) -> None:
        if self._no_memory or not isinstance(operation, Compute) or operation.instruction.micro_batch != 0:
            return
        stage, kind = operation.instruction.stage, operation.instruction.kind
        buffers = self._engine.pipe_buffers
        slot = arguments.get("buffer_id", 0)
        if kind is Kind.FORWARD:
            data = {(k, slot): _copy(buffers[k][slot]) for k in ("inputs", "labels") if buffers[k][slot] is not None}
            self._tapes[stage] = _Tape(dict(arguments), data)
        elif kind is Kind.BACKWARD and stage in self._tapes:
            tape = self._tapes[stage]
            tape.backward_arguments = dict(arguments)
            tape.output_grad = _copy(self._engine.grad_layer)
            if "grads" in buffers and buffers["grads"][slot] is not None:
                tape.received = {("grads", slot): _copy(buffers["grads"][slot])}
            # Where a pipeline turns around on one rank, the gradient is left on the next stage's inputs.
            tape.input_grads = {i: _grads(value) for i, value in enumerate(buffers["inputs"]) if i != slot}
        elif kind is not Kind.TAIL:
            self._unknown.add(kind)

    def obstacle(self, agree: Callable[[str | None], str | None]) -> str | None:
        """Return why passes cannot be repeated without changing training; None if they can.

        A forward and a backward of each stage are run once, where all ranks have the memory for that. Parameters and
        optimizer state are compared and, if they changed, put back, for which the host's memory must have room.

        Args:
            agree: Returns the first reason of all ranks; every rank calls it at the same time.
        """
        return agree(self._known_obstacle()) or agree(self._found_by_running())

    def _found_by_running(self) -> str | None:
        try:
            return self._changed_by_passes()
        except Exception as error:  # such as no memory for it; the other ranks wait to be told
            return f"they cannot be run again ({type(error).__name__}: {error})"

    def _known_obstacle(self) -> str | None:
        if self._no_memory:
            return self._no_memory
        if self._unknown:
            return f"the schedule has {', '.join(sorted(self._unknown))}, which cannot be run again alone"
        hook = _foreign_hook(self._engine.module)
        return f"{hook} runs inside the backward and may train the model" if hook else self._lack_of_memory()

    def _lack_of_memory(self) -> str | None:
        """Return why the GPU may have too little memory; ranks that compute together would wait for one that stops."""
        spare_bytes = self._spare_bytes()
        if spare_bytes is None:
            return None
        kept = [*self._engine.module.buffers(), *(t for tape in self._tapes.values() for t in tape.kept())]
        needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        if spare_bytes >= needed_bytes:
            return None
        return (
            f"training leaves {spare_bytes / 2**20:.0f} MiB of a GPU free, and copies of what passes work on need "
            f"{needed_bytes / 2**20:.0f} MiB"
        )

    def _changed_by_passes(self) -> str | None:
        tensors = [*self._engine.module.parameters(), *optimizer_tensors(self._engine)]
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors] if _fit_into_memory(tensors) else []
        before = weights_fingerprint(self._engine)
        with isolated(self._engine):
            for stage, kind in self.instructions:
                self.prepare(stage, kind)
                self.run(stage, kind)
            changed = differences(before, weights_fingerprint(self._engine))
            with torch.no_grad():
                for tensor, value in zip(tensors if changed else (), kept, strict=False):
                    tensor.copy_(value)
        if not changed:
            return None
        return f"a repeated pass changes {changed[0]}" + ("" if kept else ", as it just did")

    def prepare(self, stage: int, kind: Kind) -> None:
        """Copy what the next forward works on, and let go of the last one: a pass of training begins without them."""
        if kind is Kind.FORWARD:
            self._drop_last_forward()
            tape = self._tapes[stage]
            tape.next_data = {key: _copy(value) for key, value in tape.data.items()}

    def run(self, stage: int, kind: Kind) -> None:
        """Run a forward again, or the backward of the last forward run, each after :meth:`prepare`."""
        tape = self._tapes[stage]
        buffers = self._engine.pipe_buffers
        if kind is Kind.FORWARD:
            data, tape.next_data = tape.next_data, {}
            for (key, slot), value in data.items():
                buffers[key][slot] = value
            self._execute(kind, tape.forward_arguments)
            return
        self._engine.grad_layer = tape.output_grad
        for (key, slot), value in tape.received.items():
            buffers[key][slot] = value
        for slot, grads in tape.input_grads.items():
            for tensor, grad in zip(tensors_of(buffers["inputs"][slot]), grads, strict=False):
                tensor.grad = grad
        self._execute(kind, tape.backward_arguments)

    def _drop_last_forward(self) -> None:
        """Drop outputs and losses, whose graph holds the activations of a whole micro-batch."""
        engine = self._engine
        for key in _OUTPUTS:
            if key in engine.pipe_buffers:
                engine.pipe_buffers[key] = [None] * len(engine.pipe_buffers[key])
        for name in _LOSSES:
            if name in vars(engine):
                setattr(engine, name, None)
        engine.fwd_outputs = []
        drop_checkpoints()

    def isolated(self) -> AbstractContextManager[None]:
        """Leave the engine, gradients, module buffers and random number generators as they were."""
        return isolated(self._engine)


def _fit_into_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the ranks of this node can keep copies of such tensors in half of the memory that is free."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", max(1, torch.cuda.device_count())))
    return ranks * sum(tensor.numel() * tensor.element_size() for tensor in tensors) < free_bytes / 2


def _foreign_hook(module: torch.nn.Module) -> str:
    """Return the name of a hook that runs when a gradient is ready and is not DeepSpeed's; empty if there is none."""
    for parameter in module.parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            owner = getattr(hook, "__module__", None) or type(hook).__module__
            if owner.split(".")[0] not in ("deepspeed", "torch"):
                return f"{owner}.{getattr(hook, '__qualname__', type(hook).__name__)}"
    return ""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a slot of ``pipe_buffers``: a tensor, a tuple of values, or nothing."""
    if value is None:
        return []
    return [value] if torch.is_tensor(value) else [item for item in value if torch.is_tensor(item)]


def _grads(value: Any) -> list[torch.Tensor | None]:
    return [None if t.grad is None else t.grad.detach().clone() for t in tensors_of(value)]


def _copy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(_copy(item) for item in value)
    return value
