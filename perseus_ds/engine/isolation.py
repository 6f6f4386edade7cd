"""Keeps repeated passes out of training: saves all that they change, puts it back, and checks that it is back."""

from __future__ import annotations

import copy
import logging
import queue
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from perseus_ds.engine.assigned_variables import find_assigned_variables
from perseus_ds.engine.deepspeed_contract import CHECKPOINTING_STATE, GRADIENT_METHODS, PASS_STATE, SHAPES_KEPT
from perseus_ds.engine.generators import State, find_generators

logger = logging.getLogger("perseus_ds")
_ABSENT: Any = object()
_GRADIENT_STORE = "WeightGradStore"
_PART_BYTES = 1 << 26


@contextmanager
def isolated(engine: Any) -> Iterator[None]:
    """Leave an engine, its gradients, its modules, random-number generators and counters of passes as they were.

    Afterwards everything that was to be left alone is compared with how it was before, and a difference is a
    warning that names it: parameters, optimizer state, buffers, generators, variables and plain attributes.

    Args:
        engine: A DeepSpeed ``PipelineEngine``.
    """
    outside = find_generators([engine.module, engine.module.loss_fn]) + find_assigned_variables(_functions(engine))
    restore = _saved(engine, outside)
    before = fingerprint(engine, outside)
    engine.pipe_buffers = {key: [None] * len(slots) for key, slots in engine.pipe_buffers.items()}
    engine.total_loss = None
    engine.fwd_outputs = []
    for name in set(SHAPES_KEPT) & vars(engine).keys():  # inputs that are repeated may be of an earlier shape
        setattr(engine, name, None)
    try:
        yield
    finally:
        restore()
        changed = differences(before, fingerprint(engine, outside))
        if changed:
            logger.warning(
                "perseus: measuring changed %s on rank %d, which it could not put back: training goes on from there. "
                'Use "mode": "auto", which measures without repeating passes.',
                ", ".join(changed),
                engine.global_rank,
            )


def fingerprint(engine: Any, outside: list[State]) -> dict[str, Any]:
    """Return a value for each thing that repeated passes must leave alone; equal values mean equal bits."""
    found: dict[str, Any] = weights_fingerprint(engine)
    for name, buffer in engine.module.named_buffers():
        found[f"buffer {name}"] = _checksum(buffer)
    for state in outside:
        found[state.name] = _plain(state.get())
    for owner_name, owner in _owners(engine):
        for name, value in _plain_attributes(owner).items():
            found[f"{owner_name}.{name}"] = repr(value)  # NaN differs from itself
    return found


def weights_fingerprint(engine: Any) -> dict[str, Any]:
    """Return a value for each parameter and each tensor of the optimizer's state; equal values mean equal bits."""
    found = {f"parameter {name}": _checksum(p) for name, p in engine.module.named_parameters()}
    return found | {f"optimizer tensor {i}": _checksum(t) for i, t in enumerate(optimizer_tensors(engine))}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not as before."""
    return [name for name in before if name not in after or before[name] != after[name]]


def optimizer_tensors(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that the optimizer updates: its parameters, which may be copies, and their states."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in (engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
        for group in getattr(optimizer, "param_groups", None) or ():
            found.update({id(p): p for p in group.get("params", ()) if torch.is_tensor(p)})
        states = getattr(optimizer, "state", None)
        for state in states.values() if isinstance(states, Mapping) else ():
            values = state.values() if isinstance(state, Mapping) else ()
            found.update({id(v): v for v in values if torch.is_tensor(v)})
    return list(found.values())


def _saved(engine: Any, outside: list[State]) -> Callable[[], None]:
    """Save what passes change; returns a function that puts it back."""
    pass_state = {name: vars(engine).get(name, _ABSENT) for name in PASS_STATE}
    attributes = [(owner, _plain_attributes(owner)) for _, owner in _owners(engine)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in engine.module.buffers()]
    states = [(state, state.get()) for state in outside]
    offsets = {name: _list_copied(getattr(checkpointing, name, _ABSENT)) for name in CHECKPOINTING_STATE}
    stores = [(store, name, _queue_copied(value)) for store in _gradient_stores() for name, value in _variables(store)]

    def restore() -> None:
        for state, kept in states:
            state.put(kept)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        _drop_gradients(engine)
        for owner, values in attributes:
            vars(owner).update(values)
        for name, value in pass_state.items():
            _assign(engine, name, value)
        for name, value in offsets.items():
            _assign(checkpointing, name, value)
        for store, name, value in stores:
            setattr(store, name, value)

    return restore


def drop_checkpoints() -> None:
    """Drop the checkpoints of activations that forwards keep in one buffer for all of them, as the backward does."""
    for name in CHECKPOINTING_STATE:
        if isinstance(getattr(checkpointing, name, None), list):
            setattr(checkpointing, name, [])


def _assign(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _functions(engine: Any) -> list[Any]:
    """Return the functions that passes run: those of commands, of layers and of the loss."""
    forwards = [type(module).forward for module in engine.module.modules()]
    return [*engine._INSTRUCTION_MAP.values(), *forwards, *engine.module.forward_funcs, engine.module.loss_fn]


def _owners(engine: Any) -> list[tuple[str, Any]]:
    """Return the objects whose counters and flags count: PipelineModule numbers its forwards, to seed its layers."""
    modules = [(f"module {name}".rstrip(), module) for name, module in engine.module.named_modules()]
    return [("engine", engine), *modules] + ([("optimizer", engine.optimizer)] if engine.optimizer else [])


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """Return counters, flags and texts."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, int | float | str | None)}


def _gradient_stores() -> list[type]:
    """Return the classes that keep what a split backward leaves for later, as zero-bubble schedules have them."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    found = {id(s): s for m in modules if isinstance(s := vars(m).get(_GRADIENT_STORE), type)}
    return list(found.values())


def _variables(store: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(store).items() if isinstance(value, list | dict | int | queue.Queue)]


def _list_copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list) else value


def _queue_copied(value: Any) -> Any:
    if isinstance(value, queue.Queue):
        copied: queue.Queue[Any] = type(value)(value.maxsize)
        copied.queue.extend(value.queue)
        return copied
    return copy.copy(value)


def _drop_gradients(engine: Any) -> None:
    """Drop gradients as the engine does after its own step."""
    engine.zero_grad()
    for clear in GRADIENT_METHODS:
        if hasattr(engine.optimizer, clear):
            getattr(engine.optimizer, clear)()


def _checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two sums over the bits of a tensor, the second of which changes when values swap places."""
    plain, ordered = 0, 0
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for number, part in enumerate(bits.split(_PART_BYTES)):  # a flat partition of ZeRO may fill half of the GPU
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).clone().view(torch.int64)
        order = torch.arange(1, len(words) + 1, device=words.device)
        plain += int(words.sum())
        ordered += (number + 1) * int((words * order).sum())
    return plain, ordered


def _plain(state: Any) -> Any:
    """Return a generator's state as something that ``==`` compares."""
    if torch.is_tensor(state):
        return state.cpu().numpy().tobytes()
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, tuple | list):
        return [_plain(value) for value in state]
    return state.tobytes() if hasattr(state, "tobytes") else state
