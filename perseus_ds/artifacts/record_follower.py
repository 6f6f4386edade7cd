"""Reads a ``run.jsonl`` while it grows, also on a disk that several nodes share."""

from __future__ import annotations

import os
from pathlib import Path

from perseus_ds.artifacts.run_records import FILE_NAME, Record, record_or_none

_MOST_BYTES = 1 << 24
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

    def read(self) -> tuple[bool, list[Record]]:
        """Return whether the file is another one than before, or was cut, and its new records.

        If it is, they are all of its records, and those returned before are no longer valid.

        Raises:
            OSError: It cannot be read.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
            is_same = status.st_ino == self._inode and status.st_size >= self._offset and head.startswith(self._head)
            is_new = self._offset > 0 and not is_same
            if not is_same:
                self._offset = self.unreadable = 0
            self._inode, self._head = status.st_ino, head
            file.seek(self._offset)
            records: list[Record] = []
            while block := self._complete_lines(file.read(_MOST_BYTES)):
                self._offset += len(block)
                records += self._records(block)
                file.seek(self._offset)
        return is_new, records

    @staticmethod
    def _complete_lines(block: bytes) -> bytes:
        end = block.rfind(b"\n") + 1
        return block if len(block) == _MOST_BYTES and not end else block[:end]

    def _records(self, lines: bytes) -> list[Record]:
        found = [record_or_none(line.decode(errors="replace")) for line in lines.splitlines()]
        self.unreadable += found.count(None)
        return [record for record in found if record is not None]
