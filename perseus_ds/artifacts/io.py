"""Writes files either completely or not at all, and reads files with checks and limits."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from perseus_ds.artifacts.validation import MIB, brief, explain
from perseus_ds.errors import ConfigError, PerseusError

MOST_TEXT_BYTES = 16 * MIB
MOST_JSON_BYTES = 64 * MIB
MOST_JSON_PARTS = 3_000_000
"""Objects, lists and keys, each of which takes some hundred bytes of memory."""


class FileModel(BaseModel):
    """The contents of a JSON file or a part of them, without unknown keys and infinite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, with the permissions that the umask allows.

    A link at this path is replaced by the file, and its target stays unchanged.
    """
    write_together([(path, content)])


def write_together(files: Iterable[tuple[Path, str | bytes]]) -> None:
    """Write files that belong together, either all of them or none, each as by :func:`write_atomically`.

    The file without which the others are not read comes last: it does not exist while the others are replaced, so that
    new and old files are never read together. Outdated files, which are not valid with the new ones, are removed at the
    end. Characters that UTF-8 lacks, from file names, are written as escapes.

    Raises:
        OSError: If the disk is full or a folder is not writable. The error names the file, and all old files stay.
    """
    temporaries: list[tuple[Path, Path]] = []
    try:
        for path, content in files:
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            temporaries.append((temporary, path))
            data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
            with _name_in_errors(path):
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                _write_new(temporary, data)
        with _hidden(temporaries[-1][1] if len(temporaries) > 1 else None):
            for temporary, path in temporaries:
                with _name_in_errors(path):
                    os.replace(temporary, path)
    except BaseException:
        for temporary, _ in temporaries:
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _hidden(path: Path | None) -> Iterator[None]:
    """Hide a file, and restore it if the body raises an error."""
    if path is None or not os.path.lexists(path):
        yield
        return
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.old")
    os.rename(path, hidden)
    try:
        yield
    except BaseException:
        os.rename(hidden, path)
        raise
    hidden.unlink()


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _name_in_errors(path: Path) -> Iterator[None]:
    """Name the file in errors, which otherwise name a temporary file or none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def open_without_links(path: Path, *, append: bool) -> BinaryIO:
    """Open a regular file for writing step by step. A link, which another user may have made, is an error."""
    how = os.O_APPEND if append else 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    if not append:
        os.ftruncate(handle, 0)
    return os.fdopen(handle, "wb")


def has_file(folder: Path, name: str) -> bool:
    """Return whether a folder has a file of this name, and False if this user may not look into the folder."""
    try:
        return (folder / name).is_file()
    except PermissionError:
        return False


def check_is_folder(folder: Path) -> None:
    """Raise a ConfigError if a folder of runs does not exist, or is one of their files."""
    if folder.is_file():
        raise ConfigError(f"{folder}: this is a file; expected a folder, the output_dir of a training run.")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected the output_dir of a training run.")


@contextlib.contextmanager
def open_bounded(path: Path, error_class: type[PerseusError], what: str, most_bytes: int) -> Iterator[BinaryIO]:
    """Open a regular file of limited size for reading.

    Raises:
        PerseusError: As ``error_class``, if the file is missing, not a regular file, too large, or not readable.
    """
    try:
        # Opening a FIFO without a writer would block forever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error_class(f"{path}: no such file; expected a {what}.") from None
    except (OSError, ValueError) as error:
        raise error_class(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
        os.close(handle)
        if not stat.S_ISREG(found.st_mode):
            raise error_class(f"{path}: expected a {what}, but it is not a regular file.")
        raise error_class(f"{path}: {found.st_size} bytes, at most {most_bytes} are read of a {what}.")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise error_class(f"{path}: cannot be read ({error.strerror}).") from None


def read_bytes(path: Path, error_class: type[PerseusError], what: str, most_bytes: int) -> bytes:
    """Return the contents of a file, with the errors of :func:`open_bounded`."""
    with open_bounded(path, error_class, what, most_bytes) as file:
        return file.read(most_bytes)


def read_text(path: Path, error_class: type[PerseusError], what: str, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a file. Raises ``error_class`` if it is not UTF-8."""
    try:
        return read_bytes(path, error_class, what, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise error_class(f"{path}: not a {what}, because it is not UTF-8 ({brief(error)}).") from None


def parse_json(data: str | bytes) -> Any:
    """Return the value of a JSON text, at most 200 levels deep and with integers of at most 4300 digits.

    Raises:
        ValueError: If the text is not JSON or too large.
    """
    data = data.encode() if isinstance(data, str) else data
    check_json_size(data)
    return pydantic_core.from_json(data)


def check_json_size(data: bytes) -> None:
    """Raise a ValueError with the numbers if a JSON text is too large to be read."""
    parts = sum(map(data.count, (b"{", b"[", b":")))
    if len(data) > MOST_JSON_BYTES or parts > MOST_JSON_PARTS:
        raise ValueError(
            f"{len(data)} bytes with {parts} objects, lists and keys; at most {MOST_JSON_BYTES} with {MOST_JSON_PARTS} "
            "are read"
        )


def read_json(
    path: Path, error_class: type[PerseusError], what: str, most_bytes: int = MOST_JSON_BYTES
) -> dict[str, Any]:
    """Read a JSON object. Raises ``error_class`` if the file is missing, invalid or too large."""
    data = read_bytes(path, error_class, what, most_bytes)
    try:
        raw = parse_json(data)
    except ValueError as error:
        raise error_class(f"{path}: not a complete JSON file ({brief(error)}). Write it again.") from None
    if not isinstance(raw, dict):
        raise error_class(f"{path}: expected a {what} (a JSON object), found a {type(raw).__name__}.")
    return raw


def read_model(
    model: type[Model],
    path: Path,
    error_class: type[PerseusError],
    what: str,
    *,
    most_bytes: int = MOST_JSON_BYTES,
    remedy: str = "",
) -> Model:
    """Read a JSON file as a model. Raises ``error_class`` with the invalid keys and the remedy."""
    raw = read_json(path, error_class, what, most_bytes)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise error_class(f"{explain(error, model, f'{path}: ')} {remedy}".rstrip()) from None
