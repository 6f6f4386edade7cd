"""How long each stage's forward and backward take and what they use, at each clock: CSV in and out."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perseus_ds.dag import FixedDurations
from perseus_ds.errors import ProfileError
from perseus_ds.files import read_json, write_atomically
from perseus_ds.instruction import Kind

Floats = npt.NDArray[np.float64]
COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row: what one instruction takes at one clock, on one GPU of the stage."""

    stage: int
    kind: Kind
    clock_mhz: int
    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Options:
    """The clocks measured for one (stage, kind), ascending, with what each one takes.

    Attributes:
        clock_mhz: Shape (n,).
        time_s: Shape (n,).
        energy_j: Shape (n,), per GPU.
    """

    clock_mhz: npt.NDArray[np.int64]
    time_s: Floats
    energy_j: Floats

    def effective_energy_j(self, blocking_power_w: float) -> Floats:
        """Return what running costs beyond waiting, ``energy - blocking power * time`` [J]."""
        return self.energy_j - blocking_power_w * self.time_s

    def pareto(self, blocking_power_w: float) -> Options:
        """Return the options for which none is both as fast and as frugal, fastest last."""
        cost = self.effective_energy_j(blocking_power_w)
        kept: list[int] = []
        for index in np.lexsort((-self.clock_mhz, cost, self.time_s)):
            if not kept or cost[index] < cost[kept[-1]]:
                kept.append(int(index))
        chosen = kept[::-1]
        return Options(self.clock_mhz[chosen], self.time_s[chosen], self.energy_j[chosen])


class TransferDuration(BaseModel):
    """How long a transfer over one boundary takes once both sides are there."""

    model_config = ConfigDict(extra="forbid")
    payload: str
    source: int
    target: int
    time_s: float = Field(ge=0)


class RowQuality(BaseModel):
    """How one row was measured."""

    model_config = ConfigDict(extra="forbid")
    stage: int
    kind: Kind
    clock_mhz: int
    samples: int
    time_relative_error: float | None = None
    energy_relative_error: float | None = None


class ProfileInfo(BaseModel):
    """What ``profile.json`` says about the rows of ``profile.csv``.

    All values are optional: a profile made elsewhere has none of them.
    """

    model_config = ConfigDict(extra="forbid")
    schema_version: int = SCHEMA_VERSION
    simulated: bool | None = None
    gpu: str | None = None
    driver: str | None = None
    blocking_power_w: float | None = Field(default=None, ge=0)
    default_clock_mhz: int | None = None
    schedule: str | None = None
    stages: int | None = None
    pipeline_ranks: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    model: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    load_s: dict[int, float] = Field(default_factory=dict)
    tail_s: dict[int, float] = Field(default_factory=dict)
    transfers: list[TransferDuration] = Field(default_factory=list)
    rows: list[RowQuality] = Field(default_factory=list)

    @property
    def fixed_durations(self) -> FixedDurations:
        """The parts of an iteration that have no clock to choose."""
        return FixedDurations(
            load_s=dict(self.load_s),
            tail_s=dict(self.tail_s),
            transfer_s={(t.payload, t.source, t.target): t.time_s for t in self.transfers},  # type: ignore[misc]
        )


