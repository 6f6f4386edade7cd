"""Lock of a job's output folder, so that two jobs do not overwrite each other's files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from perseus_ds.config import PerseusConfig
from perseus_ds.errors import ConfigError
from perseus_ds.protocol import places

FILE_NAME = "job.lock"
_MOST_FOLDERS = 100


class FolderLock:
    """Lock that a server holds during its job. The kernel releases it however the process ends."""

    def __init__(self) -> None:
        self._file: int | None = None

    def acquire(self, folder: Path) -> str | None:
        """Lock a folder. Return None on success, otherwise a description of the job that holds it.

        A folder that cannot be written, or is on a file system without locks, is regarded as free.
        """
        path = folder / FILE_NAME
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


def own_folder(config: PerseusConfig, lock: FolderLock, former: str = "") -> tuple[str, str]:
    """Lock and return an output folder, and a warning if it is not the one of the config.

    Args:
        config: The ``perseus`` block.
        lock: Lock to acquire.
        former: The folder of the server that this one replaces, if there was one.

    Raises:
        ConfigError: Another job holds the folder, and this job must not use a different one.
    """
    if former and lock.acquire(Path(former)) is None:
        return former, ""
    owner = lock.acquire(Path(config.output_dir))
    if owner is None:
        return config.output_dir, ""
    taken = f'"output_dir": {json.dumps(config.output_dir)} is the folder of a job that is running ({owner})'
    if config.needs_gpu:
        raise ConfigError(f"{taken}. Give this job another one, or end the other job.")
    for number in range(2, _MOST_FOLDERS):
        other = f"{config.output_dir.rstrip('/')}-{number}"
        if lock.acquire(Path(other)) is None:
            return other, f'{taken}. This job writes to {other}. With "required": true this is an error.'
    raise ConfigError(f"{taken}, and so are {_MOST_FOLDERS - 2} others of this name. Give this job another one.")
