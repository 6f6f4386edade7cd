"""``run.jsonl``: records of a job's iterations and events, one JSON object per line.

The job's server writes a record for each iteration (``run_iterations.py``), and the job's events (``run_events.py``).
The first iterations of a long job are replaced by their sums. The file is read while it grows. The keys are described
in ``docs/files.md``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import typing
from collections.abc import Iterator
from pathlib import Path

from perseus_ds.artifacts.io import open_bounded, parse_json
from perseus_ds.artifacts.run_events import Event
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations
from perseus_ds.artifacts.validation import MOST_RECORD_BYTES, MOST_RECORD_LINE_BYTES
from perseus_ds.errors import ConfigError
from perseus_ds.units import bounded

logger = logging.getLogger("perseus_ds")
FILE_NAME = "run.jsonl"
Record = IterationRecord | SummedIterations | Event
_KNOWN: dict[str, type[Event]] = {
    name: kind for kind in Event.__subclasses__() for name in typing.get_args(kind.model_fields["event"].annotation)
}


def is_training(record: Record) -> bool:
    """Return whether a record is about iterations with valid time and energy."""
    # During the calibration of a simulated GPU, instructions are not yet delayed to simulated speed.
    return isinstance(record, SummedIterations) or (isinstance(record, IterationRecord) and record.phase != "calibrate")


def to_line(record: Record) -> str:
    """Return a record as its line of ``run.jsonl``."""
    # Characters that UTF-8 lacks become question marks: error messages may quote paths that are not valid UTF-8.
    texts = {name: value.encode(errors="replace").decode() for name, value in record if isinstance(value, str)}
    is_short = isinstance(record, SummedIterations)
    return record.model_copy(update=texts).model_dump_json(exclude_defaults=is_short) + "\n"


def from_line(line: str | bytes) -> Record:
    """Return the record of a line of ``run.jsonl``. A ValueError is raised if it is not one."""
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if "event" in raw:
        raw = bounded(raw)
        return _KNOWN.get(str(raw["event"]), Event).model_validate(raw)
    if "parts" in raw:
        return SummedIterations.model_validate(bounded(raw))
    known = IterationRecord.model_fields
    return IterationRecord.model_validate({key: value and bounded(value) for key, value in raw.items() if key in known})


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ``run.jsonl``, given its path or its folder.

    Lines that are not records are skipped with a warning, such as one that the crash of a node has cut off. A last line
    may still be being written, so it is skipped without a warning.

    Raises:
        ConfigError: If the file is missing or too large, or no line is a record.
    """
    path = path / FILE_NAME if path.is_dir() else path
    records = skipped = 0  # skipped ones are followed by another line
    first_skipped: tuple[int, bytes] | None = None
    is_skipped = False
    with open_bounded(path, ConfigError, "run.jsonl of a training run", MOST_RECORD_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_RECORD_LINE_BYTES), b""), start=1):
            skipped += is_skipped
            record: Record | None = None
            try:
                record = from_line(line)
            except ValueError:
                first_skipped = first_skipped or (number, line[:80])
            is_skipped = record is None
            if record is not None:
                records += 1
                yield record
    if first_skipped is None:
        return
    if not records:
        raise ConfigError(f"{path}, line 1: not a record of an iteration: {first_skipped[1]!r}.")
    if skipped:
        logger.warning(
            "%s: %d lines are not records and are skipped, such as line %d: %r", path, skipped, *first_skipped
        )


_HEAD_BYTES = 256


class RecordFollower:
    """Returns the records that were added to a file since the previous call, and counts lines that are not records.

    The file is opened again at each call, so that a shared disk shows the data written by other nodes. An incomplete
    last line is read once it is complete.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._offset = 0
        self._inode = -1
        self._head = b""
        self.unreadable = 0

    def read(self) -> Iterator[tuple[bool, list[Record]]]:
        """Yield the new records in batches of some megabytes, each with False.

        If the file was replaced or truncated, ``(True, [])`` is yielded first: all earlier records are no longer valid.

        Raises:
            OSError: If the file cannot be read, is not a regular file, or is too large.
        """
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_RECORD_BYTES:
                raise OSError(f"{self._path}: expected a regular file of at most {MOST_RECORD_BYTES} bytes")
            head = file.read(_HEAD_BYTES)
            is_same = status.st_ino == self._inode and status.st_size >= self._offset and head.startswith(self._head)
            if not is_same:
                if self._offset:
                    yield True, []
                self._offset = self.unreadable = 0
            self._inode, self._head = status.st_ino, head
            file.seek(self._offset)
            while block := file.read(MOST_RECORD_LINE_BYTES):
                end = block.rfind(b"\n") + 1
                if not end and len(block) < MOST_RECORD_LINE_BYTES:  # a longer line is not a record
                    return
                block = block[:end] if end else block
                self._offset += len(block)
                found, lines = [], block.splitlines()
                for line in lines:
                    with contextlib.suppress(ValueError):
                        found.append(from_line(line))
                self.unreadable += len(lines) - len(found)
                yield False, found
                file.seek(self._offset)
