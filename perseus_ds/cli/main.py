"""The entry point of ``perseus-ds``: finds the command, imports it and turns errors into messages."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from perseus_ds.cli.output import PrintableText
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.units import printable


class Command(Protocol):
    """A command: a dataclass of its arguments, which tyro reads, and whose docstring is its help."""

    examples: ClassVar[tuple[str, ...]]

    def execute(self) -> int:
        """Do it, and return the exit code."""


# The module and the class of each command.
COMMANDS = {
    "optimize": "frontiers:Optimize",
    "verify": "frontiers:Verify",
    "profile show": "profile:Show",
    "profile compare": "profile:Compare",
    "profile validate": "profile:Validate",
    "profile merge": "profile:Merge",
    "profile convert": "profile:Convert",
    "report": "pages:Report",
    "compare": "pages:Compare",
    "trace": "pages:Trace",
    "plot": "pages:Plot",
    "schedules": "schedules:Schedules",
    "partition": "partition:Partition",
    "export": "frontiers:Export",
    "import": "frontiers:Import",
    "watch": "jobs:Watch",
    "control status": "jobs:Status",
    "control policy": "jobs:Policy",
    "control straggler": "jobs:Straggler",
    "control reduce": "jobs:Reduce",
    "control pause": "jobs:Pause",
    "control resume": "jobs:Resume",
    "reset": "gpus:Reset",
    "doctor": "gpus:Doctor",
}
GROUPS = {
    "": "Plan, watch and judge training with less energy.\n\nWrite perseus-ds --version for the version, perseus-ds "
    "--tyro-write-completion SHELL FILE for a script with which bash, zsh or fish completes commands and options.",
    "profile": "Show, compare, validate, merge or convert a profile.\n\nThey measure nothing. A training job measures "
    'a profile: write "mode": "profile" in the perseus block of its DeepSpeed config.',
    "control": "Give a running job an order, or ask how it goes. Run it on the node of rank 0.",
}
"""What the commands with the same first word have in common; at first, all commands."""
# What to use instead of commands that version 0.2.0 no longer has.
REMOVED = {
    "completion": 'Write "perseus-ds --tyro-write-completion bash FILE", or zsh or fish in place of bash.',
    "emulate": "benchmarks/emulation.py of the repository computes the same tables.",
    "share": 'Give each job a cap of its own: "policy": {"name": "power_cap", "watts": …}, or the path of a file as '
    '"signal", which may change while the job runs.',
}

_COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
_SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 1 where the command's answer is no (a machine that is not ready, a bound that does not hold); 2 for
        whatever the caller can mend: arguments, files, a missing driver or permission, an output that cannot be
        written; 130 or 141, as usual in shells, where it was interrupted or nobody read its output any more.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:3], "--help"]
    program = " ".join(["perseus-ds", *words[: 2 if words and words[0] in GROUPS else 1]])

    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except PerseusError as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads the output any more, as with "| head"; the rest of it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print(printable(f"{program}: {where}{error.strerror or error}."), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(printable(f"{program}: interrupted."), file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        import importlib.metadata

        print(f"perseus-ds {importlib.metadata.version('perseus-ds')}")
        return 0
    for word in words:
        if printable(word) != word:
            raise ConfigError(f"{word!r}: expected text without control characters, in UTF-8.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # tyro's help has bullets, which not every encoding has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command = parse(words or ["--help"])
    except SystemExit as end:  # tyro has printed the help, or what is wrong
        return int(end.code or 0) if words else 2
    with contextlib.redirect_stdout(PrintableText(sys.stdout)):
        return command.execute()


def parse(words: Sequence[str]) -> Command:
    """Return the command that the words of a command line mean.

    Raises:
        ConfigError: There is no such command, or its arguments are written as before version 0.2.0.
        SystemExit: tyro has printed a help page (0), or which argument is wrong (2).
    """
    import tyro
    from tyro import conf

    from perseus_ds.cli.values import one

    name, rest = "", list(words)
    while name in GROUPS and rest and not rest[0].startswith("-"):
        name = f"{name} {_known(rest.pop(0), name)}".strip()
    if rest and rest[0] in _COMPLETION and rest[1:2] not in ([], *([shell] for shell in _SHELLS)):
        raise ConfigError(f"expected {', '.join(_SHELLS)}, got {rest[1]!r}.")
    program = f"perseus-ds {name}".strip()
    config = (
        conf.DisallowNone,
        conf.FlagCreatePairsOff,
        conf.HelptextFromCommentsOff,
        conf.PositionalMetavarFromFieldName,
    )
    if name in GROUPS:
        found: Command = _application(name).cli(prog=program, description=GROUPS[name], args=rest, config=config)
        return found
    command = command_of(name)
    _refuse_assignments(command, rest)
    examples = "\n".join(["examples:", *(f"  {example}" for example in command.examples)])
    description = f"{description_of(name)}\n\n{examples}"
    rest = _positional_first(command, rest)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(lambda kind: one(kind.type) if kind.type in (int, float) else None)
    return tyro.cli(command, prog=program, description=description, args=rest, config=config, registry=registry)


def command_of(name: str) -> type[Command]:
    """Return the class of a command; importing it is cheap, executing it imports what it needs."""
    module, _, class_name = COMMANDS[name].partition(":")
    found: type[Command] = getattr(importlib.import_module(f"perseus_ds.cli.{module}"), class_name)
    return found


def description_of(name: str) -> str:
    """Return what a command or a group is for; the first line says it in short."""
    return GROUPS[name] if name in GROUPS else inspect.getdoc(command_of(name)) or ""


def _known(word: str, group: str) -> str:
    if not group and word in REMOVED:
        raise ConfigError(f"this command was removed in version 0.2.0. {REMOVED[word]}")
    known = _members(group)
    if word not in known:
        from perseus_ds.artifacts.validation import did_you_mean

        hint = did_you_mean(word, known) or f"commands are {', '.join(known)}."
        raise ConfigError(f"there is no such command; {hint}")
    return word


def _members(group: str) -> list[str]:
    prefix = f"{group} ".lstrip()
    return list(dict.fromkeys(name.removeprefix(prefix).split()[0] for name in COMMANDS if name.startswith(prefix)))


def _application(group: str) -> Any:
    """Return the commands of a group for tyro, which makes the overview and the completion of them."""
    from tyro.extras import SubcommandApp

    application = SubcommandApp()
    for member in _members(group):
        name = f"{group} {member}".strip()
        target: Any = _application(name) if name in GROUPS else command_of(name)
        application.command(target, name=member, help=description_of(name).splitlines()[0])
    return application


def _refuse_assignments(command: type[Command], words: Sequence[str]) -> None:
    """Check that no argument is written as ``key=value``, as before version 0.2.0.

    Raises:
        ConfigError: One is; the message has the new spelling.
    """
    from perseus_ds.cli.values import flag_of

    for before, word in zip(["", *words], words, strict=False):
        match = re.fullmatch(r"(?:\w+\.)?([a-z_]+)=(.*)", word)
        if match and not before.startswith("-") and match[1] in typing.get_type_hints(command):
            value = " ".join(match[2].strip("[]").split(",")) if match[2].startswith("[") else match[2]
            spelling = f"{flag_of(match[1])} {value if value != 'true' else ''}".strip()
            raise ConfigError(f"{word}: since version 0.2.0 this is written {spelling}")


def _positional_first(command: type[Command], words: list[str]) -> list[str]:
    """Return words with the positional argument in front where it was given by name, as in ``--profile perseus``."""
    from tyro.conf import Positional

    hints = typing.get_type_hints(command, include_extras=True)
    positional = (name for name, hint in hints.items() if Positional in getattr(hint, "__metadata__", ()))
    flag = f"--{next(positional, None)}"
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return [word.partition("=")[2], *words[:index], *words[index + 1 :]]
        if word == flag:
            return [*words[index + 1 : index + 2], *words[:index], *words[index + 2 :]]
    return words
