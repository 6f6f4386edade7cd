"""Limits of configuration blocks, files and arguments, and messages for invalid values.

Files beyond the limits, which are listed in ``docs/files.md``, are not read.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MIB = 2**20
MOST_RECORD_BYTES = 64 * 1024 * MIB
MOST_RECORD_LINE_BYTES = 4 * MIB
MOST_TIMELINE_BYTES, MOST_OPERATIONS = 16 * MIB, 100_000
MOST_EVIDENCE_BYTES = 4 * MIB

MOST_STAGES = 4_096
MOST_MICRO_BATCHES = 65_536
MOST_PLANS = 10_000
"""Maximum number of plans of one frontier."""
MOST_INSTRUCTIONS = 65_536
"""Maximum of stages times micro-batches; the DAG of a longer iteration does not fit into memory."""
MOST_CLOCK_MHZ = 100_000
LEAST, MOST_SECONDS, MOST_JOULES, MOST_WATTS = 1e-9, 1e9, 1e15, 1e9
"""Limits of times, energies and powers. Values beyond them are not measurements, and products could overflow."""
LEAST_GPU_W, MOST_GPU_W = 5.0, 5000.0
"""Limits of the mean power of a GPU. Values beyond them indicate other units of energy, time or power."""
MOST_INSTRUCTION_S = 1000.0
"""Maximum duration of an instruction."""
MOST_UNIX_SECONDS = 1e11
"""A time in the year 5138. Later times cannot be shown as dates."""

Index = Annotated[int, Field(ge=0, lt=2**31)]
Stage = Annotated[int, Field(ge=0, lt=MOST_STAGES)]
MicroBatch = Annotated[int, Field(ge=0, lt=MOST_MICRO_BATCHES)]
StageCount = Annotated[int, Field(ge=1, le=MOST_STAGES)]
MicroBatchCount = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Clock = Annotated[int, Field(gt=0, le=MOST_CLOCK_MHZ)]
Time = Annotated[float, Field(ge=LEAST, le=MOST_SECONDS)]
Energy = Annotated[float, Field(ge=LEAST, le=MOST_JOULES)]
Duration = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
UnixTime = Annotated[float, Field(ge=0, le=MOST_UNIX_SECONDS)]
Power = Annotated[float, Field(ge=0, le=MOST_WATTS)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A name or a path in one line without control characters."""

Value = TypeVar("Value")
Many = Annotated[list[Value], Field(fail_fast=True)]
"""A list that is validated up to the first invalid value, because millions of errors would not fit into memory."""


_MOST_PROBLEMS = 5
_MOST_DESCRIBED = 10_000
_LONGEST_KEY = 80
_LONGEST_TEXT = 200


class StrictModel(BaseModel):
    """A block of settings without unknown keys, type conversions and changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def explain(error: ValidationError, owner: Any, prefix: str) -> str:
    """Return pydantic's problems, one per line, with the expected and the given value."""
    count = error.error_count()
    if count > _MOST_DESCRIBED:  # each description takes a kilobyte
        return f"{prefix.rstrip('.: ')}: {count} keys or values are wrong."
    lines = [_explain(problem, owner, prefix) for problem in error.errors()[:_MOST_PROBLEMS]]
    if count > _MOST_PROBLEMS:
        lines.append(f"{prefix.rstrip('.: ')}: {count - _MOST_PROBLEMS} more problems like these.")
    return "\n".join(lines)


def expectation(key: str, expected: str, found: object, hint: str = "") -> str:
    """Return a message about one key with the expected and the given value."""
    return f"{key}: expected {expected}, got {reprlib.repr(found)}{f'; {hint}' if hint else '.'}"


def brief(text: object) -> str:
    """Return the beginning of a text, such as an error message that quotes its input."""
    text = str(text)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a question that suggests a similar known word, or an empty text."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _explain(problem: Any, owner: Any, prefix: str) -> str:
    keys, known, deeper = _locate(owner, [str(part)[:_LONGEST_KEY] for part in problem["loc"]])
    found, context, message = problem["input"], problem.get("ctx", {}), problem["msg"]
    if "discriminator" in context:  # the key that selects the member of a union
        keys.append(context["discriminator"].strip("'"))
    key = prefix + ".".join(keys) if keys else prefix.rstrip(".: ")
    match problem["type"]:
        case "missing" | "union_tag_not_found":
            return f"{key}: missing."
        case "extra_forbidden":
            hint = did_you_mean(keys[-1], known) or f"known keys are {', '.join(known)}."
            if keys[-1] in deeper:
                hint = f"did you mean {deeper[keys[-1]]!r}?"
            return f"{key}: unknown key; {hint}"
        case "value_error":
            text = brief(context["error"])
            return f"{key}: {text}" if text.endswith("?") else f"{key}: {text}."
        case "union_tag_invalid":
            return _expected_one_of(key, context["expected_tags"], context["tag"])
        case "literal_error" | "enum":
            return _expected_one_of(key, context["expected"], found)
        case "model_type" | "model_attributes_type" | "dict_type":
            return expectation(key, "an object with keys and values", found)
        case "timezone_aware":
            return expectation(key, "a time with its time zone, such as 2026-11-22T08:00:00+00:00", found)
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return expectation(key, f"a number {message.removeprefix('Input should be ')}", found)
    expected = message.removeprefix("Input should be ")
    return f"{key}: {message}, got {reprlib.repr(found)}." if expected == message else expectation(key, expected, found)


def _expected_one_of(key: str, choices: str, found: object) -> str:
    return expectation(key, choices, found, did_you_mean(found, re.findall(r"'([^']*)'", choices)))


def _locate(owner: Any, location: list[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Return a location without names of union members, the known keys at its end, and those one level deeper.

    The latter have the path at which they are known, such as ``goal.max_slowdown``.
    """
    keys, known, models = [], [], _models(owner)
    for part in location:
        models = _models(owner)
        known = [key for model in models for key in model.model_fields]
        chosen = next((model for model in models if part in _tags(model)), None)
        if len(models) > 1 and chosen is not None:
            owner = chosen
            continue
        keys.append(part)
        owner = next((model.model_fields[part].annotation for model in models if part in model.model_fields), owner)
    deeper = {}
    for model in models:
        for name, field in model.model_fields.items():
            for inner in _models(field.annotation):
                deeper.update({key: f"{name}.{key}" for key in inner.model_fields})
    return keys, known, deeper


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, including those in unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {tag for field in model.model_fields.values() for tag in get_args(field.annotation)}
