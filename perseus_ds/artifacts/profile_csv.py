"""``profile.csv``: one measurement a row, read with all checks."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perseus_ds.artifacts.io import read_text
from perseus_ds.artifacts.limits import (
    LEAST,
    MOST_CLOCK_MHZ,
    MOST_CSV_BYTES,
    MOST_CSV_ROWS,
    MOST_JOULES,
    MOST_SECONDS,
    MOST_STAGES,
)
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row: time and energy of one kind of instruction of a stage at one clock, on one GPU."""

    stage: int
    kind: Kind
    clock_mhz: int
    time_s: float
    energy_j: float


def combine_ranks(rows: Sequence[Measurement]) -> Measurement:
    """Return the slowest time and the mean energy of ranks that measured the same stage, kind and clock."""
    slowest_s, mean_j = max(row.time_s for row in rows), sum(row.energy_j for row in rows) / len(rows)
    return replace(rows[0], time_s=slowest_s, energy_j=mean_j)


def check(row: Measurement) -> None:
    """Check that a measurement is possible.

    Raises:
        ProfileError: A value is not a positive number within the limits.
    """
    where = f"stage {row.stage}, {row.kind}, {row.clock_mhz} MHz"
    limits = (("time", row.time_s, "s", MOST_SECONDS), ("energy", row.energy_j, "J", MOST_JOULES))
    for name, value, unit, most in limits:
        if not LEAST <= value <= most:
            raise ProfileError(
                f"{where}: {name} must be a positive number of {unit}, got {value} (allowed: {LEAST:g} to {most:g}). "
                "Measure it again."
            )
    if not (0 <= row.stage < MOST_STAGES and 0 < row.clock_mhz <= MOST_CLOCK_MHZ):
        raise ProfileError(
            f"{where}: stage must be >= 0 and the clock > 0 MHz, stage below {MOST_STAGES} and the clock at most "
            f"{MOST_CLOCK_MHZ} MHz."
        )


def read_rows(path: Path) -> list[Measurement]:
    """Read a CSV; rows of different ranks are combined, rows of the same rank are not.

    Raises:
        ProfileError: The message names file and line.
    """
    try:
        return _read_table(path)
    except csv.Error as error:
        raise ProfileError(f"{path}: not a CSV file ({error}).") from None


def _read_table(path: Path) -> list[Measurement]:
    combined: dict[tuple[int, Kind, int], list[tuple[tuple[str, ...], Measurement]]] = defaultdict(list)
    with io.StringIO(read_text(path, ProfileError, "profile.csv", MOST_CSV_BYTES), newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(
                f"{path}: column {missing[0]!r} is missing. Expected the columns {','.join(COLUMNS)}, "
                f"found {','.join(reader.fieldnames or ())[:200] or 'an empty file'}."
            )
        for number, record in enumerate(reader):
            if number == MOST_CSV_ROWS:
                raise ProfileError(f"{path}: more than {MOST_CSV_ROWS} rows, which are the most that are read.")
            row = _parse(path, reader.line_num, record)
            rank = tuple(record.get(c) or "" for c in ("rank", "dp_rank", "tp_rank"))
            combined[row.stage, row.kind, row.clock_mhz].append((rank, row))
    if not combined:
        raise ProfileError(f'{path}: no rows. Measure a profile with "mode": "profile".')
    return [row for entries in combined.values() for row in _combine(entries)]


def _combine(entries: list[tuple[tuple[str, ...], Measurement]]) -> list[Measurement]:
    """Combine rows of different ranks; rows of the same rank are returned as they are, to be compared."""
    entries = list(dict.fromkeys(entries))
    if len({rank for rank, _ in entries}) < len(entries):
        return [row for _, row in entries]
    return [combine_ranks([row for _, row in entries])]


def _parse(path: Path, line: int, record: dict[str | None, str | None]) -> Measurement:
    def cell(column: str) -> str:
        value = record[column]
        if value is None or not value.strip():
            raise ProfileError(f"{path}, line {line}: {column} is empty; the file may be cut off. Measure it again.")
        return value.strip()

    def number(column: str) -> float:
        try:
            return float(cell(column))
        except ValueError:
            raise ProfileError(f"{path}, line {line}: {column} is {cell(column)!r:.80}, expected a number.") from None

    def whole(column: str) -> int:
        value = number(column)
        if not (value.is_integer() and abs(value) < 2**31):
            raise ProfileError(f"{path}, line {line}: {column} is {cell(column)!r:.80}, expected a whole number.")
        return int(value)

    if None in record:
        raise ProfileError(f"{path}, line {line}: more cells than columns. Write numbers with a decimal point.")
    try:
        kind = Kind(cell("instruction"))
    except ValueError:
        expected = ", ".join(k.value for k in Kind)
        raise ProfileError(
            f"{path}, line {line}: instruction is {cell('instruction')!r:.80}, expected one of {expected}."
        ) from None
    row = Measurement(whole("stage"), kind, whole("frequency"), number("time"), number("energy"))
    try:
        check(row)
    except ProfileError as error:
        raise ProfileError(f"{path}, line {line}: {error}") from None
    return row
