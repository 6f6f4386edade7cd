"""The entry point of ``perseus-ds``: finds the command, imports it and turns errors into messages; and the help."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from perseus_ds.cli.arguments import Command, arguments_of, parse
from perseus_ds.cli.output import PrintableText
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.units import printable

# The module of each command; its class has its name.
COMMANDS = {
    "optimize": "frontiers",
    "verify": "frontiers",
    "profile": "profile",
    "report": "pages",
    "compare": "pages",
    "trace": "pages",
    "plot": "pages",
    "schedules": "schedules",
    "partition": "partition",
    "export": "frontiers",
    "import": "frontiers",
    "watch": "jobs",
    "control": "jobs",
    "reset": "gpus",
    "doctor": "gpus",
    "completion": "completion",
}
# What to use instead of commands that version 0.2.0 no longer has.
REMOVED = {
    "emulate": "benchmarks/emulation.py of the repository computes the same tables.",
    "share": 'Give each job a cap of its own: "policy": {"name": "power_cap", "watts": …}, or the path of a file as '
    '"signal", which may change while the job runs.',
}
_HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 1 where the command's answer is no (a machine that is not ready, a bound that does not hold); 2 for
        whatever the caller can mend: arguments, files, a missing driver or permission, an output that cannot be
        written; 130 or 141, as usual in shells, where it was interrupted or nobody read its output any more.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    program = " ".join(["perseus-ds", *words[:1]])

    try:
        with contextlib.redirect_stdout(PrintableText(sys.stdout)):
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
    if not words or words[0] in _HELP:
        print(overview())
        return 0 if words else 2
    for word in words:
        if printable(word) != word:
            raise ConfigError(f"{word!r}: expected text without control characters, in UTF-8.")
    command, *rest = words
    if command in REMOVED:
        raise ConfigError(f"this command was removed in version 0.2.0. {REMOVED[command]}")
    if command not in COMMANDS:
        from perseus_ds.artifacts.validation import did_you_mean

        hint = did_you_mean(command, COMMANDS) or f"commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"there is no such command; {hint}")
    if any(word in _HELP for word in rest):
        print(command_help(command))
        return 0
    return parse(command, command_of(command), rest).execute()


def command_of(name: str) -> type[Command]:
    """Return the class of a command; importing it is cheap, executing it imports what it needs."""
    found: type[Command] = getattr(importlib.import_module(f"perseus_ds.cli.{COMMANDS[name]}"), name.capitalize())
    return found


def description_of(command: str) -> str:
    """Return what a command does; the first line says it in short."""
    return inspect.getdoc(command_of(command)) or ""


def overview() -> str:
    """Return the list of commands."""
    lines = [
        "usage: perseus-ds COMMAND [key=value ...]",
        "       perseus-ds help COMMAND",
        "       perseus-ds --version",
    ]
    lines += ["", "commands:"]
    for command in COMMANDS:
        lines += _entry(command, description_of(command).splitlines()[0], indent=14)
    return "\n".join(lines)


def command_help(command: str) -> str:
    """Return what a command does, its actions, its arguments with types and defaults, and examples."""
    declared = arguments_of(command_of(command)).values()
    lines = [f"usage: {usage(command)}", "", description_of(command)]
    for each in declared:
        if any(each.choices.values()):
            lines += ["", f"{each.name}:"]
            for choice, meaning in each.choices.items():
                lines += _entry(choice, meaning)
    lines += ["", "arguments:"]
    for each in declared:
        kind = f"{each.kind}, or --{each.name}" if each.is_switch else each.kind
        default = "; required" if each.required else f"; default: {each.default_text}" if each.default_text else ""
        lines += _entry(each.name, f"{each.description} ({kind}{default})")
    return "\n".join([*lines, "", "examples:", *(f"  {example}" for example in command_of(command).examples)])


def usage(command: str) -> str:
    """Return how a command is written."""
    declared = arguments_of(command_of(command)).values()
    words = [each.name.upper() for each in declared if each.word]
    given = [f"{each.name}=…" for each in declared if each.required and not each.word]
    return " ".join(["perseus-ds", command, *words, *given, "[key=value ...]"])


def _entry(name: str, text: str, *, indent: int = 25) -> list[str]:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return [f"  {name:{indent - 2}}{lines[0]}", *(" " * indent + line for line in lines[1:])]
