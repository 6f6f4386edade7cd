"""Reads a ``run.jsonl`` while it grows, also on a disk that several nodes share."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from perseus_ds.artifacts.limits import MOST_RECORD_BYTES, MOST_RECORD_LINE_BYTES
from perseus_ds.artifacts.run_file import FILE_NAME, from_line
from perseus_ds.artifacts.run_records import Record

_MOST_BYTES = MOST_RECORD_LINE_BYTES
"""Read at once; a line that is longer is no record."""
_HEAD_BYTES = 256


class RecordFollower:
    """Returns the records of a file that were added since it was last asked.

    Each time the file is opened anew, so that a shared disk shows what other nodes have written. A last line without
    its end is read once it is complete.

    Args:
        folder: The job's output folder.

    Attributes:
        unreadable: Number of lines that are no records.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0
        self._inode = -1
        self._head = b""
        self.unreadable = 0

    def read(self) -> Iterator[tuple[bool, list[Record]]]:
        """Yield the new records, those of some megabytes at a time, each time with whether the file has changed.

        It has if it is another one than before, or was cut: then its records are all new, and those before are no
        longer valid.

        Raises:
            OSError: It cannot be read, is no regular file, or too large.
        """
        # A FIFO is opened without waiting for who writes to it.
        with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_RECORD_BYTES:
                raise OSError(f"{self._path}: expected a regular file of at most {MOST_RECORD_BYTES} bytes")
            head = file.read(_HEAD_BYTES)
            is_same = status.st_ino == self._inode and status.st_size >= self._offset and head.startswith(self._head)
            is_new = self._offset > 0 and not is_same
            if not is_same:
                self._offset = self.unreadable = 0
            self._inode, self._head = status.st_ino, head
            file.seek(self._offset)
            while block := self._complete_lines(file.read(_MOST_BYTES)):
                self._offset += len(block)
                yield is_new, self._records(block)
                is_new = False
                file.seek(self._offset)

    @staticmethod
    def _complete_lines(block: bytes) -> bytes:
        end = block.rfind(b"\n") + 1
        return block if len(block) == _MOST_BYTES and not end else block[:end]

    def _records(self, lines: bytes) -> list[Record]:
        found = [_record(line) for line in lines.splitlines()]
        self.unreadable += found.count(None)
        return [record for record in found if record is not None]


def _record(line: bytes) -> Record | None:
    try:
        return from_line(line)
    except ValueError:
        return None
