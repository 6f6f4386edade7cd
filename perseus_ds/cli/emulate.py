"""``perseus-ds emulate``: what a frontier saves for a job of many pipelines with a straggler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from perseus_ds.cli.arguments import argument, require

if TYPE_CHECKING:
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.optimizer.emulation import Emulation


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute what a frontier saves for a job of many pipelines with a straggler.

    The computation is that of the emulation in the Perseus paper.
    """

    examples: ClassVar = ("perseus-ds emulate perseus/frontier profile=perseus pipelines=16 gpus_per_stage=8",)

    frontier: list[Path] = argument("folder with frontier.json, or a CSV with columns time,energy", word=True)
    profile: Path = argument("profile.csv from which the frontier was computed, or the folder it is in")
    pipelines: int = argument("number of data-parallel pipelines, the straggler included", at_least=1)
    straggler: list[float] = argument(
        "how many times as long as the others the straggler takes", [1.05, 1.1, 1.2, 1.3, 1.4, 1.5], at_least=1
    )
    gpus_per_stage: int = argument("tensor-parallel GPUs of each stage", 1, at_least=1)
    time_scale: float = argument("factor on all times, for profiles of a part of each stage", 1.0, at_least=0)
    energy_scale: float | None = argument("factor on all energies; by default as time_scale", None, at_least=0)
    micro_batches: int | None = argument(
        "micro-batches per iteration, needed with a CSV; otherwise what frontier.json says", None, at_least=1
    )
    blocking_power_w: float | None = argument(
        "power of a GPU that waits [W], needed with a CSV; otherwise what frontier.json says", None, at_least=0
    )


def run(arguments: Arguments) -> int:
    """Print one column of savings for each frontier."""
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.cli.emulation_table import table

    profile = StageProfile.load(arguments.profile)
    results = [_emulate(path, profile, arguments) for path in arguments.frontier]
    head = f"{arguments.pipelines} pipelines, {arguments.gpus_per_stage} GPUs per stage; against the highest clock"
    print(table([str(path) for path in arguments.frontier], head, results))
    if profile.info.simulated:
        print("The profile is SIMULATED: no GPU was measured.")
    return 0


def _emulate(path: Path, profile: StageProfile, arguments: Arguments) -> Emulation:
    import numpy as np

    from perseus_ds.artifacts.frontier import Frontier
    from perseus_ds.cli.emulation_table import read_curve, streams_1f1b
    from perseus_ds.cli.inputs import naming
    from perseus_ds.optimizer.emulation import Curve, EmulatedJob, busy_at_highest_clock, emulate

    if path.suffix == ".csv":
        require("emulate", arguments, "micro_batches", "blocking_power_w")
        assert arguments.micro_batches is not None
        assert arguments.blocking_power_w is not None
        streams, curve = streams_1f1b(profile, arguments.micro_batches), read_curve(path)
        power_w = arguments.blocking_power_w
    else:
        frontier = Frontier.load(path)
        streams, curve = (
            frontier.instructions,
            Curve(
                np.array([plan.time_s for plan in frontier.plans]), np.array([plan.energy_j for plan in frontier.plans])
            ),
        )
        power_w = frontier.provenance.blocking_power_w
    job = EmulatedJob(
        pipelines=arguments.pipelines,
        gpus_per_stage=arguments.gpus_per_stage,
        blocking_power_w=power_w,
        time_scale=arguments.time_scale,
        energy_scale=arguments.time_scale if arguments.energy_scale is None else arguments.energy_scale,
    )
    with naming(arguments.profile):
        busy = busy_at_highest_clock(profile, streams)
    return emulate(curve, busy, job, arguments.straggler)
