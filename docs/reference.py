"""Generates configuration.md and commands.md from the code: python docs/reference.py."""

from __future__ import annotations

import contextlib
import io
import os
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from perseus_ds.cli.main import COMMANDS, command_of, description_of
from perseus_ds.cli.main import main as main_of_commands
from perseus_ds.config import MetricsConfig, PerseusConfig, ProfileConfig, ServerConfig
from perseus_ds.policy.goal import Goal
from perseus_ds.simulation.gpu import SimulatedConfig

FOLDER = Path(__file__).parent
NOTE = "<!-- Made by docs/reference.py (make docs) from the code: change it there. -->\n"


ADVANCED = ("device", "cache", "max_drift", "server", "profile", "simulated")


def configuration() -> str:
    """Return the page on the ``perseus`` block: the keys that most jobs need, then the advanced ones."""
    fields = PerseusConfig.model_fields
    lines = [
        NOTE,
        "# Configuration\n",
        "The `perseus` block is a key of the DeepSpeed config, the `config` of `perseus_ds.attach`, or the variable",
        "`PERSEUS` (JSON, or the path of a JSON file), whose keys replace those of the others, also within objects",
        "such as `goal`. All keys are optional. An unknown key or a wrong value is an error that names the key, before",
        "training starts.\n",
        '```json\n{"train_micro_batch_size_per_gpu": 8, "perseus": {"enabled": true}}\n```\n',
        *_table(PerseusConfig, [name for name in fields if name not in ADVANCED]),
        "\n## `goal`\n",
        "What the plan in use must keep. See [power and deadlines](power-and-deadlines.md).\n",
        '```json\n{"goal": {"max_slowdown": 0.05}}\n```\n',
        *_table(Goal),
    ]
    lines += ["\n## `metrics`\n", f"{MetricsConfig.__doc__}\n", *_table(MetricsConfig)]
    lines += ["\n## Advanced\n", "Most jobs need none of these keys.\n", *_table(PerseusConfig, ADVANCED)]
    for key, model in (("server", ServerConfig), ("profile", ProfileConfig), ("simulated", SimulatedConfig)):
        lines += [f"\n### `{key}`\n", f"{(model.__doc__ or '').strip()}\n", *_table(model)]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the page on the commands, with the output of ``--help``."""
    lines = [
        NOTE,
        "# Commands\n",
        "This page is generated from the output of `perseus-ds COMMAND --help`. Positional arguments, such as PROFILE,",
        "may also be given by name: `--profile PROFILE`. Options with `...` take several values, such as",
        "`--schedules 1f1b zbv`.\n",
        "`perseus-ds --tyro-write-completion bash FILE` writes a script with which the shell completes commands and",
        "options. For zsh, use a file `_perseus-ds` in a folder of `$fpath`, for fish a file in its `completions`.\n",
        "```bash",
        "mkdir -p ~/.local/share/bash-completion/completions",
        "perseus-ds --tyro-write-completion bash ~/.local/share/bash-completion/completions/perseus-ds",
        "```\n",
        "The exit status is 0 for success, and 2 for any error. Two commands answer a question, `doctor` and",
        "`profile validate`. They return 1 if the answer is no. As usual in shells, it is 130 if interrupted, and",
        "141 if the reader of the output has gone, as with `| head`.",
    ]
    for command in COMMANDS:
        usage, _, text = _help(command).partition("\n\n")
        lines += [f"\n## `perseus-ds {command}`\n", f"{description_of(command)}\n"]
        lines += ["```bash", *command_of(command).examples, "```\n"]
        lines += ["```text", usage, "", f"╭{text.partition('╭')[2]}".strip(), "```"]
    return "\n".join(lines) + "\n"


def _help(command: str) -> str:
    written = io.BytesIO()
    printed = io.TextIOWrapper(written, encoding="utf-8")
    with mock.patch.dict(os.environ, {"COLUMNS": "110"}), contextlib.redirect_stdout(printed):
        main_of_commands([*command.split(), "--help"])
    return written.getvalue().decode()


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    parts = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _table(model: type[BaseModel], names: Iterable[str] | None = None) -> list[str]:
    rows = []
    for name in model.model_fields if names is None else names:
        field = model.model_fields[name]
        inner = _models(field)
        meaning = field.description or (inner[0].__doc__ or "" if inner else "")
        rows.append([f"`{name}`", _type(field), _default(field), meaning.strip()])
    return _rows("key", rows)


def _rows(what: str, rows: list[list[str]]) -> list[str]:
    lines = [f"| {what} | value | default | meaning |", "|---|---|---|---|"]
    for *cells, meaning in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, _sentence(meaning))) + " |")
    return lines


def _type(field: FieldInfo) -> str:
    if _models(field):
        return "object, see below"
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(limit, name, None) is not None
    ]
    return " ".join([_name(field.annotation), ", ".join(limits)]).strip()


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    if _is_union(annotation):
        return " or ".join(_name(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        return _name(get_args(annotation)[0])
    if get_origin(annotation) in (list, tuple):
        return f"list of {_name(get_args(annotation)[0])}"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return names.get(annotation, "time with a time zone")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory is None else "see below"
    if field.default is None:
        return ""
    if isinstance(field.default, tuple):
        return "all"
    text = str(field.default).lower() if isinstance(field.default, bool) else repr(field.default).replace("'", '"')
    return f"`{text}`"


def _sentence(text: str) -> str:
    return text if not text or text.endswith((".", "…")) else f"{text}."


PAGES = {"configuration.md": configuration, "commands.md": commands}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
