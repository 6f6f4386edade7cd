"""``perseus-ds emulate``: what a frontier saves for a job of many pipelines with a straggler."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_ds.cli.arguments import argument, require
from perseus_ds.errors import FrontierError

if TYPE_CHECKING:
    from perseus_ds.artifacts.plan import InstructionStreams
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.optimizer.emulation import Emulation, Floats


@dataclass(frozen=True, kw_only=True)
class Emulate:
    """Compute what a frontier saves for a job of many pipelines with a straggler.

    The computation is that of the emulation in the Perseus paper.
    """

    examples = ("perseus-ds emulate perseus/frontier profile=perseus pipelines=16 gpus_per_stage=8",)

    frontier: list[Path] = argument("folder with frontier.json, or a CSV with columns time,energy", word=True)
    profile: Path = argument("profile.csv from which the frontier was computed, or the folder it is in")
    pipelines: int = argument("number of data-parallel pipelines, the straggler included", at_least=1)
    straggler: list[float] = argument(
        "how many times as long as the others the straggler takes", [1.05, 1.1, 1.2, 1.3, 1.4, 1.5], at_least=1
    )
    gpus_per_stage: int = argument("tensor-parallel GPUs of each stage", 1, at_least=1)
    time_scale: float = argument("factor on all times, for profiles of a part of each stage", 1.0, at_least=1e-9)
    energy_scale: float | None = argument("factor on all energies; by default as time_scale", None, at_least=1e-9)
    micro_batches: int | None = argument(
        "micro-batches per iteration, needed with a CSV; otherwise what frontier.json says", None, at_least=1
    )
    blocking_power_w: float | None = argument(
        "power of a GPU that waits [W], needed with a CSV; otherwise what frontier.json says", None, at_least=0
    )

    def execute(self) -> int:
        from perseus_ds.artifacts.profile import StageProfile

        profile = StageProfile.load(self.profile)
        results = [_emulate(path, profile, self) for path in self.frontier]
        columns = [f"({number})" for number in range(1, len(results) + 1)]
        for column, path in zip(columns, self.frontier, strict=True):
            print(column, path)
        print(f"{self.pipelines} pipelines, {self.gpus_per_stage} GPUs per stage; against the highest clock")
        rows = {
            "": columns,
            "shortest iteration [s]": [f"{each.shortest_s:.3f}" for each in results],
            "T* [s]": [f"{each.t_star_s:.3f}" for each in results],
            "saved without a straggler": [f"{each.intrinsic:.2%}" for each in results],
        }
        for slowdown in results[0].with_straggler:
            rows[f"saved with a straggler {slowdown:g}x"] = [f"{each.with_straggler[slowdown]:.2%}" for each in results]
        for what, values in rows.items():
            print(f"{what:32}{''.join(f'{value:>12}' for value in values)}")
        if profile.info.simulated:
            print("The profile is SIMULATED: no GPU was measured.")
        return 0


def _emulate(path: Path, profile: StageProfile, arguments: Emulate) -> Emulation:
    import numpy as np

    from perseus_ds.artifacts.frontier import Frontier
    from perseus_ds.cli.inputs import naming
    from perseus_ds.optimizer.emulation import emulate

    if path.suffix == ".csv":
        require("emulate", vars(arguments), ("micro_batches", "blocking_power_w"))
        assert arguments.micro_batches is not None
        assert arguments.blocking_power_w is not None
        streams, plans = _streams_1f1b(profile, arguments.micro_batches), read_curve(path)
        power_w = arguments.blocking_power_w
    else:
        frontier = Frontier.load(path)
        streams, plans = frontier.instructions, np.array([(plan.time_s, plan.energy_j) for plan in frontier.plans])
        power_w = frontier.provenance.blocking_power_w
    with naming(arguments.profile):
        return emulate(
            plans,
            profile,
            streams,
            blocking_power_w=power_w,
            pipelines=arguments.pipelines,
            gpus_per_stage=arguments.gpus_per_stage,
            slowdowns=arguments.straggler,
            time_scale=arguments.time_scale,
            energy_scale=arguments.time_scale if arguments.energy_scale is None else arguments.energy_scale,
        )


def _streams_1f1b(profile: StageProfile, micro_batches: int) -> InstructionStreams:
    """Return what each rank computes, in no particular order: enough to sum it up.

    Raises:
        ConfigError: That is too much.
    """
    from perseus_ds.cli.inputs import check_size
    from perseus_ds.pipeline.instruction import Instruction, Kind

    check_size(profile.num_stages, micro_batches)
    return tuple(
        tuple(Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches))
        for stage in range(profile.num_stages)
    )


def read_curve(path: Path) -> Floats:
    """Return times and energies of a CSV with columns time and energy (lowtime's), or time_s and energy_j (ours).

    Raises:
        FrontierError: It cannot be read, or holds no plan; the message names file and line.
    """
    import numpy as np

    from perseus_ds.artifacts.io import read_text
    from perseus_ds.artifacts.validation import LEAST, MOST_JOULES, brief

    reader = csv.DictReader(io.StringIO(read_text(path, FrontierError, "CSV of a frontier"), newline=""))
    try:
        found = reader.fieldnames or ()
        columns = ("time_s", "energy_j") if "time_s" in found else ("time", "energy")
        if missing := [column for column in columns if column not in found]:
            raise FrontierError(f"{path}: column {missing[0]!r} is missing; found {','.join(found)[:200]}.")
        rows = [[float(record[column]) for column in columns] for record in reader]
    except (TypeError, ValueError, csv.Error) as error:
        raise FrontierError(f"{path}, line {reader.line_num}: expected numbers ({brief(error)}).") from None
    if not rows or not all(LEAST <= value <= MOST_JOULES for row in rows for value in row):
        raise FrontierError(
            f"{path}: a frontier needs at least one plan, with positive times and energies, from {LEAST:g} to "
            f"{MOST_JOULES:g}."
        )
    return np.array(rows)
