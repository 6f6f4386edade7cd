"""``perseus-ds optimize``, ``export`` and ``import``: frontiers of frequency plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from perseus_ds.cli.values import (
    BlockingPower,
    OptionalAmount,
    OptionalCount,
    OptionalPath,
    ProfilePath,
    ScheduleName,
)
from perseus_ds.planning import PlanningSettings
from perseus_ds.units import percent, plain

if TYPE_CHECKING:
    from perseus_ds.artifacts.frontier import Frontier


@dataclass(frozen=True, kw_only=True)
class OptimizeCommand(PlanningSettings):
    """Compute the frontier of frequency plans from a profile."""

    examples = ("perseus-ds optimize perseus",)

    profile: Positional[ProfilePath]
    out: OptionalPath = None
    """folder for frontier.json and frontier.csv; by default the folder of the profile"""
    micro_batches: OptionalCount = None
    """micro-batches per iteration; by default the value in profile.json"""
    stages: OptionalCount = None
    """stages of the model; by default the number in the profile"""
    schedule: ScheduleName = None
    blocking_power_w: BlockingPower = None
    least_dwell_s: OptionalAmount = None
    """shortest time at one clock in plans of the exact solver [s]; by default those in profile.json, by clock"""

    def execute(self) -> int:
        from perseus_ds.artifacts.profile import StageProfile
        from perseus_ds.cli.inputs import check_folder, folder_of, path_in_errors, progress_bar, schedule_for
        from perseus_ds.optimizer import optimize, with_alternatives

        profile = StageProfile.load(self.profile)
        schedule = schedule_for(profile, schedule=self.schedule, stages=self.stages, micro_batches=self.micro_batches)
        out = check_folder(self.out or folder_of(self.profile))
        with path_in_errors(self.profile), progress_bar("bounds") as progress:
            frontier = optimize(schedule, profile, self, progress=progress)
            frontier = with_alternatives(frontier, schedule, profile)
        print(save_and_summarise(frontier, self.profile, out))
        return 0


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the plans of a frontier for the server of Zeus's pipeline frequency optimizer."""

    examples = ("perseus-ds export perseus --out plans",)

    frontier: Positional[Path]
    """frontier.json or its folder"""
    out: OptionalPath = None
    """folder for freqs_pipeline_00000.py (the fastest plan), freqs_pipeline_00001.py, …; by default the folder of the
    frontier"""

    def execute(self) -> int:
        from perseus_ds.artifacts.frontier import Frontier, export_zeus
        from perseus_ds.cli.inputs import check_folder, folder_of

        frontier = Frontier.load(self.frontier)
        paths = export_zeus(frontier, check_folder(self.out or folder_of(self.frontier)))
        print(f"Written: {len(paths)} plans, {paths[0]} (fastest) to {paths[-1].name} (least energy)")
        return 0


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Import plans of lowtime or Zeus, with time and energy computed from a profile, as a frontier.

    Plan files are parsed and never executed.
    """

    examples = ("perseus-ds import plans --profile perseus --out imported",)

    plans: Positional[Path]
    """folder of freqs_pipeline_*.py"""
    profile: ProfilePath
    out: OptionalPath = None
    """folder for frontier.json and frontier.csv; by default the folder of the plans"""
    blocking_power_w: BlockingPower = None
    schedule: ScheduleName = None

    def execute(self) -> int:
        from perseus_ds.artifacts.frontier import read_plans
        from perseus_ds.artifacts.profile import StageProfile
        from perseus_ds.cli.inputs import check_folder, path_in_errors, progress_bar, schedule_of_plans
        from perseus_ds.optimizer import frontier_of_imported, with_alternatives
        from perseus_ds.optimizer.problem import problem_for

        profile = StageProfile.load(self.profile)
        plans = read_plans(self.plans)
        first = next(plans)
        schedule = schedule_of_plans(first[1], profile, self.schedule)
        out = check_folder(self.out or self.plans)
        with path_in_errors(self.profile), progress_bar("plans"):
            problem = problem_for(schedule, profile, blocking_power_w=self.blocking_power_w)
            frontier = with_alternatives(frontier_of_imported(chain([first], plans), problem), schedule, profile)
        print(save_and_summarise(frontier, self.profile, out))
        return 0


def save_and_summarise(frontier: Frontier, profile: Path, out: Path) -> str:
    """Save a frontier with the path of its profile, and return a summary to print."""
    provenance = frontier.provenance.model_copy(update={"profile": str(profile)})
    path = replace(frontier, provenance=provenance).save(out)
    return f"{frontier_summary(frontier)}\nWritten: {path} and {path.with_suffix('.csv').name}"


def frontier_summary(frontier: Frontier) -> str:
    """Return a summary of a frontier: plans, times, savings and alternatives."""
    from statistics import fmean

    from perseus_ds.artifacts.profile import energy_note

    baseline, fastest, frugal = frontier.baseline, frontier.plans[0], frontier.plans[-1]
    gaps = [plan.gap for plan in frontier.plans if plan.gap is not None]
    provenance = frontier.provenance
    slowdown = plain(percent(fastest.time_s / frontier.t_min_s - 1, 2))
    lines = [
        f"{len(frontier.plans)} plans for {provenance.stages} stages and {provenance.micro_batches} micro-batches "
        f"({provenance.schedule}, solver {provenance.solver})",
        f"  all at the highest clock  {baseline.time_s:10.4f} s  {baseline.energy_j:12.2f} J",
        f"  fastest plan              {fastest.time_s:10.4f} s  {fastest.energy_j:12.2f} J  "
        f"saves {1 - fastest.energy_j / baseline.energy_j:.1%} at {slowdown} time against T_min",
        f"  least energy (T*)         {frugal.time_s:10.4f} s  {frugal.energy_j:12.2f} J  "
        f"saves {1 - frugal.energy_j / baseline.energy_j:.1%}",
    ]
    if gaps:
        lines.append(f"  above the lower bound     mean {fmean(gaps):.3%}, worst {max(gaps):.3%} of the energy")
    lines.append("  Energies are per iteration of one pipeline, one GPU per rank.")
    if note := energy_note(provenance.settings):
        lines.append(f"  They are not those of GPUs alone: {note}.")
    lines += [f"  {line}" for line in frontier.comparison()]
    if provenance.simulated:
        lines.append("  The profile is SIMULATED: no GPU was measured.")
    return "\n".join(lines)
