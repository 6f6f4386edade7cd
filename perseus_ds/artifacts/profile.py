"""A profile: time and energy of each stage's instructions at each clock.

``profile.csv`` has one measurement per row. ``profile.json`` in the same folder describes the device and job, the fixed
durations, and the quality of each row.
"""

from __future__ import annotations

import csv
import io
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, ValidationError

from perseus_ds.artifacts.io import MOST_JSON_BYTES, FileModel, read_model, read_text, write_together
from perseus_ds.artifacts.layout import Layout
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.artifacts.validation import (
    LEAST_GPU_W,
    MOST_CLOCK_MHZ,
    MOST_GPU_W,
    MOST_INSTRUCTION_S,
    Clock,
    Count,
    Duration,
    Energy,
    Index,
    Many,
    MicroBatchCount,
    Power,
    Stage,
    StageCount,
    Text,
    Time,
    explain,
)
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.dag import FixedDurations
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Payload

logger = logging.getLogger("perseus_ds")


class GpuSettings(FileModel):
    """Settings of a GPU that affect its default clocks and its power. None stands for unknown."""

    power_limit_w: Power | None = Field(None, description="The power limit in force [W].")
    application_clock_mhz: Clock | None = Field(None, description="Upper limit of default clocks [MHz].")
    memory_clock_mhz: Clock | None = Field(None, description="Memory clock, which may be locked [MHz].")
    power_profiles: list[Text] = Field(
        default_factory=list, description="Enforced workload power profiles, by NVML's names."
    )
    power_smoothing: dict[Text, Index] = Field(
        default_factory=dict,
        description="Settings of power smoothing by NVML's names and in its units; empty if it is off.",
    )
    whole_module: bool | None = Field(
        None, description="Whether energies are those of the whole module instead of the GPU; null if unknown."
    )

    @property
    def energy_note(self) -> str:
        """Text to be shown with energies that are not only those of GPUs. Empty if they are."""
        return {True: "energy of whole modules", False: "", None: "unknown: energy of GPUs or whole modules"}[
            self.whole_module
        ]

    def __str__(self) -> str:
        facts = [
            f"power limit {self.power_limit_w:g} W" if self.power_limit_w is not None else "power limit not known",
            f"application clock {self.application_clock_mhz} MHz" if self.application_clock_mhz is not None else "",
            f"memory clock {self.memory_clock_mhz} MHz" if self.memory_clock_mhz is not None else "",
            f"power profile {', '.join(self.power_profiles)}" if self.power_profiles else "no power profile",
            "power smoothing " + (", ".join(f"{n} {v}" for n, v in self.power_smoothing.items()) or "off"),
            self.energy_note,
        ]
        return "; ".join(fact for fact in facts if fact)


def energy_note(settings: GpuSettings | None) -> str:
    """Return the text to be shown with energies that may not be only those of GPUs. Empty if they are."""
    return "" if settings is None else settings.energy_note


_MOST_NAMED = 8
"""Maximum number of ranks or clocks listed in a message."""
COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
Key = tuple[int, Kind]
"""Stage and kind of instruction."""
RowKey = tuple[int, Kind, int]
"""Stage, kind of instruction, and clock [MHz]."""
Floats = npt.NDArray[np.float64]
Bytes = Annotated[int, Field(ge=0, lt=2**53)]
RelativeError = Annotated[float, Field(ge=0, le=1e9)]


class TransferDuration(FileModel):
    """Duration of a transfer over one boundary, without waiting for the other rank."""

    payload: Payload = Field(description="`activation` or `grad`.")
    source: Stage = Field(description="Stage that sends.")
    target: Stage = Field(description="Stage that receives.")
    time_s: Duration = Field(description="Median time without waiting for the other rank [s].")


class OtherDuration(FileModel):
    """Duration of a command that perseus-ds does not know, on one stage."""

    command: Text = Field(description="Name of the command.")
    stage: Stage = Field(description="The stage.")
    time_s: Duration = Field(description="Median time [s].")