class StageProfile:
    """Time and energy by stage, kind and clock.

    Attributes:
        info: Where the rows come from and what else was measured.
    """

    def __init__(self, measurements: Iterable[Measurement], info: ProfileInfo | None = None) -> None:
        """Combine the measurements; see :meth:`load` for what is checked.

        Raises:
            ProfileError: A value is not a finite positive number, or rows of one key disagree.
        """
        self.info = info or ProfileInfo()
        rows: dict[tuple[int, Kind], dict[int, Measurement]] = defaultdict(dict)
        for row in measurements:
            _check(row)
            known = rows[row.stage, row.kind].setdefault(row.clock_mhz, row)
            if known != row:
                raise ProfileError(
                    f"Two measurements disagree for stage {row.stage}, {row.kind}, {row.clock_mhz} MHz: "
                    f"{known.time_s} s, {known.energy_j} J and {row.time_s} s, {row.energy_j} J. Keep one."
                )
        self._rows = {key: tuple(by_clock[c] for c in sorted(by_clock)) for key, by_clock in sorted(rows.items())}

    @classmethod
    def load(cls, path: Path | str) -> StageProfile:
        """Read ``profile.csv`` and, when it lies beside it, ``profile.json``.

        Rows that differ in an extra column ``rank``, ``dp_rank`` or ``tp_rank`` (Merak's) are
        combined: the slowest rank's time, the mean energy.

        Raises:
            ProfileError: The message names file and line, says what was expected and what to do.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "profile.csv"
        if not path.is_file():
            raise ProfileError(f'{path}: no such profile. Measure one with "mode": "profile", or give its path.')
        info_path = path.with_suffix(".json")
        info = _load_info(info_path) if info_path.is_file() else ProfileInfo()
        try:
            return cls(_read_rows(path), info)
        except ProfileError as error:
            raise error if str(error).startswith(str(path)) else ProfileError(f"{path}: {error}") from None

    def save(self, path: Path | str) -> None:
        """Write ``profile.csv`` and ``profile.json`` beside it, each complete or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [",".join(COLUMNS)]
        lines += [f"{m.stage},{m.kind},{m.clock_mhz},{m.time_s!r},{m.energy_j!r}" for m in self.measurements]
        # The CSV last: a profile.csv that exists always has its profile.json.
        write_atomically(path.with_suffix(".json"), self.info.model_dump_json(indent=2) + "\n")
        write_atomically(path, "\n".join(lines) + "\n")

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All rows, by stage, kind and ascending clock."""
        return tuple(row for rows in self._rows.values() for row in rows)

    @property
    def keys(self) -> tuple[tuple[int, Kind], ...]:
        """The (stage, kind) pairs that were measured."""
        return tuple(self._rows)

    @property
    def num_stages(self) -> int:
        return 1 + max((stage for stage, _ in self._rows), default=-1)

    def options(self, stage: int, kind: Kind) -> Options:
        """Return the measured clocks of one (stage, kind).

        Raises:
            ProfileError: There are none.
        """
        rows = self._rows.get((stage, kind))
        if rows is None:
            raise ProfileError(
                f"The profile has no {kind} rows for stage {stage}. Measure it again, or give fewer stages."
            )
        return Options(
            np.array([r.clock_mhz for r in rows], dtype=np.int64),
            np.array([r.time_s for r in rows]),
            np.array([r.energy_j for r in rows]),
        )

    def at(self, stage: int, kind: Kind, clock_mhz: int) -> Measurement:
        """Return the row of one clock.

        Raises:
            ProfileError: That clock was not measured.
        """
        for row in self._rows.get((stage, kind), ()):
            if row.clock_mhz == clock_mhz:
                return row
        raise ProfileError(f"The profile has no row for stage {stage}, {kind}, {clock_mhz} MHz.")

    def at_highest_clock(self, stage: int, kind: Kind) -> Measurement:
        """Return the row of the highest clock measured, which is not always the fastest."""
        return self.at(stage, kind, int(self.options(stage, kind).clock_mhz[-1]))


def _check(row: Measurement) -> None:
    where = f"stage {row.stage}, {row.kind}, {row.clock_mhz} MHz"
    for name, value, unit in (("time", row.time_s, "s"), ("energy", row.energy_j, "J")):
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"{where}: {name} must be a positive number of {unit}, got {value}. Measure it again.")
    if row.stage < 0 or row.clock_mhz <= 0:
        raise ProfileError(f"{where}: stage must be >= 0 and the clock > 0 MHz.")


def _read_rows(path: Path) -> list[Measurement]:
    combined: dict[tuple[int, Kind, int], list[tuple[tuple[str, ...], Measurement]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(
                f"{path}: column {missing[0]!r} is missing. Expected the columns {','.join(COLUMNS)}, "
                f"found {','.join(reader.fieldnames or ()) or 'an empty file'}."
            )
        for record in reader:
            row = _parse(path, reader.line_num, record)
            rank = tuple(record.get(c) or "" for c in ("rank", "dp_rank", "tp_rank"))
            combined[row.stage, row.kind, row.clock_mhz].append((rank, row))
    if not combined:
        raise ProfileError(f'{path}: no rows. Measure a profile with "mode": "profile".')
    return [row for entries in combined.values() for row in _combine(entries)]


def _combine(entries: list[tuple[tuple[str, ...], Measurement]]) -> list[Measurement]:
    """Make one row of those of different ranks; rows of the same rank stay, to be compared."""
    if len({rank for rank, _ in entries}) < len(entries):
        return [row for _, row in entries]
    rows = [row for _, row in entries]
    first = rows[0]
    return [
        Measurement(
            first.stage,
            first.kind,
            first.clock_mhz,
            max(r.time_s for r in rows),
            sum(r.energy_j for r in rows) / len(rows),
        )
    ]


def _parse(path: Path, line: int, record: dict[str, str | None]) -> Measurement:
    def cell(column: str) -> str:
        value = record[column]
        if value is None or not value.strip():
            raise ProfileError(f"{path}, line {line}: {column} is empty; the file may be cut off. Measure it again.")
        return value.strip()

    try:
        kind = Kind(cell("instruction"))
    except ValueError:
        expected = ", ".join(k.value for k in Kind)
        raise ProfileError(
            f"{path}, line {line}: instruction is {cell('instruction')!r}, expected one of {expected}."
        ) from None
    numbers = {}
    for column in ("stage", "frequency", "time", "energy"):
        try:
            numbers[column] = float(cell(column))
        except ValueError:
            raise ProfileError(f"{path}, line {line}: {column} is {cell(column)!r}, expected a number.") from None
    for column in ("stage", "frequency"):
        if not numbers[column].is_integer():
            raise ProfileError(f"{path}, line {line}: {column} is {cell(column)!r}, expected a whole number.")
    row = Measurement(int(numbers["stage"]), kind, int(numbers["frequency"]), numbers["time"], numbers["energy"])
    try:
        _check(row)
    except ProfileError as error:
        raise ProfileError(f"{path}, line {line}: {error}") from None
    return row


def _load_info(path: Path) -> ProfileInfo:
    raw = read_json(path, ProfileError, "profile.json")
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ProfileError(
            f"{path}: schema_version is {raw.get('schema_version')!r}, this perseus-ds reads {SCHEMA_VERSION}. "
            "Measure the profile again, or remove the file to use the rows alone."
        )
    try:
        return ProfileInfo.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ProfileError(f"{path}: {key}: {first['msg']} (got {first['input']!r}).") from None
