"""The entry point of ``perseus-ds``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import sys
import traceback
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TextIO

from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.units import printable


class CliCommand(Protocol):
    """A command: a dataclass of its arguments. Its docstring is the help text."""

    examples: ClassVar[tuple[str, ...]]

    def execute(self) -> int:
        """Execute the command and return the exit code."""


# Module and class of each command.
COMMANDS = {
    "optimize": "frontiers:OptimizeCommand",
    "profile show": "profile:ShowCommand",
    "profile compare": "profile:CompareProfilesCommand",
    "profile validate": "profile:ValidateCommand",
    "profile merge": "profile:MergeCommand",
    "profile convert": "profile:ConvertCommand",
    "report": "pages:ReportCommand",
    "compare": "pages:CompareCommand",
    "trace": "pages:TraceCommand",
    "plot": "pages:PlotCommand",
    "schedules": "schedules:SchedulesCommand",
    "partition": "partition:PartitionCommand",
    "export": "frontiers:ExportCommand",
    "import": "frontiers:ImportCommand",
    "watch": "jobs:WatchCommand",
    "control status": "jobs:StatusCommand",
    "control set": "jobs:SetCommand",
    "control clear": "jobs:ClearCommand",
    "control straggler": "jobs:StragglerCommand",
    "control pause": "jobs:PauseCommand",
    "control resume": "jobs:ResumeCommand",
    "reset": "machine:ResetCommand",
    "doctor": "machine:DoctorCommand",
}
GROUPS = {
    "": "Plan, watch and evaluate training with less energy.\n\nUse perseus-ds --version for the version, and "
    "perseus-ds --tyro-write-completion SHELL FILE for a script that completes commands and options in bash, zsh or "
    "fish.",
    "profile": "Show, compare, validate, merge or convert a profile.\n\nThese commands measure nothing. A training job "
    'measures a profile if the perseus block of its DeepSpeed config has "mode": "profile".',
    "control": "Change the goal of a running job, pause it, or print its status.",
}
"""Descriptions of the groups of commands by their first word, and of all commands."""
_COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
_SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 on success; 1 if the command's answer is no (a machine is not ready, a bound does not hold); 2 for errors in
        arguments, files, drivers, permissions or outputs, and for errors of Perseus itself; and, as usual in shells,
        130 if interrupted and 141 if the reader of the output has gone.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:3], "--help"]
    program = " ".join(["perseus-ds", *given[: 2 if given and given[0] in GROUPS else 1]])

    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except PerseusError as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has gone, as with "| head", so the rest of the output is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print(printable(f"{program}: {where}{error.strerror or error}."), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # of an optional dependency
        print(f"{program}: this command needs the package {error.name}. Install it with pip.", file=sys.stderr)
        return 2
    except Exception:  # by default, Python would end with 1, which means "no"
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print(printable(f"{program}: interrupted."), file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        import importlib.metadata

        print(f"perseus-ds {importlib.metadata.version('perseus-ds')}")
        return 0
    for argument in arguments:
        if printable(argument) != argument:
            raise ConfigError(f"{argument!r}: expected text without control characters, in UTF-8.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # tyro's help has bullets, which some encodings lack
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command = parse(arguments or ["--help"])
    except SystemExit as end:  # tyro has printed the help or an error
        return int(end.code or 0) if arguments else 2
    with contextlib.redirect_stdout(PrintableText(sys.stdout)):
        return command.execute()


def parse(arguments: Sequence[str]) -> CliCommand:
    """Parse the arguments of the command line.

    Raises:
        ConfigError: If there is no such command.
        SystemExit: If tyro has printed a help page (0) or an error (2).
    """
    import tyro
    from tyro import conf

    from perseus_ds.cli.values import limited

    name, rest = "", list(arguments)
    while name in GROUPS and rest and not rest[0].startswith("-"):
        name = f"{name} {_checked_name(rest.pop(0), name)}".strip()
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
        found: CliCommand = _application(name).cli(prog=program, description=GROUPS[name], args=rest, config=config)
        return found
    command = command_of(name)
    examples = "\n".join(["examples:", *(f"  {example}" for example in command.examples)])
    description = f"{description_of(name)}\n\n{examples}"
    rest = _positional_first(command, rest)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(lambda kind: limited(kind.type) if kind.type in (int, float) else None)
    return tyro.cli(command, prog=program, description=description, args=rest, config=config, registry=registry)


def command_of(name: str) -> type[CliCommand]:
    """Return the class of a command without the imports that its execution needs."""
    module, _, class_name = COMMANDS[name].partition(":")
    found: type[CliCommand] = getattr(importlib.import_module(f"perseus_ds.cli.{module}"), class_name)
    return found


def description_of(name: str) -> str:
    """Return the description of a command or group. Its first line is the summary."""
    return GROUPS[name] if name in GROUPS else inspect.getdoc(command_of(name)) or ""


def _checked_name(name: str, group: str) -> str:
    known = _members(group)
    if name not in known:
        from perseus_ds.artifacts.validation import did_you_mean

        hint = did_you_mean(name, known) or f"commands are {', '.join(known)}."
        raise ConfigError(f"there is no such command; {hint}")
    return name


def _members(group: str) -> list[str]:
    prefix = f"{group} ".lstrip()
    return list(dict.fromkeys(name.removeprefix(prefix).split()[0] for name in COMMANDS if name.startswith(prefix)))


def _application(group: str) -> Any:
    """Return a group of commands for tyro, which prints their overview and completes their names."""
    from tyro.extras import SubcommandApp

    application = SubcommandApp()
    for member in _members(group):
        name = f"{group} {member}".strip()
        target: Any = _application(name) if name in GROUPS else command_of(name)
        application.command(target, name=member, help=description_of(name).splitlines()[0])
    return application


def _positional_first(command: type[CliCommand], arguments: list[str]) -> list[str]:
    """Move the positional argument to the front if it is given by name, as in ``--profile perseus``."""
    from tyro.conf import Positional

    hints = typing.get_type_hints(command, include_extras=True)
    positional = (name for name, hint in hints.items() if Positional in getattr(hint, "__metadata__", ()))
    flag = f"--{next(positional, None)}"
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return [argument.partition("=")[2], *arguments[:index], *arguments[index + 1 :]]
        if argument == flag:
            return [*arguments[index + 1 : index + 2], *arguments[:index], *arguments[index + 2 :]]
    return arguments


class PrintableText(io.TextIOBase):
    """A stream that makes text printable and writes it to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def terminal(self) -> TextIO:
        """The underlying stream, for screen output, to which only printable text may be written."""
        return self._stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write a text, with escapes for characters that the stream's encoding lacks."""
        safe = printable(text)
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def terminal() -> TextIO:
    """Return the standard output for screen output, to which only printable text may be written."""
    return sys.stdout.terminal if isinstance(sys.stdout, PrintableText) else sys.stdout
