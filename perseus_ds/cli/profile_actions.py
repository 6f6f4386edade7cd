"""The actions of ``perseus-ds profile``: show, compare, validate, merge and convert profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perseus_ds.artifacts.profile import ClockOptions, StageProfile
from perseus_ds.cli.inputs import naming, schedule_for
from perseus_ds.cli.output import check_folder
from perseus_ds.errors import ConfigError
from perseus_ds.optimizer import problem_for
from perseus_ds.pipeline.instruction import Kind


def show(profile: StageProfile, power_w: float | None, picture: Path | None) -> None:
    """Print the rows, and draw them if a path for the picture is given."""
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
    if picture is not None:
        from perseus_ds.report.profile_picture import profile_picture

        profile_picture(profile, picture, blocking_power_w=power_w or 0.0)
        print(f"Written: {picture}")


def compare(path: Path, other_path: Path) -> None:
    """Print by how much the rows of a second profile differ from those of a first one."""
    profile, other = StageProfile.load(path), StageProfile.load(other_path)
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
    for holder, only in (
        (path, set(profile.keys) - set(other.keys)),
        (other_path, set(other.keys) - set(profile.keys)),
    ):
        for stage, kind in sorted(only):
            print(f"{stage:5d} {kind:9} only in {holder}")


def validate(path: Path, profile: StageProfile, power_w: float | None) -> None:
    """Print whether plans can be computed from a profile.

    Raises:
        PerseusError: They cannot.
    """
    info = profile.info
    schedule = schedule_for(profile, schedule=None, stages=None, micro_batches=info.micro_batches or 2)
    with naming(path):
        problem = problem_for(schedule, profile, power_w)
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


def merge(paths: Sequence[Path], out: Path) -> None:
    """Write the rows of several profiles as one.

    Raises:
        ConfigError: They were measured on different GPUs or in different jobs.
    """
    first, *others = profiles = [StageProfile.load(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for key in ("gpu", "simulated", "model", "micro_batch_size", "tensor_parallel"):
            expected, found = getattr(first.info, key), getattr(other.info, key)
            if expected is not None and found is not None and expected != found:
                raise ConfigError(
                    f"{path}: {key} is {found!r}, in {paths[0]} it is {expected!r}; such rows do not go together."
                )
    info = first.info.model_copy(update={"rows": [row for profile in profiles for row in profile.info.rows]})
    _write(StageProfile([row for profile in profiles for row in profile.measurements], info), out)


def convert(profile: StageProfile, power_w: float | None, out: Path) -> None:
    """Write a profile that was read from any CSV as our files."""
    stages = profile.info.stages or profile.num_stages
    info = profile.info.model_copy(update={"blocking_power_w": power_w, "stages": stages})
    _write(StageProfile(profile.measurements, info), out)


def _write(profile: StageProfile, out: Path) -> None:
    profile.save(check_folder(out) / "profile.csv")
    print(f"{_heading(profile)}\nWritten: {out / 'profile.csv'} and profile.json")


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


def _worst(values: np.ndarray) -> float:
    return float(values[np.abs(values).argmax()])
