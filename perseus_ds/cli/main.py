"""The entry point of ``perseus-ds``: finds the command, imports it and turns errors into messages."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from perseus_ds.artifacts.printable import printable
from perseus_ds.cli.arguments import parse
from perseus_ds.cli.commands import COMMANDS, command_help, module_of, overview
from perseus_ds.cli.output import PrintableText
from perseus_ds.errors import ConfigError, PerseusError

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
    if command not in COMMANDS:
        from perseus_ds.artifacts.validation import did_you_mean

        hint = did_you_mean(command, COMMANDS) or f"commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"there is no such command; {hint}")
    if any(word in _HELP for word in rest):
        print(command_help(command))
        return 0
    module = module_of(command)
    return int(module.run(parse(command, module.Arguments, rest)))
