"""A job's output folder: its lock, so that two jobs do not overwrite each other's files, and the state that is kept."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.io import parse_json, write_atomically
from perseus_ds.artifacts.validation import brief
from perseus_ds.errors import ConfigError
from perseus_ds.protocol import places
from perseus_ds.server.job import Job

LOCK_FILE, STATE_FILE = "job.lock", "state.json"
_MOST_FOLDERS = 100
_AT_END_S = 5.0
"""Maximum time to wait for the disk at the end of a job."""


class FolderLock:
    """Lock that a server holds during its job. The kernel releases it however the process ends."""

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self, folder: Path) -> str | None:
        """Lock a folder. Return None on success, otherwise a description of the job that holds it.

        A folder in which no file can be locked, such as on a file system without locks, is regarded as free.
        """
        path = folder / LOCK_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = places.lock(path)
        except BlockingIOError:
            owner = ""
            with contextlib.suppress(OSError):
                owner = path.read_text(errors="replace").strip()
            return owner or "another process"
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a full disk, which does not affect the lock
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return None

    def release(self) -> None:
        """Release the folder. May be called repeatedly."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def own_folder(job: Job, lock: FolderLock, former: str = "") -> tuple[str, str]:
    """Lock and return an output folder, and a warning if it is not the one of the config.

    A folder belongs to the job that has written to it, also after its end, and no other job replaces its files. A
    server that replaces another one prefers its ``former`` folder, and continues if no folder can be written.

    Raises:
        ConfigError: The folder cannot be written, or is another job's and this job must not use a different one.
    """
    if former and lock.acquire(Path(former)) is None:
        return former, ""
    config = job.config
    if not former:
        _check_is_writable(config.output_dir)
    taken = _take(config.output_dir, job, lock)
    if not taken:
        return config.output_dir, ""
    if config.needs_gpu:
        raise ConfigError(f"{taken}. Give this job another one.")
    for number in range(2, _MOST_FOLDERS):
        other = f"{config.output_dir.rstrip('/')}-{number}"
        if not former:
            _check_is_writable(other)
        if not _take(other, job, lock):
            return other, f'{taken}. This job writes to {other}. With "required": true this is an error.'
    raise ConfigError(f"{taken}, and so are {_MOST_FOLDERS - 2} others of this name. Give this job another one.")


def _check_is_writable(folder: str) -> None:
    """Create a folder, and a file in it that does not remain.

    Raises:
        ConfigError: One of them cannot be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f'"output_dir": {json.dumps(folder)} cannot be written on {socket.gethostname()} '
            f"({error.strerror or error}). Give this job a folder that rank 0 can write."
        ) from None


def _take(folder: str, job: Job, lock: FolderLock) -> str:
    """Lock a folder for a job. Return an empty text on success, otherwise the reason why it is not available."""
    holder = lock.acquire(Path(folder))
    if holder is not None:
        return f'"output_dir": {json.dumps(folder)} is the folder of a job that is running ({holder})'
    owner = _owner(Path(folder))
    if owner is None or owner["key"] == job.owner["key"]:
        return ""
    lock.release()
    description = owner["description"]
    return f'"output_dir": {json.dumps(folder)} is the folder of another job ({description})'


def _owner(folder: Path) -> dict[str, str] | None:
    """Return the owner of a folder from the state that its last server has saved. None if it is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = parse_json((folder / STATE_FILE).read_bytes())["owner"]
        return {"key": owner["key"], "description": owner["description"]}
    return None


class StateFile:
    """``state.json``, from which later servers of the job continue.

    It is written on a thread, because the folder may be slow.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE
        self._thread = ThreadPoolExecutor(1, "perseus-state")
        self._written = ""
        self._saving: Future[None] | None = None

    def read(self) -> tuple[dict[str, Any] | None, str]:
        """Return the state saved by an earlier server, if any, and a warning if it is damaged."""
        try:
            found = parse_json(self._path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError(f"expected an object, found a {type(found).__name__}")
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError) as error:
            return None, f"{self._path} cannot be read ({brief(error)}); the job begins anew"
        return found, ""

    def save(self, state: Mapping[str, Any]) -> None:
        """Begin to save a state, unless an earlier one is still being written."""
        if self._saving is None or self._saving.done():
            self._saving = self._thread.submit(self._write, json.dumps(state) + "\n")

    def save_last(self, state: Mapping[str, Any]) -> None:
        """Save a state and wait until it is written, or until a timeout."""
        self._thread.submit(self._write, json.dumps(state) + "\n").result(_AT_END_S)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _write(self, content: str) -> None:
        if content != self._written:
            with contextlib.suppress(OSError):  # a full disk: it is tried again
                write_atomically(self._path, content)
                self._written = content
