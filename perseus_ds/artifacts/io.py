"""Writing files completely or not at all, and reading JSON files with checks."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import PerseusError


class FileModel(BaseModel):
    """The contents of a JSON file, or a part of them: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


Model = TypeVar("Model", bound=BaseModel)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all.

    Raises:
        OSError: The disk is full or the folder is not writable; a file already there is unharmed.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path, error_class: type[PerseusError], what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        PerseusError: As ``error_class``, when the file is missing, cut off or not an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error_class(f"{path}: no such file; expected a {what}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise error_class(f"{path}: not a complete JSON file ({error}). Write it again.") from None
    if not isinstance(raw, dict):
        raise error_class(f"{path}: expected a {what} (a JSON object), found a {type(raw).__name__}.")
    return raw


def validated(
    raw: dict[str, Any], model: type[Model], path: Path, error_class: type[PerseusError], remedy: str = ""
) -> Model:
    """Check the contents of a JSON file against its schema.

    Raises:
        PerseusError: As ``error_class``; the message names the file and the wrong keys.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise error_class(f"{explain(error, model, f'{path}: ')} {remedy}".rstrip()) from None
