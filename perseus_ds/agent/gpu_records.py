"""Records of GPUs with clocks that may be locked: a file for each, held by the agent that serves it.

A locked clock outlives every process. Its record is written before the clock is locked, so that the next process that
opens the GPU knows that it must be reset. The record also counts the agents that have served the GPU: an agent that was
stopped and replaced finds another number in it, and does not change the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perseus_ds.agent import slowed_file
from perseus_ds.errors import GpuError
from perseus_ds.protocol import places

_PREFIX = "gpu."
_LENGTH = 64


class GpuHeldError(GpuError):
    """Another agent serves the GPU."""


class GpuRecord:
    """Record of a GPU that this process serves.

    Attributes:
        left_by: Agent that left the clock locked when it died. None if no agent did.
        is_of_same_job: Whether that agent served the same job.
    """

    def __init__(self, gpu: str, agent: str) -> None:
        """Lock the record of a GPU. It is created if there is none.

        Raises:
            GpuHeldError: Another agent serves the GPU.
            OSError: There is no folder for it.
        """
        self.gpu = gpu
        self._path = places.user_folder() / f"{_PREFIX}{gpu}"
        try:
            self._file = places.lock(self._path)
        except (BlockingIOError, PermissionError):
            # Not ``holder_of``, because this process itself may have locked it.
            raise GpuHeldError(f"{gpu} is used by another job of this user{_holder(self._path)}.") from None
        self._agent = agent
        before = _read(self._file)
        self.left_by = before.pid if before.may_be_locked else None
        self.is_of_same_job = before.agent == agent
        self._generation = before.generation + 1
        self._may_be_locked = before.may_be_locked
        self.slowed = slowed_file.SlowedFile(gpu)
        self._write()

    @property
    def is_current(self) -> bool:
        """True if neither another agent nor ``perseus-ds reset`` has taken over the GPU."""
        return _read(self._file).generation in (self._generation, 0)  # 0: it could not be written

    def set_locked(self, may_be_locked: bool) -> None:
        self._may_be_locked = may_be_locked
        if self.is_current:
            self._write()

    def restore(self) -> None:
        """Write the record again if its file was removed, for example at the end of a login session.

        Raises an ``OSError`` if it cannot be written, or if another agent has locked the new file.
        """
        if not places.is_at(self._path, self._file):
            self._path = places.user_folder() / self._path.name
            before, self._file = self._file, places.lock(self._path)
            os.close(before)
        if not _read(self._file).generation:
            self._write()

    def close(self) -> None:
        """Unlock the record without changing its contents."""
        self.slowed.remove()
        os.close(self._file)

    def _write(self) -> None:
        _write(self._file, self._generation, os.getpid(), self._may_be_locked, self._agent)


class UnrecordedGpu:
    """Replaces the record of a simulated GPU. Its clock ends with the processes that use it."""

    left_by: int | None = None
    is_of_same_job = False
    is_current = True
    slowed: slowed_file.SlowedFile | None = None

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu

    def set_locked(self, may_be_locked: bool) -> None:
        """Do nothing, because nothing is recorded."""

    def restore(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def left_locked(agent: str) -> Iterator[GpuRecord]:
    """Yield the locked records of GPUs of this user that no agent serves and that may have a locked clock."""
    for path in places.user_folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, GpuHeldError):
            if not path.is_file() or path.is_symlink():
                continue
            record = GpuRecord(path.name.removeprefix(_PREFIX), agent)
            if record.left_by is not None:
                yield record
            else:
                record.close()


def note_reset(gpu: str) -> None:
    """Record that the clock of a GPU was reset from outside.

    A running agent continues to serve the GPU. A stopped one will not change it when it continues.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(places.user_folder() / f"{_PREFIX}{gpu}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            pid = places.holder(file)
            slowed_file.remove(gpu.partition(":")[2])
            if pid is None or _is_stopped(pid):
                _write(file, _read(file).generation + 1, os.getpid(), False, "reset")
        finally:
            os.close(file)


class _Contents(NamedTuple):
    """Contents of a record: its generation, the process that wrote it, and the agent of that process."""

    generation: int
    pid: int
    may_be_locked: bool
    agent: str


def _read(file: int) -> _Contents:
    """Return the contents of a record, or zeros if it is damaged."""
    try:
        generation, pid, may_be_locked, agent = os.pread(file, _LENGTH, 0).decode().split()
        return _Contents(int(generation), int(pid), may_be_locked == "1", agent)
    except ValueError:
        return _Contents(0, 0, False, "")


def _write(file: int, generation: int, pid: int, may_be_locked: bool, agent: str) -> None:
    os.pwrite(file, f"{generation} {pid} {may_be_locked:d} {agent}\n".ljust(_LENGTH).encode(), 0)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        if pid := places.holder_of(path):
            return f" (process {pid}{', which is stopped' if _is_stopped(pid) else ''})"
    return ""


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
