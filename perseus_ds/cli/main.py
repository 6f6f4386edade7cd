"""The entry point of ``perseus-ds``: finds the command, imports it and turns errors into messages."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from perseus_ds.errors import ConfigError, PerseusError

# Command -> its module, which has run(overrides) -> exit code, and what it does.
COMMANDS = {
    "optimize": ("optimize", "plan: from a profile to the frontier of frequency plans"),
    "profile": ("profile", "show, compare, validate, merge or convert a profile"),
    "report": ("report", "one HTML file about a run: frontier, timelines, what was saved"),
    "compare": ("compare", "runs side by side: default clocks, plans, power caps"),
    "trace": ("trace", "predicted and measured timelines for Perfetto"),
    "plot": ("plot", "pictures of the frontier and of the pipeline's timeline, before and after"),
    "emulate": ("emulate", "what a frontier saves for a job of many pipelines with a straggler"),
    "export": ("export", "write a frontier's plans for Zeus"),
    "import": ("import_", "read plans of lowtime or Zeus and judge them by a profile"),
    "control": ("control", "tell a running job: status, policy, straggler, pause, resume"),
    "reset": ("reset", "return GPUs to their default clocks"),
    "doctor": ("doctor", "whether this machine will work, and what to do where it will not"),
}
_USAGE = "usage: perseus-ds COMMAND [key=value ...]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 1 where something went wrong, or 2 where the arguments are wrong.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"perseus-ds {importlib.metadata.version('perseus-ds')}")
        return 0
    try:
        return _run(words[0], words[1:])
    except PerseusError as error:
        print(f"perseus-ds {words[0]}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"perseus-ds {words[0]}: interrupted.", file=sys.stderr)
        return 130


def _run(command: str, overrides: list[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"there is no such command. Commands: {', '.join(COMMANDS)}.")
    module, purpose = COMMANDS[command]
    if any(word in ("-h", "--help") for word in overrides):
        from perseus_ds.cli.arguments import defaults_text

        print(f"usage: perseus-ds {command} [key=value ...]\n\n{purpose}\n\n{defaults_text(command)}", end="")
        return 0
    run = importlib.import_module(f"perseus_ds.cli.{module}").run
    return int(run(overrides))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {command:{width}}  {purpose}" for command, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [_USAGE, "       perseus-ds COMMAND --help", "       perseus-ds --version", "", "commands:", *lines]
    )
