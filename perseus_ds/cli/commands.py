"""The commands there are. Each is a module with ``Arguments``, a dataclass, and ``run(arguments) -> exit code``."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

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
    "export",
    "import",
    "watch",
    "control",
    "reset",
    "doctor",
    "completion",
)


def module_of(command: str) -> ModuleType:
    """Return the module of a command; importing it is cheap, running it imports what it needs."""
    return importlib.import_module(f"perseus_ds.cli.{'import_' if command == 'import' else command}")


def description_of(command: str) -> str:
    """Return what a command does; the first line says it in short."""
    return inspect.getdoc(module_of(command).Arguments) or ""
