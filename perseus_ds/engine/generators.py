"""Finds every random-number generator that the passes of a model may draw from, and puts their states back."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST_OBJECTS = 200_000
_LARGEST_VARIABLE = 100
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, ModuleType, type)


@dataclass(frozen=True)
class State:
    """Something outside of the engine that passes change, such as the state of a random-number generator.

    Attributes:
        name: As in messages.
        get: Returns a copy of it.
        put: Puts a copy back.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def find_generators(roots: Iterable[Any]) -> list[State]:
    """Return the generators of Python, numpy and torch, those in variables of modules, and those that objects hold.

    Trackers of generator states, such as those of DeepSpeed's and Megatron's tensor parallelism, are found by
    their methods ``get_states`` and ``set_states``.

    Args:
        roots: Objects to search, such as layers and loss function: their attributes, the items of containers and
            the variables that functions enclose.
    """
    found = [
        State("generator random", random.getstate, random.setstate),
        State("generator numpy.random", np.random.get_state, np.random.set_state),
        State("generator torch", lambda: torch.get_rng_state().clone(), torch.set_rng_state),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [_cuda(index) for index in range(torch.cuda.device_count())]
    seen: set[int] = set()
    for name, value in [*_module_variables(), *(("the model", value) for value in _reachable(roots))]:
        if id(value) not in seen and (generator := _as_generator(name, value)) is not None:
            seen.add(id(value))
            found.append(generator)
    return found


def _cuda(index: int) -> State:
    return State(
        f"generator torch.cuda:{index}",
        lambda: torch.cuda.get_rng_state(index).clone(),
        lambda state: torch.cuda.set_rng_state(state, index),
    )


def _module_variables() -> Iterator[tuple[str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if not issubclass(type(value), _LEAVES):
                    yield f"{module_name}.{name}", value
                if type(value) in (dict, list, tuple) and len(value) <= _LARGEST_VARIABLE:
                    items = value.values() if isinstance(value, dict) else value
                    yield from [(f"{module_name}.{name}", item) for item in items]


def _as_generator(name: str, value: Any) -> State | None:
    kind = type(value)
    name = f"generator {name} ({kind.__name__})"
    if issubclass(kind, torch.Generator):
        return State(name, lambda: value.get_state().clone(), value.set_state)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return State(name, value.getstate, value.setstate)
    if issubclass(kind, np.random.RandomState):
        return State(name, value.get_state, value.set_state)
    if issubclass(kind, np.random.Generator):
        bits = value.bit_generator
        return State(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    if _is_tracker(value):
        return State(name, lambda: _copied(value.get_states()), lambda states: value.set_states(_copied(states)))
    return None


def _is_tracker(value: Any) -> bool:
    """Whether an object keeps states of generators by name, and lets them be set."""
    kind = type(value)
    if not (callable(getattr(kind, "get_states", None)) and callable(getattr(kind, "set_states", None))):
        return False
    try:
        return isinstance(value.get_states(), Mapping)
    except Exception:  # something else of the same name
        return False


def _copied(states: Any) -> Any:
    if isinstance(states, Mapping):
        return {name: _copied(state) for name, state in states.items()}
    if isinstance(states, torch.Generator):
        return states.clone_state()
    return states.clone() if torch.is_tensor(states) else states


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every object that the roots hold, the roots included."""
    stack, seen = list(roots), set[int]()
    while stack and len(seen) < _MOST_OBJECTS:
        value = stack.pop()
        if id(value) in seen or issubclass(type(value), _LEAVES):
            continue
        seen.add(id(value))
        yield value
        stack.extend(_held_by(value))


def _held_by(value: Any) -> Iterable[Any]:
    if issubclass(type(value), dict):
        return list(value.values())
    if issubclass(type(value), list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, BuiltinFunctionType):
        return [value.__self__]
    return list(getattr(value, "__dict__", {}).values())


def is_filled(cell: Any) -> bool:
    """Whether an enclosed variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
