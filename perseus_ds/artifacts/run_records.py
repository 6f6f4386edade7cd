"""Reading ``run.jsonl``, what each iteration of a job took."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_ds.errors import ConfigError

_LABELS = {"observe": "default clocks", "run": "under the plan"}


@dataclass(frozen=True)
class MeasuredPoint:
    """What iterations really took, as medians.

    Attributes:
        label: What was measured.
        time_s: Iteration time [s].
        energy_j: Energy of one pipeline, one GPU per rank [J].
        iterations: How many there were.
    """

    label: str
    time_s: float
    energy_j: float
    iterations: int


def measured_points(path: Path | str, *, pipelines: int = 1) -> list[MeasuredPoint]:
    """Return one point for each phase of a job's last start, warming up left out.

    Args:
        path: ``run.jsonl``, or the folder it is in.
        pipelines: How many pipelines the energies of the job are the sum of.

    Raises:
        ConfigError: The file is missing, a line of it is no record, or it has no iterations.
    """
    path = Path(path)
    path = path / "run.jsonl" if path.is_dir() else path
    phases: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(path):
        if record.get("event") == "start":
            phases = {}
        elif record.get("phase") in _LABELS and record["energy_j"] is not None:  # energy that could be read
            phases.setdefault(record["phase"], []).append(record)
    if not phases:
        raise ConfigError(f"{path}: no iterations at default clocks or under a plan. Train for some steps more.")
    return [
        MeasuredPoint(
            label=_LABELS[phase],
            time_s=statistics.median(r["time_s"] for r in records),
            energy_j=statistics.median(r["energy_j"] for r in records) / pipelines,
            iterations=len(records),
        )
        for phase, records in phases.items()
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a ``run.jsonl``, but for a last one that was cut off.

    Raises:
        ConfigError: The file is missing, or a line of it is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected the run.jsonl of a training run.") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            complete = isinstance(record, dict) and (
                "event" in record or {"phase", "time_s", "energy_j"} <= set(record)
            )
        except json.JSONDecodeError:
            complete = False
        if not complete:
            if number == len(lines):  # a job that was killed, or is still writing
                break
            raise ConfigError(f"{path}, line {number}: not a record of an iteration: {line[:80]!r}.")
        records.append(record)
    return records
