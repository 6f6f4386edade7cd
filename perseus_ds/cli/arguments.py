"""The arguments of a command, declared once.

Each command has a dataclass. OmegaConf fills it in from the words of the command line; the checks, the help, the
documentation and the shell completion are made from the same fields.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from perseus_ds.errors import ConfigError

Declared = TypeVar("Declared")

# OmegaConf's mark of a value that must be given.
REQUIRED = "???"
# Beyond it, products of numbers could overflow.
_LARGEST = 1e18
_NAMES = {Path: "path", int: "whole number", float: "number", str: "text"}
# Name, keys below it, value. The + with which Hydra adds keys is not needed here.
_ASSIGNMENT = re.compile(r"\+*([A-Za-z_]\w*)((?:\.\w+)*)=(.*)", re.DOTALL)
# A value in a list or an object in YAML.
_TIME_OF_DAY = re.compile(r"([:\[{,]\s*)(\d\d?:\d\d)(?=\s*[,\]}])")


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
    """One declared argument: its key, the types of its value (or of each value of a list), and what it means."""

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
    def is_text(self) -> bool:
        """Whether its value, or each value of a list, is what was written, without quotes."""
        return {Path, str} >= set(self.types)

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
    """Return a command's arguments, as OmegaConf reads and converts them.

    Args:
        command: The command's name, for messages.
        declaration: The dataclass that declares the arguments.
        words: ``key=value`` with values in YAML, and words of their own for the arguments that allow it.

    Raises:
        ConfigError: Arguments are unknown, of the wrong type, missing, or out of their limits. The message names all
            of those with the first of these problems.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = arguments_of(declaration)
    config = OmegaConf.structured(declaration)
    OmegaConf.set_readonly(config, False)  # the dataclass is frozen; what is made of this will be so again
    problems = []
    for name, below, text in _assignments(command, known, words):
        value = _read(known[name], text)
        try:
            OmegaConf.update(config, f"{name}{below}", value)
        except OmegaConfBaseException:
            problems.append(_expectation(known[name], value))
    _raise_if_any(problems)
    if missing := [name for name in known if OmegaConf.is_missing(config, name)]:
        raise missing_error(command, missing)
    try:
        arguments = cast("Declared", OmegaConf.to_object(config))
    except OmegaConfBaseException as error:  # a variable that there is not
        raise ConfigError(f"these arguments cannot be read ({str(error).splitlines()[0]}).") from None
    given = [(argument, getattr(arguments, name)) for name, argument in known.items()]
    _raise_if_any([_expectation(argument, value) for argument, value in given if not argument.allows(value)])
    return arguments


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _expectation(argument: Argument, found: object) -> str:
    from perseus_ds.artifacts.validation import did_you_mean, expectation

    return expectation(argument.name, argument.expected, found, did_you_mean(found, argument.choices))


def _assignments(
    command: str, known: dict[str, Argument], words: Sequence[str]
) -> list[tuple[str, str, str | list[str]]]:
    """Return of each argument given its name, the keys below it that precede the ``=``, and the text or texts."""
    from perseus_ds.artifacts.validation import did_you_mean

    found: list[tuple[str, str, str | list[str]]] = []
    loose, problems = [], []
    for word in words:
        switch = known.get(word[2:]) if word.startswith("--") else None
        match = _ASSIGNMENT.fullmatch(f"{switch.name}=true" if switch is not None and switch.is_switch else word)
        if not match:
            loose.append(word)
        elif match[1] not in known or (match[2] and dict not in known[match[1]].types):
            hint = did_you_mean(match[1], known) or f"arguments are {', '.join(known)}."
            problems.append(f"{match[1]}{match[2]}: there is no such argument; {hint}")
        else:
            found.append((match[1], match[2], match[3]))
    given = {name for name, _, _ in found}
    free = [argument for argument in known.values() if argument.word and argument.name not in given]
    lists: dict[str, list[str]] = {}
    # A choice may stand anywhere; the other words are for the other arguments, in their order.
    for word in sorted(loose, key=lambda word: not any(word in argument.choices for argument in free)):
        argument = next((each for each in free if word in each.choices), free[0] if free else None)
        if argument is None or word.startswith("-"):
            hint = did_you_mean(word.lstrip("-").partition("=")[0], known) or f'see "perseus-ds {command} --help".'
            problems.append(f"{word!r}: expected key=value; {hint}")
        elif argument.is_list:  # all words that are left
            lists.setdefault(argument.name, []).append(word)
        else:
            free.remove(argument)
            found.append((argument.name, "", [word] if argument.is_text else word))
    _raise_if_any(problems)
    return [*found, *((name, "", texts) for name, texts in lists.items())]


def _read(argument: Argument, text: str | list[str]) -> Any:
    """Return the value that a text means; paths and other texts need no quotes, and a list no brackets."""
    if argument.is_text and not argument.is_list:
        return None if text == "null" else _literal("".join(text))
    value = text if isinstance(text, list) else _yaml(text, is_list=argument.is_list)
    return [_literal(str(each)) for each in value] if argument.is_text and value is not None else value


def _literal(text: str) -> str:
    """Return a text in which OmegaConf finds no variable."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _yaml(text: str, *, is_list: bool) -> Any:
    """Return the value of a text in YAML; the text itself where it is none, such as a path with a bracket."""
    from omegaconf import OmegaConf

    lacks_brackets = is_list and text != "null" and not text.startswith("[")
    try:
        # YAML takes 17:00 for a number to the base 60.
        value = _TIME_OF_DAY.sub(r"\1'\2'", f"[{text}]" if lacks_brackets else text)
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index, call-overload]
    except Exception:  # there are many ways to be no YAML
        return [text] if is_list else text
