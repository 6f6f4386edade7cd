"""Writes the records of a job to ``run.jsonl``, off the training thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from perseus_ds.artifacts.io import open_without_links
from perseus_ds.artifacts.record_follower import RecordFollower
from perseus_ds.artifacts.run_file import FILE_NAME, to_line
from perseus_ds.artifacts.run_records import Record
from perseus_ds.report.live.progress import JobLog

logger = logging.getLogger("perseus_ds")
# Records of iterations are made and written together: one by one they would take time from training in each.
_TOGETHER_S = 0.5
# Of a disk that is full for hours the last records are kept, some megabytes.
_MOST_UNWRITTEN = 10_000

_Waiting: TypeAlias = tuple[Callable[[], Record], float] | threading.Event
"""What makes a record, and how long it may wait [s]; or what is set once all before it is written."""


class RecordWriter:
    """One thread appends records to the file in the order in which they were given.

    Args:
        directory: The job's output folder.
        log: Gets all records, those of earlier starts first.
        on_record: Called with each record of this start, on the thread.
    """

    def __init__(self, directory: Path, log: JobLog, on_record: Callable[[Record], None]) -> None:
        self._path = directory / FILE_NAME
        self._log = log
        self._on_record = on_record
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._unwritten: deque[bytes] = deque(maxlen=_MOST_UNWRITTEN)
        self._works = True
        self._thread = threading.Thread(target=self._write_all, name="perseus-records", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Have a record written; returns at once, from any thread."""
        self._waiting.put((lambda: record, 0.0))

    def write_soon(self, make: Callable[[], Record]) -> None:
        """Have a record made and written within half a second; returns at once, from any thread."""
        self._waiting.put((make, _TOGETHER_S))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything given so far is written, or writing takes longer than some time [s]."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(timeout_s)

    def _write_all(self) -> None:
        try:
            for _, records in RecordFollower(self._path.parent).read():
                self._log.add(records)
        except FileNotFoundError:
            pass  # there is no earlier start
        except Exception as error:  # those of this start are of use all the same
            logger.warning("perseus: the records of earlier starts cannot be read (%r).", error)
        while True:
            lines, written = self._made(self._next_together())
            if lines:
                self._append(lines)
            for event in written:
                event.set()

    def _next_together(self) -> list[_Waiting]:
        """Wait for what is to be done, and for what comes while that may still wait."""
        found: list[_Waiting] = []
        end_s = math.inf
        with contextlib.suppress(queue.Empty):
            while True:
                rest_s = None if math.isinf(end_s) else max(0.0, end_s - time.monotonic())
                found.append(waiting := self._waiting.get(timeout=rest_s))
                may_wait_s = 0.0 if isinstance(waiting, threading.Event) else waiting[1]
                end_s = min(end_s, time.monotonic() + may_wait_s)
        return found

    def _made(self, together: list[_Waiting]) -> tuple[list[bytes], list[threading.Event]]:
        """Make records; return their lines, and what is to be set once they are written."""
        lines, written = [], []
        for waiting in together:
            if isinstance(waiting, threading.Event):
                written.append(waiting)
                continue
            try:
                record = waiting[0]()
                lines.append(to_line(record).encode())
                self._on_record(record)
                self._log.add([record])
            except Exception as error:  # the records after it are of use all the same
                logger.warning("perseus: a record of this job cannot be made (%r); it is left out.", error)
        return lines, written

    def _append(self, lines: list[bytes]) -> None:
        """Write lines, after those that could not be written: the disk may have been full for a while."""
        self._unwritten.extend(lines)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_without_links(self._path, append=True) as file:
                while self._unwritten:
                    _append_whole(file.fileno(), self._unwritten[0])
                    self._unwritten.popleft()
        except OSError as error:
            if self._works:
                logger.warning("perseus: %s cannot be written (%s); training goes on without it.", self._path, error)
            self._works = False
            return
        if not self._works:
            logger.warning("perseus: %s can be written again.", self._path)
        self._works = True


def _append_whole(handle: int, line: bytes) -> None:
    """Append a line to a file; where only a part can be written, that is taken back.

    Raises:
        OSError: It cannot be written.
    """
    size = os.fstat(handle).st_size
    try:
        while line:
            line = line[os.write(handle, line) :]
    except OSError:
        os.ftruncate(handle, size)
        raise
