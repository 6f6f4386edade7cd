"""Reads and writes ``run.jsonl``: one record a line, in the order in which things happened."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perseus_ds.artifacts import hour_records as _hour_records  # noqa: F401  # whose kinds of events are known
from perseus_ds.artifacts.io import open_bounded, parse_json
from perseus_ds.artifacts.limits import (
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    MOST_RECORD_BYTES,
    MOST_RECORD_LINE_BYTES,
    MOST_RECORDS,
)
from perseus_ds.artifacts.printable import bounded
from perseus_ds.artifacts.record_base import Event
from perseus_ds.artifacts.run_records import IterationRecord, Record
from perseus_ds.errors import ConfigError

FILE_NAME = "run.jsonl"
_KNOWN: dict[str, type[Event]] = {
    name: kind for kind in Event.__subclasses__() for name in typing.get_args(kind.model_fields["event"].annotation)
}

_ITERATION_KEYS = frozenset((*IterationRecord.model_fields, "saved"))


def to_line(record: Record) -> str:
    """Return a record as its line of ``run.jsonl``; characters that UTF-8 does not have become question marks."""
    # Paths whose bytes are not UTF-8 have such characters, and errors quote paths.
    texts = {name: value.encode(errors="replace").decode() for name, value in record if isinstance(value, str)}
    return record.model_copy(update=texts).model_dump_json() + "\n"


def from_line(line: str | bytes) -> Record:
    """Return the record of a line of ``run.jsonl``, written by this version or by version 1.

    Raises:
        ValueError: It is no record.
    """
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if "event" in raw:
        raw = bounded(raw)
        if raw["event"] == "start":
            raw.setdefault("schema_version", 1)  # which had no such key
        return _KNOWN.get(str(raw["event"]), Event).model_validate(raw)
    known = {key: None if value is None else bounded(value) for key, value in raw.items() if key in _ITERATION_KEYS}
    return IterationRecord.model_validate(_with_default_energy(known))


def _with_default_energy(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compute the energy at default clocks, instead of which version 1 stored the saving."""
    energy_j, saved = raw.get("energy_j"), raw.get("saved")
    if "default_energy_j" in raw or not isinstance(energy_j, float | int) or not isinstance(saved, float | int):
        return raw
    if not -1e6 < saved < 1:
        return raw
    return {**raw, "default_energy_j": energy_j / (1 - saved)}


def read_records(path: Path) -> list[Record]:
    """Return all records of a file, as :func:`iterate_records` does."""
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ``run.jsonl`` (or of the folder it is in), but for a last one that was cut off.

    Raises:
        ConfigError: The file is missing, a line of it is no record, or there are too many.
    """
    path = path / FILE_NAME if path.is_dir() else path
    cut_off: tuple[int, bytes] | None = None
    events = event_bytes = 0
    with open_bounded(path, ConfigError, "run.jsonl of a training run", MOST_RECORD_BYTES) as file:
        for number in itertools.count(1):
            line = file.readline(MOST_RECORD_LINE_BYTES)
            if cut_off is not None and line:
                raise ConfigError(f"{path}, line {cut_off[0]}: not a record of an iteration: {cut_off[1][:80]!r}.")
            if not line:  # a last line may be cut off: the job was killed, or is still writing
                return
            try:
                record = from_line(line)
            except ValueError:
                cut_off = number, line
                continue
            if isinstance(record, Event):
                events, event_bytes = events + 1, event_bytes + len(line)
            if number > MOST_RECORDS or events > MOST_EVENTS or event_bytes > MOST_EVENT_BYTES:
                raise ConfigError(
                    f"{path}, line {number}: at most {MOST_RECORDS} records are read, of which {MOST_EVENTS} with "
                    f"{MOST_EVENT_BYTES} bytes may be events. Give each job an output_dir of its own."
                )
            yield record
