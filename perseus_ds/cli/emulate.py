"""``perseus-ds emulate``: what a frontier saves for a job of many pipelines with a straggler."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import InstructionStreams
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.inputs import naming
from perseus_ds.errors import ConfigError, FrontierError
from perseus_ds.optimizer.emulation import Curve, EmulatedJob, Emulation, busy_at_highest_clock, emulate
from perseus_ds.pipeline.instruction import Instruction, Kind


class EmulateArguments(Arguments):
    """Arguments of the command; ``configs/cli/emulate.yaml`` explains them."""

    frontier: list[Path] = Field(min_length=1)
    profile: Path
    pipelines: int
    straggler: list[float]
    gpus_per_stage: int
    time_scale: float
    energy_scale: float | None
    micro_batches: int | None = Field(ge=1)
    blocking_power_w: float | None = Field(ge=0, allow_inf_nan=False)

    @field_validator("frontier", "straggler", mode="before")
    @classmethod
    def _one_is_a_list_too(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]


def run(overrides: list[str]) -> int:
    """Print one column of savings for each frontier."""
    arguments = compose("emulate", overrides, EmulateArguments)
    profile = StageProfile.load(arguments.profile)
    results = [_emulate(path, profile, arguments) for path in arguments.frontier]
    print(_table([str(path) for path in arguments.frontier], results, arguments))
    if profile.info.simulated:
        print("The profile is SIMULATED: no GPU was measured.")
    return 0


def _emulate(path: Path, profile: StageProfile, arguments: EmulateArguments) -> Emulation:
    if path.suffix == ".csv":
        streams, curve = _streams_1f1b(path, profile, arguments.micro_batches), _read_curve(path)
        power_w = arguments.blocking_power_w
    else:
        frontier = Frontier.load(path)
        streams = frontier.instructions
        curve = Curve(
            np.array([plan.time_s for plan in frontier.plans]), np.array([plan.energy_j for plan in frontier.plans])
        )
        power_w = frontier.provenance.blocking_power_w
    if power_w is None:
        raise ConfigError(f"blocking_power_w is missing: {path} does not hold it. Write blocking_power_w=….")
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


def _streams_1f1b(path: Path, profile: StageProfile, micro_batches: int | None) -> InstructionStreams:
    """Return what each rank computes, in no particular order: enough to sum it up."""
    if micro_batches is None:
        raise ConfigError(f"micro_batches is missing: {path} does not hold it. Write micro_batches=….")
    return tuple(
        tuple(Instruction(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches))
        for stage in range(profile.num_stages)
    )


def _read_curve(path: Path) -> Curve:
    """Read a CSV with columns time and energy (lowtime's), or time_s and energy_j (ours)."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            found = reader.fieldnames or ()
            columns = ("time_s", "energy_j") if "time_s" in found else ("time", "energy")
            if missing := [column for column in columns if column not in found]:
                raise FrontierError(f"{path}: column {missing[0]!r} is missing; found {','.join(found)}.")
            rows = [[float(record[column]) for column in columns] for record in reader]
        times_s, energies_j = np.array(rows).reshape(-1, 2).T
        return Curve(times_s, energies_j)
    except OSError as error:
        raise FrontierError(f"{path}: cannot be read ({error.strerror}).") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, FrontierError):
            raise error if str(error).startswith(str(path)) else FrontierError(f"{path}: {error}") from None
        raise FrontierError(f"{path}, line {reader.line_num}: expected numbers ({error}).") from None


def _table(names: list[str], results: list[Emulation], arguments: EmulateArguments) -> str:
    head = f"{arguments.pipelines} pipelines, {arguments.gpus_per_stage} GPUs per stage; against the highest clock"
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
    for row, slowdown in enumerate(arguments.straggler):
        values = [f"{result.stragglers[row].saving:.2%}" for result in results]
        lines.append(line(f"saved with a straggler {slowdown:g}x", values))
    return "\n".join(lines)
