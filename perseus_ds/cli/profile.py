"""``perseus-ds profile``: show, compare, validate, merge and convert profiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from perseus_ds.cli.values import BlockingPower, OptionalPath, Paths, ProfilePath
from perseus_ds.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from perseus_ds.artifacts.profile import StageProfile


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Print a profile as a table, and optionally draw it."""

    examples = ("perseus-ds profile show perseus --out profile.png",)

    profile: Positional[ProfilePath]
    out: OptionalPath = None
    """picture to write; by default none"""
    blocking_power_w: BlockingPower = None

    def execute(self) -> int:
        profile, power_w = _load(self.profile, self.blocking_power_w)
        print(_heading(profile))
        for stage, kind in profile.keys:
            options = profile.options(stage, kind)
            pareto = options.pareto(power_w or 0.0).clock_mhz
            print(f"\nstage {stage}, {kind}\n   MHz   time [s]  energy [J]  power [W]")
            for clock, time_s, energy_j in zip(options.clock_mhz, options.time_s, options.energy_j, strict=True):
                mark = "  *" if clock in pareto else ""
                print(f"{clock:6d} {time_s:10.5f} {energy_j:11.4f} {energy_j / time_s:10.1f}{mark}")
        waiting = "effective energy (beyond blocking power)" if power_w else "energy"
        print(f"\n* Pareto-optimal in time and {waiting}")
        if self.out is not None:
            from perseus_ds.cli.inputs import progress_bar

            with progress_bar("picture"):
                from perseus_ds.report.pictures import profile_picture

                profile_picture(profile, self.out)
            print(f"Written: {self.out}")
        return 0


@dataclass(frozen=True, kw_only=True)
class CompareProfilesCommand:
    """Print the differences between two profiles."""

    examples = ("perseus-ds profile compare perseus perseus-2",)

    profiles: Positional[tuple[Path, Path]]
    """profile.csv or folder of each profile"""

    def execute(self) -> int:
        import numpy as np

        from perseus_ds.artifacts.profile import StageProfile

        (path, profile), (other_path, other) = ((path, StageProfile.load(path)) for path in self.profiles)
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
                f"{stage:5d} {kind:9} {i.size:6d}     {time.mean():+8.2%} {max(time, key=abs):+8.2%}"
                f"       {energy.mean():+8.2%} {max(energy, key=abs):+8.2%}"
            )
        for holder, keys, others in ((path, profile.keys, other.keys), (other_path, other.keys, profile.keys)):
            for stage, kind in sorted(set(keys) - set(others)):
                print(f"{stage:5d} {kind:9} only in {holder}")
        return 0


@dataclass(frozen=True, kw_only=True)
class ValidateCommand:
    """Check whether plans can be computed from a profile."""

    examples = ("perseus-ds profile validate perseus",)

    profile: Positional[ProfilePath]
    blocking_power_w: BlockingPower = None

    def execute(self) -> int:
        import numpy as np

        from perseus_ds.cli.inputs import answer_no, schedule_for
        from perseus_ds.optimizer.problem import problem_for
        from perseus_ds.pipeline.instruction import Kind

        profile, power_w = _load(self.profile, self.blocking_power_w)
        schedule = schedule_for(profile, micro_batches=profile.info.micro_batches or 2)
        try:
            problem = problem_for(schedule, profile, blocking_power_w=power_w)
        except ProfileError as error:
            return answer_no("profile validate", f"{self.profile}: {error}")
        print(_heading(profile))
        for key in itertools.product(range(profile.num_stages), (Kind.FORWARD, Kind.BACKWARD)):
            if key not in profile.keys:
                print(f"  note: stage {key[0]}, {key[1]}: no rows")
        for group in problem.groups:
            options = profile.options(group.stage, group.kind)
            slower = options.time_s[1:] / np.minimum.accumulate(options.time_s)[:-1] - 1
            if slower.max() > 0.03:
                clock = int(options.clock_mhz[1:][slower.argmax()])
                where = f"stage {group.stage}, {group.kind}, {clock} MHz"
                print(f"  note: {where}: {slower.max():.1%} slower than at a lower clock")
        print(f"Plans can be computed: {len(problem.groups)} kinds of instructions, T_min {problem.t_min_s:.4f} s.")
        return 0


