"""The arguments of a command, declared once.

Each command has a dataclass. Hydra composes it from the words of the command line; the checks, the help,
the documentation and the shell completion are made from the same fields.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from perseus_ds.errors import ConfigError

# OmegaConf's mark of a value that must be given.
REQUIRED = "???"
# Beyond it, products of numbers could overflow.
_LARGEST = 1e18
_NAMES = {Path: "path", int: "whole number", float: "number", str: "text"}


def argument(description: str, default: Any = REQUIRED, *, at_least: float | None = None, word: bool = False) -> Any:
    """Return the dataclass field of an argument.

    Args:
        description: What the argument means.
        default: Its value when it is left out; without one it must be given.
        at_least: The smallest value of a number, or of each number of a list.
        word: Whether it may be given as a word of its own, without ``key=``.
    """
    metadata = {"description": description, "at_least": at_least, "word": word}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One declared argument.

    Attributes:
        name: The key of ``key=value``.
        types: The types that its value, or each value of a list, may have.
        is_list: Whether it takes several values.
        default: As declared.
        description: What it means.
        at_least: The smallest number allowed.
        word: Whether it may be given without ``key=``.
    """

    name: str
    types: tuple[type, ...]
    is_list: bool
    default: Any
    description: str
    at_least: float | None
    word: bool

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return bool(self.default == REQUIRED)

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false, and false where it is left out: ``--name`` makes it true."""
        return self.types == (bool,) and self.default is False

    @property
    def choices(self) -> dict[str, str]:
        """The values allowed, each with its meaning; empty where the type alone decides."""
        if issubclass(self.types[0], Enum):
            return {choice.name: str(choice.value) for choice in self.types[0]}
        return {"true": "", "false": ""} if self.types[0] is bool else {}

    @property
    def kind(self) -> str:
        """The values allowed, in words: ``whole number, at least 1``."""
        if self.choices:
            return " or ".join(self.choices) if len(self.choices) < 3 else f"one of {', '.join(self.choices)}"
        if self.types[0] is dict:
            return "{key: value, …}"
        names = " or ".join(_NAMES[kind] for kind in self.types)
        limit = "" if self.at_least is None else f", at least {self.at_least:g}"
        return f"{names}{limit}{', or a [list, of, them]' if self.is_list else ''}"

    @property
    def expected(self) -> str:
        """``kind`` as part of a sentence."""
        return self.kind if self.choices else f"a {self.kind}"

    @property
    def default_text(self) -> str:
        """The default as a user writes it; empty where there is none to write."""
        if self.required or self.default is None or self.default in ([], {}):
            return ""
        if isinstance(self.default, Enum):
            return self.default.name
        if isinstance(self.default, list):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type is within the limits."""
        values = value if self.is_list and value is not None else [value]
        if self.is_list and self.required and not values:
            return False
        numbers = [number for number in values if isinstance(number, (int, float))]
        return all(abs(n) <= _LARGEST and (self.at_least is None or n >= self.at_least) for n in numbers)


def arguments_of(declaration: type) -> dict[str, Argument]:
    """Return the arguments that a command's dataclass declares, by name and in its order."""
    hints = typing.get_type_hints(declaration)
    return {field.name: _argument(field, hints[field.name]) for field in dataclasses.fields(declaration)}


def _argument(field: dataclasses.Field[Any], hint: Any) -> Argument:
    hint = _without_none(hint)
    is_list = typing.get_origin(hint) is list
    hint = _without_none(typing.get_args(hint)[0]) if is_list else hint
    union = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    kinds = tuple(typing.get_origin(kind) or kind for kind in union)
    return Argument(field.name, kinds, is_list, default, **field.metadata)


def _without_none(hint: Any) -> Any:
    if not isinstance(hint, types.UnionType):
        return hint
    left = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return left[0] if len(left) == 1 else hint


def require(command: str, arguments: object, *names: str) -> None:
    """Check that arguments are there which only some uses of a command need.

    Raises:
        ConfigError: Some are not; the message names all of them.
    """
    missing = [name for name in names if getattr(arguments, name) in (None, [], {})]
    if missing:
        raise missing_error(command, missing)


def missing_error(command: str, names: Sequence[str]) -> ConfigError:
    """Return the error that names all arguments that are missing."""
    verb = "is" if len(names) == 1 else "are"
    written = " ".join(f"{name}=…" for name in names)
    see = f'(see "perseus-ds {command} --help")'
    return ConfigError(f"{' and '.join(names)} {verb} missing: write {written} {see}.")