class RowQuality(FileModel):
    """Quality of the measurement of one row. None stands for unknown."""

    stage: Stage = Field(description="The stage.")
    kind: Kind = Field(description="Kind of instruction.")
    clock_mhz: Clock = Field(description="The clock [MHz].")
    samples: Index = Field(description="Number of measurements; 0 if estimated from other clocks.")
    time_relative_error: RelativeError | None = Field(
        None, description="Relative standard error of the time; null if unknown."
    )
    energy_relative_error: RelativeError | None = Field(
        None, description="Relative standard error of the energy; null if unknown."
    )
    temperature_c: Annotated[float, Field(ge=-300, le=1e4)] | None = Field(
        None, description="Temperature of the GPU at the end of the measurement [°C]; null if not reported."
    )
    power_state: Text | None = Field(None, description="Its performance state; null if not reported.")


class ProfileInfo(FileModel):
    """The contents of ``profile.json``, all of them optional."""

    schema_version: Literal[1] = Field(1, description="Version of the format.")
    simulated: bool | None = Field(None, description="Whether GPUs are simulated.")
    gpu: Text | None = Field(None, description="Name of the device.")
    driver: Text | None = Field(None, description="Its driver.")
    settings: GpuSettings | None = Field(
        None, description="Settings of rank 0's GPU; null if the device does not report them."
    )
    blocking_power_w: Power | None = Field(None, description="Power of a GPU that waits for another rank [W].")
    default_clock_mhz: Clock | None = Field(
        None, description="Clock under load without a lock, as read during warm-up [MHz]."
    )
    least_dwell_s: dict[Clock, Duration] = Field(
        default_factory=dict,
        description="By clock [MHz], the shortest time at it in plans [s]: twice the 90th percentile of its "
        "latencies on the slowest rank. Empty if latencies were not measured.",
    )
    pass_variation: RelativeError | None = Field(
        None,
        description="Relative standard deviation of the times of equal passes in an iteration at default clocks; null "
        "if not measured.",
    )
    schedule: Text | None = Field(
        None, description="`package.module:Class` of the schedule: a label, which is never imported."
    )
    streams: ScheduleStreams | None = Field(
        None, description="The schedule itself: `name`, `micro_batches` and, in `ranks`, the operations of each rank."
    )
    layout: Layout | None = Field(
        None, description="The parts of the model on each stage; null if the engine does not know them."
    )
    memory_bytes: list[Bytes] = Field(
        default_factory=list,
        description="By pipeline rank, peak memory of tensors, read in the first four iterations and in every "
        "16th; empty without a GPU.",
    )
    stages: StageCount | None = Field(None, description="Number of stages.")
    pipeline_ranks: StageCount | None = Field(None, description="Number of pipeline ranks.")
    data_parallel: Count | None = Field(None, description="Number of data-parallel pipelines.")
    tensor_parallel: Count | None = Field(None, description="Number of tensor-parallel ranks.")
    micro_batches: MicroBatchCount | None = Field(None, description="Number of micro-batches.")
    micro_batch_size: Count | None = Field(None, description="Samples of a micro-batch.")
    tokens_per_micro_batch: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Tokens in the inputs for which the times of the rows hold; left out if unknown."
    )
    model: Text | None = Field(None, description="The module's class.")
    job: Text | None = Field(None, description="A fingerprint of the job and of the measurement's settings.")
    versions: dict[Text, Text] = Field(default_factory=dict, description="Versions of packages.")
    load_s: dict[Stage, Duration] = Field(
        default_factory=dict, description="By stage, median time to load a micro-batch [s]."
    )
    tail_s: dict[Stage, Duration] = Field(
        default_factory=dict,
        description="By stage, median time of gradient reduction and optimizer step [s]; not used if the tail "
        "has rows.",
    )
    transfers: Many[TransferDuration] = Field(default_factory=list, description="Durations of transfers.")
    others: Many[OtherDuration] = Field(
        default_factory=list, description="Durations of commands that perseus-ds does not know."
    )
    rows: Many[RowQuality] = Field(
        default_factory=list,
        description="Quality of each row of the CSV. A row that is listed here but missing in the CSV is an error.",
    )

    @property
    def quality(self) -> dict[RowKey, RowQuality]:
        """The quality of each row, by stage, kind and clock."""
        return {(row.stage, row.kind, row.clock_mhz): row for row in self.rows}

    @property
    def fixed_durations(self) -> FixedDurations:
        """Durations of loads, tails, transfers and unknown commands, which have no clock to choose."""
        return FixedDurations(
            load_s=dict(self.load_s),
            tail_s=dict(self.tail_s),
            transfer_s={(t.payload, t.source, t.target): t.time_s for t in self.transfers},
            other_s={(o.command, o.stage): o.time_s for o in self.others},
        )

    def with_fixed_durations(self, fixed: FixedDurations) -> ProfileInfo:
        """Return a copy with these durations, which take precedence over its own."""
        own = self.fixed_durations
        transfers = [
            TransferDuration(payload=payload, source=source, target=target, time_s=time_s)
            for (payload, source, target), time_s in (own.transfer_s | fixed.transfer_s).items()
        ]
        others = [
            OtherDuration(command=command, stage=stage, time_s=time_s)
            for (command, stage), time_s in (own.other_s | fixed.other_s).items()
        ]
        by_stage = {"load_s": own.load_s | fixed.load_s, "tail_s": own.tail_s | fixed.tail_s}
        return self.model_copy(update={**by_stage, "transfers": transfers, "others": others})


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row: time and energy of a stage's instructions of one kind at one clock, on one GPU."""

    stage: int
    kind: Kind
    clock_mhz: int
    time_s: float
    energy_j: float


