"""The arguments of a command, declared once.

Each command is a dataclass. The words of the command line become its values; the checks, the help, the documentation
and the shell completion are made from its fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from perseus_ds.errors import ConfigError


class Command(Protocol):
    """A command: a dataclass of its arguments, whose docstring is its help."""

    examples: ClassVar[tuple[str, ...]]

    def execute(self) -> int:
        """Do it, and return the exit code."""


Declared = TypeVar("Declared", bound=Command)

# Beyond it, products of numbers could overflow.
_LARGEST = 1e18
_NAMES = {Path: "path", int: "whole number", float: "number", str: "text"}
# Name, key below it, value.
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\.(\w+))?=(.*)", re.DOTALL)


def argument(
    description: str, default: Any = dataclasses.MISSING, *, at_least: float | None = None, word: bool = False
) -> Any:
    """Return the dataclass field of an argument.

    Args:
        description: What the argument means.
        default: Its value when it is left out; without one it must be given.
        at_least: The smallest value of a number, or of each number of a list.
        word: Whether it may be given as a word of its own, without ``key=``.
    """
    metadata = {"description": description, "at_least": at_least, "word": word}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def blocking_power_argument() -> Any:
    """Return the field of the power of a waiting GPU, where a profile may hold it."""
    return argument(
        "power of a GPU that waits for its neighbour [W]; by default what profile.json says", None, at_least=0
    )


def schedule_argument() -> Any:
    """Return the field of a schedule's name, where a profile may hold the schedule."""
    return argument(
        "1f1b, dualpipev or package.module:Class, which is imported; by default what profile.json holds, else 1f1b",
        None,
    )


@dataclasses.dataclass(frozen=True)
class Argument:
    """One declared argument: its key, the type of its value (or of each value of a list), and what it means."""

    name: str
    type: type[Any]
    is_list: bool
    default: Any
    description: str
    at_least: float | None
    word: bool

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false, and false where it is left out: ``--name`` makes it true."""
        return self.default is False

    @property
    def choices(self) -> dict[str, str]:
        """The values allowed, each with its meaning; empty where the type alone decides."""
        if issubclass(self.type, Enum):
            return {choice.name: str(choice.value) for choice in self.type}
        return {"true": "", "false": ""} if self.type is bool else {}

    @property
    def kind(self) -> str:
        """The values allowed, in words: ``whole number, at least 1``."""
        if self.choices:
            return " or ".join(self.choices) if len(self.choices) < 3 else f"one of {', '.join(self.choices)}"
        if self.type is dict:
            return "{key: value, …}"
        limit = "" if self.at_least is None else f", at least {self.at_least:g}"
        return f"{_NAMES[self.type]}{limit}{', or a [list, of, them]' if self.is_list else ''}"

    @property
    def default_text(self) -> str:
        """The default as a user writes it; empty where there is none to write."""
        if self.required or self.default in (None, [], {}):
            return ""
        if isinstance(self.default, Enum):
            return self.default.name
        if isinstance(self.default, list):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def read(self, text: str, key: str = "") -> Any:
        """Return the value that a text means, or with a key the object in which the text is the value of that key.

        Raises:
            ConfigError: There is none, or it is beyond the limits.
        """
        try:
            if self.type is dict:
                found = _with_numbers({key: _in_yaml(text)} if key else _in_yaml(text))
                if isinstance(found, dict):
                    return found
                raise ValueError(found)
            if not self.is_list:
                return self.read_one(text)
            found = _in_yaml(text if text.startswith("[") else f"[{text}]")
            values = [self.read_one(str(each)) for each in (found if isinstance(found, list) else [text])]
            if self.required and not values:
                raise ValueError(values)
            return values
        except (KeyError, ValueError):
            from perseus_ds.artifacts.validation import did_you_mean, expectation

            expected = self.kind if self.choices else f"a {self.kind}"
            raise ConfigError(expectation(self.name, expected, text, did_you_mean(text, self.choices))) from None

    def read_one(self, text: str) -> Any:
        """Return the value, or one of a list, that a text means."""
        if issubclass(self.type, Enum):
            return self.type[text]
        if self.type is bool:
            return {"true": True, "false": False}[text]
        value = self.type(text)
        least = -_LARGEST if self.at_least is None else self.at_least
        if isinstance(value, (int, float)) and not least <= value <= _LARGEST:
            raise ValueError(value)
        return value


def arguments_of(command: type[Any]) -> dict[str, Argument]:
    """Return the arguments of a command, by name and in its order."""
    hints = typing.get_type_hints(command)
    found = {}
    for field in dataclasses.fields(command):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):  # with None
            hint = typing.get_args(hint)[0]
        outer = typing.get_origin(hint)
        kind = typing.get_args(hint)[0] if outer is list else outer or hint
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = Argument(field.name, kind, outer is list, default, **field.metadata)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Which run, and which files belong to it."""

    run: Path = argument(
        "output_dir of a training run, or a folder of several with their profile and frontier", word=True
    )
    out: Path | None = argument(
        "file to write, or an existing folder for it; by default in the folder of the run", None
    )
    frontier: Path | None = argument(
        "frontier.json or its folder; by default in the folder of the run, or where the run says it took it from", None
    )
    profile: Path | None = argument(
        "profile.csv or its folder; by default in the folder of the run, or where the frontier says it came from", None
    )
    runs: list[Path] = argument("output folders of training runs, instead of those in the folder of the run", [])


