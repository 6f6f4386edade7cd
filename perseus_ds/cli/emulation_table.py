"""What ``perseus-ds emulate`` reads and prints: the curve of a frontier from a CSV, and the table of savings."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

import numpy as np

from perseus_ds.artifacts.io import read_text
from perseus_ds.artifacts.limits import MOST_CSV_BYTES, MOST_CSV_ROWS
from perseus_ds.artifacts.plan import InstructionStreams
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.inputs import check_size
from perseus_ds.errors import FrontierError
from perseus_ds.optimizer.emulation import Curve, Emulation
from perseus_ds.pipeline.instruction import Instruction, Kind


def streams_1f1b(profile: StageProfile, micro_batches: int) -> InstructionStreams:
    """Return what each rank computes, in no particular order: enough to sum it up.

    Raises:
        ConfigError: That is too much.
    """
    check_size(profile.num_stages, micro_batches)
    return tuple(
        tuple(Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches))
        for stage in range(profile.num_stages)
    )


def read_curve(path: Path) -> Curve:
    """Read a CSV with columns time and energy (lowtime's), or time_s and energy_j (ours).

    Raises:
        FrontierError: It cannot be read, or holds no plan; the message names file and line.
    """
    reader = csv.DictReader(
        io.StringIO(read_text(path, FrontierError, "CSV of a frontier", MOST_CSV_BYTES), newline="")
    )
    try:
        found = reader.fieldnames or ()
        columns = ("time_s", "energy_j") if "time_s" in found else ("time", "energy")
        if missing := [column for column in columns if column not in found]:
            raise FrontierError(f"{path}: column {missing[0]!r} is missing; found {','.join(found)[:200]}.")
        rows = [[float(record[column]) for column in columns] for record in itertools.islice(reader, MOST_CSV_ROWS)]
    except (TypeError, ValueError, csv.Error) as error:
        raise FrontierError(f"{path}, line {reader.line_num}: expected numbers ({str(error)[:200]}).") from None
    times_s, energies_j = np.array(rows).reshape(-1, 2).T
    try:
        return Curve(times_s, energies_j)
    except FrontierError as error:
        raise FrontierError(f"{path}: {error}") from None


def table(names: list[str], head: str, results: list[Emulation]) -> str:
    """Return one column of savings for each frontier, one line for each straggler."""
    columns = [f"({number})" for number in range(1, len(names) + 1)]

    def line(what: str, values: list[str]) -> str:
        return f"{what:32}" + "".join(f"{value:>12}" for value in values)

    lines = [
        *(f"{column} {name}" for column, name in zip(columns, names, strict=True)),
        head,
        line("", columns),
        line("shortest iteration [s]", [f"{r.shortest_s:.3f}" for r in results]),
        line("T* [s]", [f"{r.t_star_s:.3f}" for r in results]),
        line("saved without a straggler", [f"{r.intrinsic:.2%}" for r in results]),
    ]
    for straggler in zip(*(result.stragglers for result in results), strict=True):
        values = [f"{found.saving:.2%}" for found in straggler]
        lines.append(line(f"saved with a straggler {straggler[0].slowdown:g}x", values))
    return "\n".join(lines)
