"""``perseus-ds schedules``: predicts results of other schedules or numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from perseus_ds.cli.values import BlockingPower, Counts, OptionalCount, OptionalPath, ProfilePath, Texts, limited
from perseus_ds.errors import ConfigError
from perseus_ds.planning import PlanningSettings
from perseus_ds.units import number, percent

if TYPE_CHECKING:
    from perseus_ds.artifacts.schedule_table import ComparedSchedule, ScheduleTable
    from perseus_ds.pipeline.schedule import Schedule


# By name: torch's class and its stages per rank, which can be chosen if None.
_OF_TORCH: dict[str, tuple[str, int | None]] = {
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved": ("Interleaved1F1B", None),
    "looped_bfs": ("LoopedBFS", None),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", None),
    "zbv": ("ZBVZeroBubble", 2),
    "dualpipev": ("DualPipeV", 2),
}
_OF_DEEPSPEED = {"deepspeed_1f1b": "1f1b", "deepspeed_dualpipev": "dualpipev"}
_NAMES = (
    f"from torch.distributed.pipelining: {', '.join(_OF_TORCH)}; from DeepSpeed: {', '.join(_OF_DEEPSPEED)}; or "
    "package.module:Class of a PipeSchedule"
)


@dataclass(frozen=True, kw_only=True)
class SchedulesCommand:
    """Compute the frontiers of several schedules from one profile, and compare them.

    Nothing is run. A profile does not contain the costs of a part of a stage or of a backward; the assumptions on them
    are printed below the table. Each rank has the same share of the model under every schedule.
    """

    examples = ("perseus-ds schedules perseus --schedules 1f1b zbv --micro-batches 8 --out schedules",)

    profile: Positional[ProfilePath]
    schedules: Annotated[Texts, arg(help=_NAMES)] = field(
        default_factory=lambda: ["1f1b", "interleaved", "zbv", "dualpipev"]
    )
    micro_batches: Counts = field(default_factory=list)
    """micro-batches per iteration; by default the value in profile.json"""
    ranks: OptionalCount = None
    """pipeline ranks; by default the number in profile.json, otherwise one rank per stage"""
    stages_per_rank: Annotated[int, limited(int, at_least=2)] = 2
    """stages per rank, for the interleaved schedules and looped_bfs"""
    weight_share: float = 0.5
    """share of the weight gradients in a backward that is split but was measured as a whole; 0 to 1"""
    blocking_power_w: BlockingPower = None
    plans: int = 40
    """number of deadlines, from T_min to T*, for which a plan is computed"""
    out: OptionalPath = None
    """folder for schedules.json and schedules.png; by default the folder of the profile"""

    def execute(self) -> int:
        from perseus_ds.artifacts.profile import StageProfile
        from perseus_ds.artifacts.schedule_table import ScheduleTable
        from perseus_ds.cli.inputs import check_folder, folder_of, micro_batches_of, path_in_errors, progress_bar

        if not 0 < self.weight_share < 1:
            raise ConfigError(f"--weight-share: expected a number above 0 and below 1, got {self.weight_share:g}.")
        profile = StageProfile.load(self.profile)
        out = check_folder(self.out or folder_of(self.profile))
        with path_in_errors(self.profile), progress_bar("schedules") as progress:
            from perseus_ds.layouts.schedule_comparison import compare_schedules
            from perseus_ds.report.pictures import schedules_picture

            chosen = choose_schedules(
                self.schedules,
                micro_batches=self.micro_batches or [micro_batches_of(profile)],
                ranks=self.ranks or profile.info.pipeline_ranks or profile.num_stages,
                chunks=self.stages_per_rank,
            )
            compared = compare_schedules(
                profile,
                chosen,
                PlanningSettings(blocking_power_w=self.blocking_power_w, plans=self.plans),
                weight_share=self.weight_share,
                progress=progress,
            )
            table = ScheduleTable(
                profile=str(self.profile),
                simulated=profile.info.simulated,
                gpu=profile.info.gpu,
                settings=profile.info.settings,
                schedules=compared,
            )
            out.mkdir(parents=True, exist_ok=True)
            table.save(out / "schedules.json")
            progress("schedules.png", 1.0)
            schedules_picture(table, out / "schedules.png")
        print(f"{schedules_text(table)}\nWritten: {out / 'schedules.json'} and schedules.png")
        return 0


def choose_schedules(
    names: Sequence[str], *, micro_batches: Sequence[int], ranks: int, chunks: int
) -> list[tuple[str, Schedule]]:
    """Return each schedule with its name, for every number of micro-batches."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    from perseus_ds.artifacts.validation import did_you_mean
    from perseus_ds.cli.inputs import find_schedule
    from perseus_ds.engines.torch_pipelining.order import read_class
    from perseus_ds.pipeline.commands import read_schedule

    chosen = []
    for name in names:
        if name in _OF_TORCH:
            of_torch, stages = _OF_TORCH[name]
            read = partial(read_class, get_schedule_class(of_torch), ranks=ranks, stages_per_rank=stages or chunks)
        elif name in _OF_DEEPSPEED or ":" in name:
            _, found = find_schedule(None, _OF_DEEPSPEED.get(name, name))
            read = partial(read_schedule, found, ranks=ranks)
        else:
            known = (*_OF_TORCH, *_OF_DEEPSPEED)
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}, and package.module:Class."
            raise ConfigError(f"--schedules: no schedule is called {name!r}; {hint}")
        chosen += [(name, read(micro_batches=count)) for count in micro_batches]
    return chosen