def require(command: str, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that a command has the arguments that it needs.

    Raises:
        ConfigError: Some are missing; the message names all of them.
    """
    if missing := [name for name in names if values.get(name) in (None, [], {})]:
        verb, written = "is" if len(missing) == 1 else "are", " ".join(f"{name}=…" for name in missing)
        see = f'(see "perseus-ds {command} --help")'
        raise ConfigError(f"{' and '.join(missing)} {verb} missing: write {written} {see}.")


def read_amount(name: str, text: str, expected: str, sizes: Mapping[str, float]) -> float:
    """Return an amount that is written with its unit, or as several such parts, like ``1h30m``.

    Raises:
        ConfigError: It is none.
    """
    part = rf"(\d{{1,12}}(?:\.\d{{1,9}})?) ?({'|'.join(sizes)})"
    if re.fullmatch(f"(?:{part})+", text) is None:
        raise ConfigError(f"{name}={text}: expected {expected}.")
    return sum(float(number) * sizes[unit] for number, unit in re.findall(part, text))


def parse(name: str, command: type[Declared], words: Sequence[str]) -> Declared:
    """Return a command with the arguments in words, ``key=value``; lists and objects are written as in YAML.

    Raises:
        ConfigError: An argument is unknown, of the wrong type or beyond its limits, or some are missing.
    """
    from perseus_ds.artifacts.validation import did_you_mean

    known = arguments_of(command)
    values: dict[str, Any] = {}
    loose = []
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            key, part, text = match.groups()
            if key not in known or (part and known[key].type is not dict):
                hint = did_you_mean(key, known) or f"arguments are {', '.join(known)}."
                raise ConfigError(f"{word.partition('=')[0]}: there is no such argument; {hint}")
            value = known[key].read(text, part or "")
            values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        elif word.startswith("--") and word[2:] in known and known[word[2:]].is_switch:
            values[word[2:]] = True
        else:
            loose.append(word)
    free = [argument for argument in known.values() if argument.word and argument.name not in values]
    # A choice may stand anywhere; the other words are for the other arguments, in their order.
    for word in sorted(loose, key=lambda word: not any(word in argument.choices for argument in free)):
        argument = next((each for each in free if word in each.choices), free[0] if free else None)
        if argument is None or word.startswith("-"):
            hint = did_you_mean(word.lstrip("-").partition("=")[0], known) or f'see "perseus-ds {name} --help".'
            raise ConfigError(f"{word!r}: expected key=value; {hint}")
        if argument.is_list:  # all words that are left
            values.setdefault(argument.name, []).append(argument.read_one(word))
        else:
            free.remove(argument)
            values[argument.name] = argument.read(word)
    require(name, values, [key for key, argument in known.items() if argument.required])
    return command(**values)


def _in_yaml(text: str) -> Any:
    """Return what a text means in YAML, with texts for all values; the text itself where it is no YAML."""
    import yaml

    try:
        return yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):  # such as a path with a bracket
        return text


def _with_numbers(value: Any) -> Any:
    """Return an object of YAML with numbers, true and false in place of their texts; YAML takes 17:00 for a number."""
    if isinstance(value, dict):
        return {key: _with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    try:
        return json.loads(value)
    except ValueError:
        return value