@dataclass(frozen=True, kw_only=True)
class MergeCommand:
    """Merge several profiles into one, combining common stages like ranks of one job."""

    examples = ("perseus-ds profile merge perseus perseus-2 --out merged",)

    profiles: Positional[Paths]
    """profile.csv or folder of each profile"""
    out: Path
    """folder for profile.csv and profile.json"""

    def execute(self) -> int:
        from perseus_ds.artifacts.profile import RowQuality, StageProfile, leave_out
        from perseus_ds.profiler.online import MeasuredRow, combine_rows

        first, *others = profiles = [StageProfile.load(path) for path in self.profiles]
        for path, other in zip(self.profiles[1:], others, strict=True):
            for key in ("gpu", "simulated", "model", "micro_batch_size", "tensor_parallel"):
                expected, found = getattr(first.info, key), getattr(other.info, key)
                if expected is not None and found is not None and expected != found:
                    raise ConfigError(
                        f"{path}: {key} is {found!r}, in {self.profiles[0]} it is {expected!r}; such rows cannot be "
                        "merged."
                    )

        def measured(profile: StageProfile) -> list[MeasuredRow]:
            known = profile.info.quality
            return [
                MeasuredRow(
                    row,
                    known.get((row.stage, row.kind, row.clock_mhz))
                    or RowQuality(stage=row.stage, kind=row.kind, clock_mhz=row.clock_mhz, samples=1),
                )
                for row in profile.measurements
            ]

        of_profiles = {str(path): measured(profile) for path, profile in zip(self.profiles, profiles, strict=True)}
        rows, incomplete = combine_rows(of_profiles, first.info.blocking_power_w or 0.0)
        merged = StageProfile(
            [row.measurement for row in rows], first.info.model_copy(update={"rows": [row.quality for row in rows]})
        )
        leave_out(incomplete, merged.keys)
        _write(merged, self.out)
        return 0


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Convert the CSV of Merak or another program to profile.csv and profile.json."""

    examples = ("perseus-ds profile convert perseus/profile.csv --out converted --blocking-power-w 70",)

    profile: Positional[Path]
    """CSV to read"""
    out: Path
    """folder for profile.csv and profile.json"""
    blocking_power_w: BlockingPower = None

    def execute(self) -> int:
        profile, power_w = _load(self.profile, self.blocking_power_w)
        # The CSV file of another program contains neither.
        update = {"blocking_power_w": power_w, "stages": profile.info.stages or profile.num_stages}
        _write(type(profile)(profile.measurements, profile.info.model_copy(update=update)), self.out)
        return 0


def _load(path: Path, power_w: float | None = None) -> tuple[StageProfile, float | None]:
    """Return a profile and, if it is known, the power of a waiting GPU [W]."""
    from perseus_ds.artifacts.profile import StageProfile

    profile = StageProfile.load(path)
    return profile, profile.info.blocking_power_w if power_w is None else power_w


def _write(profile: StageProfile, out: Path) -> None:
    from perseus_ds.cli.inputs import check_folder

    profile.save(check_folder(out) / "profile.csv")
    print(f"{_heading(profile)}\nWritten: {out / 'profile.csv'} and profile.json")


def _heading(profile: StageProfile) -> str:
    from perseus_ds.artifacts.profile import energy_note

    info, rows = profile.info, profile.measurements
    clocks = {row.clock_mhz for row in rows}
    estimated = sum(row.samples == 0 for row in info.rows)
    return (
        f"{info.gpu or 'unknown GPU'}, {profile.num_stages} stages, "
        f"{len(clocks)} clocks from {min(clocks)} to {max(clocks)} MHz, {len(rows)} rows"
        + (f", {estimated} of them estimated from neighbouring clocks" if estimated else "")
        + ("" if info.blocking_power_w is None else f", blocking power {info.blocking_power_w:.1f} W")
        + (f", {note}" if (note := energy_note(info.settings)) else "")
        + (" (SIMULATED: no GPU was measured)" if info.simulated else "")
    )
