"""From the words of a command line to the checked arguments of a command, by Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from perseus_ds.artifacts.validation import did_you_mean, expectation
from perseus_ds.cli.arguments import Argument, arguments_of, missing_error
from perseus_ds.errors import ConfigError

Declared = TypeVar("Declared")
# Name, keys below it, value. The + with which Hydra adds keys is not needed here.
_ASSIGNMENT = re.compile(r"\+*([A-Za-z_]\w*)((?:\.\w+)*)=(.*)", re.DOTALL)


class _Given(NamedTuple):
    """An argument, the value that was read for it, and the override that gives it to Hydra."""

    argument: Argument
    value: Any
    override: str


def compose(command: str, declaration: type[Declared], words: Sequence[str]) -> Declared:
    """Return a command's arguments.

    Args:
        command: The command's name, for messages.
        declaration: The dataclass that declares the arguments.
        words: ``key=value`` as Hydra reads it, and words of their own for the arguments that allow it.

    Raises:
        ConfigError: Arguments are unknown, of the wrong type, missing, or out of their limits. The message names all
            of those with the first of these problems.
    """
    known = arguments_of(declaration)
    given = [_read(*assignment) for assignment in _assignments(command, known, words)]
    arguments = _compose(command, declaration, given)
    values = [(argument, getattr(arguments, name)) for name, argument in known.items()]
    _raise_if_any(
        expectation(argument.name, argument.expected, value) for argument, value in values if not argument.allows(value)
    )
    return arguments


def quoted(path: Path | str) -> str:
    """Return a path as the value of an override, whatever is in its name."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(str(path), Quote.single).with_quotes())


def _raise_if_any(problems: Iterable[str]) -> None:
    if text := "\n".join(problems):
        raise ConfigError(text)


def _assignments(command: str, known: dict[str, Argument], words: Sequence[str]) -> list[tuple[Argument, str, str]]:
    """Return each argument given, with what follows its name before the ``=``, and the text after it."""
    found, loose, problems = [], [], []
    for word in words:
        match = _ASSIGNMENT.fullmatch(_without_dashes(word, known))
        if not match:
            loose.append(word)
        elif match[1] not in known or (match[2] and dict not in known[match[1]].types):
            hint = did_you_mean(match[1], known) or f"arguments are {', '.join(known)}."
            problems.append(f"{match[1]}{match[2]}: there is no such argument; {hint}")
        else:
            found.append((known[match[1]], match[2], match[3]))
    given = {argument.name for argument, _, _ in found}
    free = [argument for argument in known.values() if argument.word and argument.name not in given]
    words_of: dict[str, list[str]] = {}
    for argument, word in _place(loose, free):
        if argument is None:
            hint = did_you_mean(word.lstrip("-").partition("=")[0], known) or f'see "perseus-ds {command} --help".'
            problems.append(f"{word!r}: expected key=value; {hint}")
        else:
            words_of.setdefault(argument.name, []).append(quoted(word) if Path in argument.types else word)
    _raise_if_any(problems)
    for name, values in words_of.items():
        found.append((known[name], "", f"[{','.join(values)}]" if known[name].is_list else values[0]))
    return found


def _without_dashes(word: str, known: dict[str, Argument]) -> str:
    """Return ``name=true`` for ``--name`` if that is a switch; other words as they are."""
    argument = known.get(word.removeprefix("--")) if word.startswith("--") else None
    return f"{argument.name}=true" if argument is not None and argument.is_switch else word


def _place(words: list[str], free: list[Argument]) -> list[tuple[Argument | None, str]]:
    """Return the argument that each word without ``key=`` is for: the one it is a choice of, else the next one.

    A list takes all that are left.
    """
    places: dict[int, Argument] = {}
    for number, word in enumerate(words):
        chosen = next((argument for argument in free if word in argument.choices), None)
        if chosen is not None:
            places[number] = chosen
            free.remove(chosen)
    for number, word in enumerate(words):
        if number not in places and free and not word.startswith("-"):
            places[number] = free[0] if free[0].is_list else free.pop(0)
    return [(places.get(number), word) for number, word in enumerate(words)]


def _read(argument: Argument, below: str, text: str) -> _Given:
    """Let Hydra read a value; paths need no quotes, and one value is a list of one."""
    key = f"{argument.name}{below}"
    is_path = Path in argument.types
    try:
        value = _parse(key, text)
    except ValueError as error:
        if not is_path:
            raise ConfigError(
                f"{key}={text}: Hydra cannot read this value ({error}). Quote values with special characters twice: "
                f"'{key}=\"a=b\"'."
            ) from None
        value, text = text, quoted(text)
    if is_path and not isinstance(value, (str, list, type(None))):
        value, text = text, quoted(text)  # a folder whose name is a number
    if argument.is_list and not isinstance(value, (list, type(None))):
        value, text = [value], f"[{text}]"
    # Hydra adds the keys of a dictionary with ++; all other keys are declared.
    return _Given(argument, value, f"{'++' if dict in argument.types else ''}{key}={text}")


def _parse(key: str, text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return text if override.is_sweep_override() else override.value()


def _compose(command: str, declaration: type[Declared], given: Sequence[_Given]) -> Declared:
    from hydra import compose as hydra_compose
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node = OmegaConf.structured(declaration)
    OmegaConf.set_readonly(node, False)  # Hydra fills it in; the dataclass made of it is frozen again
    ConfigStore.instance().store(name=command, node=node)

    def fits(override: str) -> bool:
        try:
            hydra_compose(command, overrides=[override])
        except (HydraException, OmegaConfBaseException):
            return False
        return True

    with initialize(config_path=None, version_base=None):
        try:
            config = hydra_compose(command, overrides=[each.override for each in given])
            if not OmegaConf.missing_keys(config):
                return cast("Declared", OmegaConf.to_object(config))
        except (HydraException, OmegaConfBaseException) as error:
            _raise_if_any(
                expectation(each.argument.name, each.argument.expected, each.value, _meant(each))
                for each in given
                if not fits(each.override)
            )
            raise ConfigError(f"Hydra cannot read these arguments ({str(error).splitlines()[0]}).") from None
        missing = OmegaConf.missing_keys(config)
    raise missing_error(command, [name for name in arguments_of(declaration) if name in missing])


def _meant(given: _Given) -> str:
    return did_you_mean(given.value, given.argument.choices)
