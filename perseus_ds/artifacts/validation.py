"""One strict base for what users write, and one text for what is wrong with it."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """A block of settings: no other keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def explain(error: ValidationError, owner: type[BaseModel], name: str) -> str:
    """Return what is wrong with a block, one line a key, and what to write instead.

    Args:
        error: What pydantic found.
        owner: The block's model.
        name: What the block is called; keys are named below it.
    """
    return "\n".join(_explain(problem, owner, name) for problem in error.errors())


def _explain(problem: Any, owner: type[BaseModel], name: str) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join([name, *location])
    if problem["type"] == "extra_forbidden":
        known = list(_block_at(owner, location[:-1]).model_fields)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(known)}."
        return f"{key}: unknown key; {hint}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}."
    expected = problem["msg"].removeprefix("Input should be ")
    return f"{key}: expected {expected}, got {problem['input']!r}."


def _block_at(owner: Any, location: list[str]) -> Any:
    for part in location:
        # A union is followed by the name of the member that was meant.
        owner = owner.model_fields[part].annotation if hasattr(owner, "model_fields") else _member(owner, part)
    return owner


def _member(union: Any, name: str) -> Any:
    return next(member for member in get_args(union) if get_args(member.model_fields["name"].annotation) == (name,))
