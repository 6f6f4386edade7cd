"""The commands, each a module with ``Arguments``, a dataclass, and ``run(arguments) -> exit code``; and their help."""

from __future__ import annotations

import importlib
import inspect
import shutil
import textwrap
from types import ModuleType

from perseus_ds.cli.arguments import Argument, arguments_of

COMMANDS = (
    "optimize",
    "verify",
    "profile",
    "report",
    "compare",
    "trace",
    "plot",
    "emulate",
    "schedules",
    "partition",
    "export",
    "import",
    "watch",
    "control",
    "reset",
    "doctor",
    "completion",
)
_INDENT = 25


def module_of(command: str) -> ModuleType:
    """Return the module of a command; importing it is cheap, running it imports what it needs."""
    return importlib.import_module(f"perseus_ds.cli.{'import_' if command == 'import' else command}")


def description_of(command: str) -> str:
    """Return what a command does; the first line says it in short."""
    return inspect.getdoc(module_of(command).Arguments) or ""


def overview() -> str:
    """Return the list of commands."""
    lines = [
        "usage: perseus-ds COMMAND [key=value ...]",
        "       perseus-ds help COMMAND",
        "       perseus-ds --version",
        "",
        "commands:",
    ]
    for command in COMMANDS:
        lines += _entry(command, description_of(command).splitlines()[0], indent=14)
    return "\n".join(lines)


def command_help(command: str) -> str:
    """Return what a command does, its actions, its arguments with types and defaults, and examples."""
    declaration = module_of(command).Arguments
    declared = arguments_of(declaration).values()
    lines = [f"usage: {usage(command)}", "", description_of(command)]
    for each in declared:
        if any(each.choices.values()):
            lines += ["", f"{each.name}:"]
            for choice, meaning in each.choices.items():
                lines += _entry(choice, meaning)
    lines += ["", "arguments:"]
    for each in declared:
        lines += _entry(each.name, f"{each.description} ({details(each)})")
    return "\n".join([*lines, "", "examples:", *(f"  {example}" for example in declaration.examples)])


def usage(command: str) -> str:
    """Return how a command is written."""
    declared = arguments_of(module_of(command).Arguments).values()
    words = [each.name.upper() for each in declared if each.word]
    given = [f"{each.name}=…" for each in declared if each.required and not each.word]
    return " ".join(["perseus-ds", command, *words, *given, "[key=value ...]"])


def details(argument: Argument) -> str:
    """Return the values that an argument may have, and its default or that it is required."""
    if argument.required:
        return f"{argument.kind}; required"
    kind = f"{argument.kind}, or --{argument.name}" if argument.is_switch else argument.kind
    return f"{kind}; default: {argument.default_text}" if argument.default_text else kind


def _entry(name: str, text: str, *, indent: int = _INDENT) -> list[str]:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    lines = textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    return [f"  {name:{indent - 2}}{lines[0]}", *(" " * indent + line for line in lines[1:])]