def schedules_text(table: ScheduleTable) -> str:
    """Return the table to print, with explanations of its columns and the assumptions."""
    first, worst_gap = table.schedules[0], max(one.worst_gap for one in table.schedules)
    width = max(len("schedule"), *(len(one.name) for one in table.schedules))
    lines = [
        f"Predicted from {table.profile}{table.subject}; one pipeline, one GPU for each rank.",
        "",
        f"{'':{width}}   micro-   held by   fastest plan, at T_min        plan of least energy, at T*   "
        "per micro-batch",
        f"{'schedule':{width}}  batches    a rank   time [s]  energy [J]  saved   time [s]  energy [J]  saved      "
        "time    energy",
        *(_line(one, first, width) for one in table.schedules),
        "",
        "held by a rank: largest number of micro-batches of which a rank holds activations at a time. One of its n "
        "stages counts as 1/n.",
        "saved: energy, relative to the same schedule at the highest clock.",
        f"per micro-batch: the fastest plan, relative to {first.label}, at the highest clock.",
        f"The energy of each plan is at most {worst_gap:.2%} above the optimum for its iteration time.",
    ]
    assumed = {one.name: one.assumptions for one in table.schedules if one.assumptions}
    if assumed:
        lines += ["", "Assumed, not measured:"]
        lines += [f"  {name}: {'; '.join(sentences)}." for name, sentences in assumed.items()]
    if table.simulated:
        lines.append("The profile is SIMULATED: no GPU was measured.")
    return "\n".join(lines)


def _line(one: ComparedSchedule, first: ComparedSchedule, width: int) -> str:
    (fastest_s, fastest_j), (frugal_s, frugal_j) = one.plans[0], one.plans[-1]
    share = first.micro_batches / one.micro_batches
    time, energy = share * fastest_s / first.baseline_time_s - 1, share * fastest_j / first.baseline_energy_j - 1

    def plan(time_s: float, energy_j: float) -> str:
        return f"{number(time_s):>11}{number(energy_j, 5):>12}{1 - energy_j / one.baseline_energy_j:7.1%}"

    return (
        f"{one.name:{width}} {one.micro_batches:8d}{max(one.held_by_rank):10.1f}{plan(fastest_s, fastest_j)}"
        f"{plan(frugal_s, frugal_j)}{percent(time):>10}{percent(energy):>10}"
    )
