"""Finds the variables outside of the engine that the functions of a client's passes assign, such as counters."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from perseus_ds.engine.generators import State, is_filled

_NOT_OF_CLIENTS = ("deepspeed", "perseus_ds", "torch")


def find_assigned_variables(functions: Iterable[Any]) -> list[State]:
    """Return the numbers and texts in global and enclosed variables that functions assign.

    Functions that these refer to by a global or enclosed name are searched too; those of DeepSpeed and torch are not.

    Args:
        functions: Such as the functions of an engine's commands and the forwards of layers; other objects are left out.
    """
    found: dict[tuple[int, str], State] = {}
    for function in _reachable_functions(functions):
        place = f"{function.__module__}.{function.__qualname__}"
        enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {name: cell for name, cell in enclosed if is_filled(cell)}
        for instruction in dis.get_instructions(function.__code__):
            name = instruction.argval
            if instruction.opname == "STORE_GLOBAL" and _is_plain(function.__globals__.get(name)):
                found[id(function.__globals__), name] = _global(f"{function.__module__}.{name}", function, name)
            elif instruction.opname == "STORE_DEREF" and name in cells and _is_plain(cells[name].cell_contents):
                found[id(cells[name]), name] = _enclosed(f"{place}.{name}", cells[name])
    return list(found.values())


def _global(label: str, function: FunctionType, name: str) -> State:
    variables = function.__globals__
    return State(label, lambda: variables.get(name), lambda value: variables.__setitem__(name, value))


def _enclosed(label: str, cell: CellType) -> State:
    return State(label, lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None)


def _reachable_functions(functions: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions of clients among these, and those that they refer to by a global or enclosed name."""
    stack, seen = list(functions), set[int]()
    while stack:
        function = stack.pop()
        function = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        stack += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        if str(function.__module__).split(".")[0] not in _NOT_OF_CLIENTS:
            stack += [function.__globals__.get(name) for name in function.__code__.co_names]
            yield function
