"""The arguments of a command, declared once.

Each command has a dataclass. The words of the command line become its values; the checks, the help, the documentation
and the shell completion are made from the same fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from perseus_ds.errors import ConfigError

Declared = TypeVar("Declared")

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
        """Whether it must be given."""
        return self.default is dataclasses.MISSING

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false, and false where it is left out: ``--name`` makes it true."""
        return self.type is bool and self.default is False

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
        if self.required or self.default is None or self.default in ([], {}):
            return ""
        if isinstance(self.default, Enum):
            return self.default.name
        if isinstance(self.default, list):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def value(self, given: Any) -> Any:
        """Return the value that a text means, or the texts of a list, or an object.

        Raises:
            ConfigError: There is none, or it is beyond the limits.
        """
        try:
            value = [self._value(text) for text in given] if self.is_list else self._value(given)
        except (KeyError, ValueError):
            raise self.refusal(given) from None
        if value == [] and self.required:
            raise self.refusal(given)
        return value

    def refusal(self, given: Any) -> ConfigError:
        """Return the error that says what was expected instead."""
        from perseus_ds.artifacts.validation import did_you_mean, expectation

        expected = self.kind if self.choices else f"a {self.kind}"
        return ConfigError(expectation(self.name, expected, given, did_you_mean(given, self.choices)))

    def _value(self, given: Any) -> Any:
        if issubclass(self.type, Enum):
            return self.type[given]
        if self.type is bool:
            return {"true": True, "false": False}[given]
        value = self.type(given)
        least = -_LARGEST if self.at_least is None else self.at_least
        if isinstance(value, (int, float)) and not least <= value <= _LARGEST:
            raise ValueError(value)
        return value


def arguments_of(declaration: type) -> dict[str, Argument]:
    """Return the arguments that a command's dataclass declares, by name and in its order."""
    hints = typing.get_type_hints(declaration)
    found = {}
    for field in dataclasses.fields(declaration):
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


def parse(command: str, declaration: type[Declared], words: Sequence[str]) -> Declared:
    """Return a command's arguments from words, ``key=value``; lists and objects are written as in YAML.

    Raises:
        ConfigError: An argument is unknown, of the wrong type or beyond its limits, or some are missing.
    """
    known = arguments_of(declaration)
    values = {name: known[name].value(given) for name, given in _given(command, known, words).items()}
    if missing := [name for name, each in known.items() if each.required and name not in values]:
        raise missing_error(command, missing)
    return declaration(**values)


def _given(command: str, known: dict[str, Argument], words: Sequence[str]) -> dict[str, Any]:
    """Return by name what is given of each argument: a text, the texts of a list, or an object."""
    from perseus_ds.artifacts.validation import did_you_mean

    given: dict[str, Any] = {}
    loose = []
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            name, key, text = match.groups()
            if name not in known or (key and known[name].type is not dict):
                hint = did_you_mean(name, known) or f"arguments are {', '.join(known)}."
                raise ConfigError(f"{word.partition('=')[0]}: there is no such argument; {hint}")
            if known[name].type is dict:
                written = _with_numbers({key: _in_yaml(text)} if key else _in_yaml(text))
                if not isinstance(written, dict):
                    raise known[name].refusal(text)
                given[name] = given.get(name, {}) | written
            else:
                given[name] = _texts(text) if known[name].is_list else text
        elif word.startswith("--") and word[2:] in known and known[word[2:]].is_switch:
            given[word[2:]] = "true"
        else:
            loose.append(word)
    free = [argument for argument in known.values() if argument.word and argument.name not in given]
    # A choice may stand anywhere; the other words are for the other arguments, in their order.
    for word in sorted(loose, key=lambda word: not any(word in argument.choices for argument in free)):
        argument = next((each for each in free if word in each.choices), free[0] if free else None)
        if argument is None or word.startswith("-"):
            hint = did_you_mean(word.lstrip("-").partition("=")[0], known) or f'see "perseus-ds {command} --help".'
            raise ConfigError(f"{word!r}: expected key=value; {hint}")
        if argument.is_list:  # all words that are left
            given.setdefault(argument.name, []).append(word)
        else:
            free.remove(argument)
            given[argument.name] = word
    return given


def _texts(text: str) -> list[str]:
    """Return the texts of a list, which needs no brackets."""
    found = _in_yaml(text if text.startswith("[") else f"[{text}]")
    return [str(each) for each in found] if isinstance(found, list) else [text]


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
