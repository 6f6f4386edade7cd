"""The strict base of blocks that users write, and one text for what is wrong with a block, a file or an argument."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

_MOST_PROBLEMS = 5
_MOST_DESCRIBED = 10_000
_LONGEST_KEY = 80
_LONGEST_TEXT = 200


class StrictModel(BaseModel):
    """A block of settings: no other keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def explain(error: ValidationError, owner: Any, prefix: str) -> str:
    """Return the problems that pydantic found, one line a key: where, what was expected, what was found.

    Args:
        error: The error of pydantic.
        owner: The model that was validated, or the union of models.
        prefix: Written before each key: ``"perseus."`` of a block, ``"profile.json: "`` of a file.
    """
    count = error.error_count()
    if count > _MOST_DESCRIBED:  # a description takes a kilobyte
        return f"{prefix.rstrip('.: ')}: {count} keys or values are wrong."
    lines = [_explain(problem, owner, prefix) for problem in error.errors()[:_MOST_PROBLEMS]]
    if count > _MOST_PROBLEMS:
        lines.append(f"{prefix.rstrip('.: ')}: {count - _MOST_PROBLEMS} more problems like these.")
    return "\n".join(lines)


def expectation(key: str, expected: str, found: object, hint: str = "") -> str:
    """Return the line that says of one key what was expected and what was found."""
    return f"{key}: expected {expected}, got {reprlib.repr(found)}{f'; {hint}' if hint else '.'}"


def brief(text: object) -> str:
    """Return the beginning of a text, such as that of an error which quotes what it was given."""
    text = str(text)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the question whether a known word was meant, or nothing if no known word is similar."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _explain(problem: Any, owner: Any, prefix: str) -> str:
    keys, known = _walk(owner, [str(part)[:_LONGEST_KEY] for part in problem["loc"]])
    found, context, message = problem["input"], problem.get("ctx", {}), problem["msg"]
    if "discriminator" in context:  # the key that says which member of a union is meant
        keys.append(context["discriminator"].strip("'"))
    key = prefix + ".".join(keys) if keys else prefix.rstrip(".: ")
    match problem["type"]:
        case "missing" | "union_tag_not_found":
            return f"{key}: missing."
        case "extra_forbidden":
            hint = did_you_mean(keys[-1], known) or f"known keys are {', '.join(known)}."
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
        case "time_parsing" | "time_type":
            return expectation(key, "a time of day such as 17:00", found)
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return expectation(key, f"a number {message.removeprefix('Input should be ')}", found)
    expected = message.removeprefix("Input should be ")
    return f"{key}: {message}, got {reprlib.repr(found)}." if expected == message else expectation(key, expected, found)


def _expected_one_of(key: str, choices: str, found: object) -> str:
    return expectation(key, choices, found, did_you_mean(found, re.findall(r"'([^']*)'", choices)))


def _walk(owner: Any, location: list[str]) -> tuple[list[str], list[str]]:
    """Return a location without the names of unions' members, and the keys known where it ends."""
    keys, known = [], []
    for part in location:
        models = _models(owner)
        known = [key for model in models for key in model.model_fields]
        chosen = next((model for model in models if part in _tags(model)), None)
        if len(models) > 1 and chosen is not None:
            owner = chosen
            continue
        keys.append(part)
        owner = next((model.model_fields[part].annotation for model in models if part in model.model_fields), owner)
    return keys, known


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation names, those in unions and lists included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {tag for field in model.model_fields.values() for tag in get_args(field.annotation)}
