"""``perseus-ds profile``: show, compare, validate, merge and convert profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from perseus_ds.artifacts.profile import ClockOptions, StageProfile
from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.inputs import naming, schedule_for
from perseus_ds.errors import ConfigError
from perseus_ds.optimizer import problem_for
from perseus_ds.pipeline.instruction import Kind


class ProfileArguments(Arguments):
    """Arguments of the command; ``configs/cli/profile.yaml`` explains them."""

    action: Literal["show", "compare", "validate", "merge", "convert"]
    profile: Path
    other: list[Path]
    out: Path | None
    blocking_power_w: float | None


def run(overrides: list[str]) -> int:
    """Do what the first word says."""
    words = [f"action={overrides[0]}", *overrides[1:]] if overrides and "=" not in overrides[0] else overrides
    arguments = compose("profile", words, ProfileArguments)
    profile = StageProfile.load(arguments.profile)
    actions: dict[str, Callable[[ProfileArguments, StageProfile], None]] = {
        "show": _show,
        "compare": _compare,
        "validate": _validate,
        "merge": _merge,
        "convert": _convert,
    }
    actions[arguments.action](arguments, profile)
    return 0


def _show(arguments: ProfileArguments, profile: StageProfile) -> None:
    power_w = _blocking_power_w(arguments, profile)
    print(_heading(profile))
    for stage, kind in profile.keys:
        options = profile.options(stage, kind)
        pareto = set(options.pareto(power_w or 0.0).clock_mhz.tolist())
        print(f"\nstage {stage}, {kind}\n   MHz   time [s]  energy [J]  power [W]")
        for clock, time_s, energy_j in zip(*_columns(options), strict=True):
            mark = "  *" if clock in pareto else ""
            print(f"{clock:6d} {time_s:10.5f} {energy_j:11.4f} {energy_j / time_s:10.1f}{mark}")
    waiting = "effective energy (beyond blocking power)" if power_w else "energy"
    print(f"\n* no other clock is as fast and as low in {waiting}")
    if arguments.out is not None:
        from perseus_ds.report.profile_picture import profile_picture

        profile_picture(profile, arguments.out, blocking_power_w=power_w or 0.0)
        print(f"Written: {arguments.out}")


def _compare(arguments: ProfileArguments, profile: StageProfile) -> None:
    if len(arguments.other) != 1:
        raise ConfigError("other: compare takes one other profile, other=PATH.")
    other = StageProfile.load(arguments.other[0])
    print(f"{_heading(profile)}\n{_heading(other)}\n\nsecond relative to first, at the clocks both have")
    print("stage kind      clocks   time: mean   worst    energy: mean   worst")
    for stage, kind in sorted(set(profile.keys) & set(other.keys)):
        ours, theirs = profile.options(stage, kind), other.options(stage, kind)
        _, i, j = np.intersect1d(ours.clock_mhz, theirs.clock_mhz, return_indices=True)
        if not i.size:
            print(f"{stage:5d} {kind:9} {0:6d}   no clock in common")
            continue
        time, energy = theirs.time_s[j] / ours.time_s[i] - 1, theirs.energy_j[j] / ours.energy_j[i] - 1
        print(
            f"{stage:5d} {kind:9} {i.size:6d}     {time.mean():+8.2%} {_worst(time):+8.2%}"
            f"       {energy.mean():+8.2%} {_worst(energy):+8.2%}"
        )
    for path, only in (
        (arguments.profile, set(profile.keys) - set(other.keys)),
        (arguments.other[0], set(other.keys) - set(profile.keys)),
    ):
        for stage, kind in sorted(only):
            print(f"{stage:5d} {kind:9} only in {path}")


def _validate(arguments: ProfileArguments, profile: StageProfile) -> None:
    info = profile.info
    schedule = schedule_for(profile, schedule=None, stages=None, micro_batches=info.micro_batches or 2)
    with naming(arguments.profile):
        problem = problem_for(schedule, profile, arguments.blocking_power_w)
    print(_heading(profile))
    missing = [f"stage {s}, {k}" for s in range(profile.num_stages) for k in _PASSES if (s, k) not in profile.keys]
    for what in missing:
        print(f"  note: {what}: no rows")
    for group in problem.groups:
        options = profile.options(group.stage, group.kind)
        slower = options.time_s[1:] / np.minimum.accumulate(options.time_s)[:-1] - 1
        if slower.max() > 0.03:
            clock = int(options.clock_mhz[1:][slower.argmax()])
            where = f"stage {group.stage}, {group.kind}, {clock} MHz"
            print(f"  note: {where}: {slower.max():.1%} slower than at a lower clock")
    print(f"Plans can be made of it: {len(problem.groups)} kinds of instructions, T_min {problem.t_min_s:.4f} s.")


def _merge(arguments: ProfileArguments, profile: StageProfile) -> None:
    if not arguments.other:
        raise ConfigError("other: merge needs more profiles, other=[PATH,...].")
    others = [StageProfile.load(path) for path in arguments.other]
    for path, other in zip(arguments.other, others, strict=True):
        for key in ("gpu", "simulated", "model", "micro_batch_size", "tensor_parallel"):
            ours, theirs = getattr(profile.info, key), getattr(other.info, key)
            if ours is not None and theirs is not None and ours != theirs:
                raise ConfigError(
                    f"{path}: {key} is {theirs!r}, in {arguments.profile} it is {ours!r}; such rows do not go together."
                )
    rows = [row for p in (profile, *others) for row in p.info.rows]
    info = profile.info.model_copy(update={"rows": rows})
    _write(arguments, StageProfile([m for p in (profile, *others) for m in p.measurements], info))


def _convert(arguments: ProfileArguments, profile: StageProfile) -> None:
    power_w = _blocking_power_w(arguments, profile)
    stages = profile.info.stages or profile.num_stages
    _write(
        arguments,
        StageProfile(
            profile.measurements, profile.info.model_copy(update={"blocking_power_w": power_w, "stages": stages})
        ),
    )


def _write(arguments: ProfileArguments, profile: StageProfile) -> None:
    if arguments.out is None:
        raise ConfigError(f"out: {arguments.action} needs a folder to write to, out=FOLDER.")
    profile.save(arguments.out / "profile.csv")
    print(f"{_heading(profile)}\nWritten: {arguments.out / 'profile.csv'} and profile.json")


_PASSES = (Kind.FORWARD, Kind.BACKWARD)


def _heading(profile: StageProfile) -> str:
    info = profile.info
    clocks = sorted({m.clock_mhz for m in profile.measurements})
    estimated = sum(row.samples == 0 for row in info.rows)
    parts = [
        info.gpu or "GPU not known",
        f"{profile.num_stages} stages",
        f"{len(clocks)} clocks from {clocks[0]} to {clocks[-1]} MHz",
        f"{len(profile.measurements)} rows"
        + (f", {estimated} of them estimated from their neighbours" if estimated else ""),
    ]
    if info.blocking_power_w is not None:
        parts.append(f"blocking power {info.blocking_power_w:.1f} W")
    return ", ".join(parts) + (" (SIMULATED: no GPU was measured)" if info.simulated else "")


def _columns(options: ClockOptions) -> tuple[list[int], list[float], list[float]]:
    return options.clock_mhz.tolist(), options.time_s.tolist(), options.energy_j.tolist()


def _blocking_power_w(arguments: ProfileArguments, profile: StageProfile) -> float | None:
    return profile.info.blocking_power_w if arguments.blocking_power_w is None else arguments.blocking_power_w


def _worst(values: np.ndarray) -> float:
    return float(values[np.abs(values).argmax()])