def combine_ranks(rows: Sequence[Measurement]) -> Measurement:
    """Combine ranks' rows of one stage, kind and clock to the slowest time and the mean energy."""
    slowest_s, mean_j = max(row.time_s for row in rows), sum(row.energy_j for row in rows) / len(rows)
    return replace(rows[0], time_s=slowest_s, energy_j=mean_j)


def incomplete_clocks(measured: Mapping[Key, Mapping[str, Collection[int]]]) -> dict[RowKey, list[str]]:
    """Return the clocks that some rank of a stage lacks, each with the names of these ranks.

    ``measured`` has the clocks of each rank, by the rank's name. A rank with any kind of a stage shares that stage.
    """
    sharing: dict[int, dict[str, None]] = defaultdict(dict)
    for (stage, _), by_rank in measured.items():
        sharing[stage] |= dict.fromkeys(by_rank)
    found = {}
    for (stage, kind), by_rank in sorted(measured.items()):
        for clock_mhz in sorted(set(chain.from_iterable(by_rank.values()))):
            if lacking := [rank for rank in sharing[stage] if clock_mhz not in by_rank.get(rank, ())]:
                found[stage, kind, clock_mhz] = lacking
    return found


def leave_out(incomplete: Mapping[RowKey, Sequence[str]], kept: Collection[Key], where: str = "") -> None:
    """Log the clocks that are ignored, and the ranks that lack them.

    Raises:
        ProfileError: If no clock remains for a stage's forward or backward, which are then not in ``kept``.
    """
    by_key: dict[Key, dict[int, Sequence[str]]] = defaultdict(dict)
    for (stage, kind, clock_mhz), lacking in incomplete.items():
        by_key[stage, kind][clock_mhz] = lacking
    # Usually the same clocks are lacking for all kinds of a stage.
    texts: dict[str, list[str]] = defaultdict(list)
    for (stage, kind), ranks_by_clock in by_key.items():
        clocks, ranks = [*ranks_by_clock], list(dict.fromkeys(chain(*ranks_by_clock.values())))
        if (stage, kind) not in kept and kind is not Kind.TAIL:
            raise ProfileError(
                f"{where}stage {stage}, {kind}: no clock was measured on every rank that shares the stage; "
                f"{ranks[0]} lacks {clocks[0]} MHz. Measure all ranks at the same clocks."
            )
        texts[f"stage {stage}: {_listed(clocks)} MHz, missing on {_listed(ranks, '; ')}"].append(kind)
    if texts:
        text = "; ".join(f"{clocks} ({', '.join(kinds)})" for clocks, kinds in texts.items())
        logger.warning("perseus: %sonly clocks that every rank of a stage has are used. Left out: %s.", where, text)


