"""Generates configuration.md, commands.md and the tables of files.md from the code: python docs/reference.py."""

from __future__ import annotations

import contextlib
import io
import os
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_events import Event
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations, Sums
from perseus_ds.artifacts.run_savings import SavingSummary, TokenSummary
from perseus_ds.cli.main import COMMANDS, command_of, description_of
from perseus_ds.cli.main import main as main_of_commands
from perseus_ds.config import MetricsConfig, PerseusConfig, ProfileConfig, ServerConfig
from perseus_ds.policy.goal import Goal
from perseus_ds.progress.facts import JobFacts
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


_TABLES = {
    model.__name__: model
    for model in (IterationRecord, SummedIterations, SavingSummary, TokenSummary, JobFacts, ProfileInfo)
}
_TABLE = re.compile(r"(<!-- (?:fields: (\w+)|events) -->\n).*?(<!-- end -->)", re.DOTALL)


def files() -> str:
    """Return the page on files, of which tables are made from the descriptions of fields."""
    page = (FOLDER / "files.md").read_text(encoding="utf-8")
    return _TABLE.sub(lambda match: f"{match[1]}{_made(match[2])}{match[3]}", page)


def _made(name: str | None) -> str:
    lines = _events() if name is None else ["| key | meaning |", "|---|---|", *_fields(_TABLES[name])]
    return "\n" + "\n".join(lines) + "\n\n"


def _fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return a row for each field of a model, followed by those of models within it that have no own table."""
    lines = []
    for name, field in model.model_fields.items():
        lines.append(f"| `{prefix}{name}` | {_meaning(model, name)} |")
        for inner in _models_within(field.annotation):
            if inner.__name__ not in _TABLES:
                lines += _fields(inner, f"{prefix}{name}.")
        if field.annotation is Sums:
            lines += [f"| `{prefix}{name}.{key}` | {meaning} |" for key, meaning in _sums()]
    return lines


def _sums() -> Iterable[tuple[str, str]]:
    """Yield the name and the description of each sum over iterations."""
    for name, annotation in get_type_hints(Sums, include_extras=True).items():
        _, field = get_args(annotation)
        yield name, _sentence(field.description)


def _events() -> list[str]:
    lines = ["| `event` | other keys | meaning |", "|---|---|---|"]
    for event in Event.__subclasses__():
        names = ", ".join(f"`{name}`" for name in get_args(event.model_fields["event"].annotation))
        lines.append(f"| {names} | | {_first_line(event)} |")
        own = [name for name in event.model_fields if name not in Event.model_fields]
        lines += [f"| | `{name}` | {_meaning(event, name)} |" for name in own]
    return lines


def _meaning(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.description:
        return _sentence(field.description)
    within = _models_within(field.annotation)
    assert within, f"{model.__name__}.{name} has no description"
    return _first_line(within[0])


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").splitlines()[0].replace("``", "`")


def _models_within(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, such as that in ``tuple[PlanSummary, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_within(part)]


PAGES = {"configuration.md": configuration, "commands.md": commands, "files.md": files}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