def _listed(values: Sequence[object], separator: str = ", ") -> str:
    more = len(values) - _MOST_NAMED
    return separator.join(map(str, values[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class ClockOptions:
    """The clocks measured for one (stage, kind), ascending, with time and energy at each, shape (n,)."""

    clock_mhz: npt.NDArray[np.int64]
    time_s: Floats
    energy_j: Floats

    def effective_energy_j(self, blocking_power_w: float) -> Floats:
        """Return the effective energies, ``energy - blocking power * time`` [J]."""
        return self.energy_j - blocking_power_w * self.time_s

    def pareto(self, blocking_power_w: float) -> ClockOptions:
        """Return the Pareto-optimal options in time and effective energy, the fastest first."""
        cost = self.effective_energy_j(blocking_power_w)
        kept: list[int] = []
        for index in np.lexsort((-self.clock_mhz, cost, self.time_s)):
            if not kept or cost[index] < cost[kept[-1]]:
                kept.append(int(index))
        return ClockOptions(self.clock_mhz[kept], self.time_s[kept], self.energy_j[kept])


def lower_hull(time_s: Floats, cost_j: Floats) -> list[int]:
    """Return the indices of the lower hull of points with rising time."""
    kept: list[int] = []
    for right in range(len(time_s)):
        while len(kept) >= 2:
            left, middle = kept[-2:]
            rise = (cost_j[right] - cost_j[left]) * (time_s[middle] - time_s[left])
            if (cost_j[middle] - cost_j[left]) * (time_s[right] - time_s[left]) < rise:
                break
            kept.pop()  # the middle point lies on or above the line through its neighbours
        kept.append(right)
    return kept


class StageProfile:
    """Time and energy by stage, kind and clock.

    Attributes:
        info: The description of the device and job, fixed durations, and the quality of each row.
    """

    def __init__(self, measurements: Iterable[Measurement], info: ProfileInfo | None = None) -> None:
        """Combine the measurements, with the checks described in :meth:`load`.

        Raises:
            ProfileError: If a value is not finite and positive, or rows of the same clock disagree.
        """
        self.info = info or ProfileInfo()
        rows: dict[Key, dict[int, Measurement]] = defaultdict(dict)
        for row in measurements:
            cells = (row.stage, row.kind, row.clock_mhz, row.time_s, row.energy_j)
            where = f"stage {row.stage}, {row.kind}, {row.clock_mhz} MHz: "
            _measurement(dict(zip(COLUMNS, cells, strict=True)), where)
            known = rows[row.stage, row.kind].setdefault(row.clock_mhz, row)
            if known != row:
                raise ProfileError(
                    f"Two measurements disagree for stage {row.stage}, {row.kind}, {row.clock_mhz} MHz: "
                    f"{known.time_s} s, {known.energy_j} J and {row.time_s} s, {row.energy_j} J. Keep one."
                )
        self._rows = {key: {c: by_clock[c] for c in sorted(by_clock)} for key, by_clock in sorted(rows.items())}

    @classmethod
    def load(cls, path: Path | str) -> StageProfile:
        """Read ``profile.csv`` and, if it exists in the same folder, ``profile.json``.

        Rows that differ in an extra column ``rank``, ``dp_rank`` or ``tp_rank`` (Merak's) are combined into one with
        the slowest rank's time and the mean energy.

        Raises:
            ProfileError: If the profile is missing or invalid. The message names file and line, and a remedy.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "profile.csv"
        if not path.exists():
            raise ProfileError(f'{path}: no such profile. Measure one with "mode": "profile", or give its path.')
        info_path = path.with_suffix(".json")
        info = ProfileInfo()
        if info_path.exists():
            remedy = "Measure the profile again, or remove this file to use only the rows."
            info = read_model(ProfileInfo, info_path, ProfileError, "profile.json", remedy=remedy)
        try:
            profile = cls(_read_rows(path), info)
        except ProfileError as error:
            raise error if str(error).startswith(str(path)) else ProfileError(f"{path}: {error}") from None
        for row in info.rows:
            if row.clock_mhz not in profile._rows.get((row.stage, row.kind), {}):
                raise ProfileError(
                    f"{path}: no row for stage {row.stage}, {row.kind}, {row.clock_mhz} MHz, which {info_path.name} "
                    "lists. The file is truncated or was edited; measure the profile again."
                )
        return profile

    def save(self, path: Path | str) -> None:
        """Write ``profile.csv`` and ``profile.json`` in the same folder, either both completely or none."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [",".join(COLUMNS)]
        lines += [f"{m.stage},{m.kind},{m.clock_mhz},{m.time_s!r},{m.energy_j!r}" for m in self.measurements]
        info = self.info.model_dump_json(indent=2) + "\n"
        if len(info) > MOST_JSON_BYTES:  # the indentation is the largest part for long schedules
            info = self.info.model_dump_json() + "\n"
        write_together([(path.with_suffix(".json"), info), (path, "\n".join(lines) + "\n")])

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All rows by stage, kind and ascending clock."""
        return tuple(row for rows in self._rows.values() for row in rows.values())

    @property
    def keys(self) -> tuple[Key, ...]:
        """The (stage, kind) pairs that were measured."""
        return tuple(self._rows)

    @property
    def num_stages(self) -> int:
        return 1 + max((stage for stage, _ in self._rows), default=-1)

    def options(self, stage: int, kind: Kind) -> ClockOptions:
        """Return the measured clocks of one (stage, kind). If there are none, a :class:`ProfileError` says why."""
        rows = self._rows.get((stage, kind))
        if rows is None:
            stages = sorted({stage for stage, _ in self._rows})
            if stage == 0 and stages[:1] == [1]:
                raise ProfileError(
                    f"The profile has stages {stages[0]} to {stages[-1]} and no stage 0: its stages seem to be "
                    "numbered from 1, but must be numbered from 0. Subtract 1 from the column stage."
                )
            raise ProfileError(
                f"The profile has no {kind} rows for stage {stage}. Measure it again, or give fewer stages."
            )
        return ClockOptions(
            np.array(list(rows), dtype=np.int64),
            np.array([row.time_s for row in rows.values()]),
            np.array([row.energy_j for row in rows.values()]),
        )

    def at(self, stage: int, kind: Kind, clock_mhz: int) -> Measurement:
        """Return the row of one clock, which must have been measured."""
        row = self._rows.get((stage, kind), {}).get(clock_mhz)
        if row is None:
            raise ProfileError(f"The profile has no row for stage {stage}, {kind}, {clock_mhz} MHz.")
        return row

    def at_highest_clock(self, stage: int, kind: Kind) -> Measurement:
        """Return the row of the highest measured clock, which is not always the fastest."""
        return self.at(stage, kind, int(self.options(stage, kind).clock_mhz[-1]))

    def where(self, keep: Callable[[int, Kind, int], bool]) -> StageProfile:
        """Return the profile of the rows for which ``keep(stage, kind, clock_mhz)`` is true."""
        quality = [row for row in self.info.rows if keep(row.stage, row.kind, row.clock_mhz)]
        rows = [row for row in self.measurements if keep(row.stage, row.kind, row.clock_mhz)]
        return StageProfile(rows, self.info.model_copy(update={"rows": quality}))


class _Row(FileModel):
    """A row of ``profile.csv``, in which additional columns are ignored."""

    model_config = ConfigDict(extra="ignore")

    stage: Stage
    instruction: Kind
    frequency: Clock
    time: Time
    energy: Energy


def _measurement(cells: Mapping[str, Any], where: str) -> Measurement:
    """Validate the cells of a row, which may be texts, by column."""
    try:
        row = _Row.model_validate(cells)
    except ValidationError as error:
        remedy = _clock_unit(cells["frequency"]) or "Measure it again."
        raise ProfileError(f"{explain(error, _Row, where)} {remedy}") from None
    return Measurement(row.stage, row.instruction, row.frequency, row.time, row.energy)


def _clock_unit(clock: object) -> str:
    """Return a sentence with the likely unit of a clock that is not in MHz, or an empty text."""
    try:
        value = float(str(clock))
    except ValueError:
        return ""
    for unit, in_mhz in (("GHz", 1e3), ("kHz", 1e-3), ("Hz", 1e-6)):
        if 50 <= value * in_mhz <= 5000 and not 50 <= value <= MOST_CLOCK_MHZ:
            return f"Clocks are probably in {unit}: {value:g} {unit} are {value * in_mhz:g} MHz."
    return ""


def _check_units(row: Measurement, where: str) -> None:
    """Raise an error that names the likely unit if the mean power or the time of a row is not plausible for a GPU."""
    power_w = row.energy_j / row.time_s
    drawn = (
        f"{where}{row.energy_j:g} J in {row.time_s:g} s is {power_w:.4g} W, and a GPU draws {LEAST_GPU_W:g} to "
        f"{MOST_GPU_W:g} W."
    )
    if power_w > MOST_GPU_W >= power_w / 1000 >= LEAST_GPU_W:
        raise ProfileError(f"{drawn} Energies are probably in millijoules: divide the column energy by 1000.")
    if power_w < LEAST_GPU_W <= power_w * 1000 <= MOST_GPU_W:
        if row.time_s >= 1:
            raise ProfileError(f"{drawn} Times are probably in milliseconds: divide the column time by 1000.")
        raise ProfileError(f"{drawn} Energies are probably in kilojoules: multiply the column energy by 1000.")
    if not LEAST_GPU_W <= power_w <= MOST_GPU_W:
        raise ProfileError(f"{drawn} Give times in seconds, and energies in joules per GPU.")
    if row.time_s > MOST_INSTRUCTION_S:
        raise ProfileError(
            f"{where}an instruction takes {row.time_s:g} s. Times are probably in milliseconds, and energies in "
            "millijoules: use seconds and joules."
        )


def _read_rows(path: Path) -> list[Measurement]:
    """Read a CSV file and combine the rows of different ranks."""
    # Identical rows of one rank count once, and different ones are an error of StageProfile.
    by_rank: dict[Key, dict[str, dict[int, dict[Measurement, None]]]] = defaultdict(lambda: defaultdict(dict))
    try:
        for line, record in _records(path):
            row = _measurement(record, f"{path}, line {line}: ")
            _check_units(row, f"{path}, line {line}: ")
            own = by_rank[row.stage, row.kind][_rank(record)]
            own.setdefault(row.clock_mhz, {})[row] = None
    except csv.Error as error:
        raise ProfileError(f"{path}: not a CSV file ({error}).") from None
    if not by_rank:
        raise ProfileError(f'{path}: no rows. Measure a profile with "mode": "profile".')
    incomplete = incomplete_clocks(by_rank)
    rows: list[Measurement] = []
    for key, ranks in by_rank.items():
        for clock_mhz in next(iter(ranks.values())):
            if (*key, clock_mhz) in incomplete:
                continue
            of_ranks = [list(own[clock_mhz]) for own in ranks.values()]
            disagreeing = next((own for own in of_ranks if len(own) > 1), None)
            rows += disagreeing or [combine_ranks([row for (row,) in of_ranks])]
    leave_out(incomplete, {(row.stage, row.kind) for row in rows}, f"{path}: ")
    return rows


def _rank(record: Mapping[str, str]) -> str:
    of_rank = {column: record.get(column) for column in ("rank", "dp_rank", "tp_rank")}
    return ", ".join(f"{column} {value}" for column, value in of_rank.items() if value) or "a rank without a number"


def _records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row's line number and its cells by column."""
    reader = csv.DictReader(
        io.StringIO(read_text(path, ProfileError, "profile.csv"), newline=""), skipinitialspace=True
    )
    found = reader.fieldnames or ()
    if missing := [column for column in COLUMNS if column not in found]:
        raise ProfileError(
            f"{path}: column {missing[0]!r} is missing. Expected the columns {','.join(COLUMNS)}, "
            f"found {','.join(found)[:200] or 'an empty file'}."
        )
    for record in reader:
        if None in record:
            raise ProfileError(
                f"{path}, line {reader.line_num}: more cells than columns. Write numbers with a decimal point."
            )
        if empty := [column for column in COLUMNS if not (record[column] or "").strip()]:
            raise ProfileError(
                f"{path}, line {reader.line_num}: {empty[0]} is empty; the file may be truncated. Measure it again."
            )
        yield reader.line_num, record
