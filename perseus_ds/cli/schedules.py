"""``perseus-ds schedules``: what another schedule or other numbers of micro-batches would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from perseus_ds.cli.arguments import argument, blocking_power_argument
from perseus_ds.errors import ConfigError

if TYPE_CHECKING:
    from perseus_ds.pipeline.schedule import Schedule

# Name -> torch's class, and its stages on each rank; None: as many as are asked for.
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


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute from one profile the frontiers of several schedules, and show them side by side.

    Nothing is run. A profile cannot know what a part of a stage or of a backward takes; what is assumed of them is
    printed below the table. Each rank holds the same share of the model under every schedule.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "perseus-ds schedules perseus",
        "perseus-ds schedules perseus schedules=[1f1b,interleaved,zbv,dualpipev] micro_batches=[8,16] out=schedules",
    )

    profile: Path = argument("profile.csv, or the folder it is in; profile.json is read beside it", word=True)
    schedules: list[str] = argument(
        "of torch.distributed.pipelining: gpipe, 1f1b, interleaved, looped_bfs, interleaved_zero_bubble, zbv, "
        "dualpipev; of DeepSpeed: deepspeed_1f1b, deepspeed_dualpipev; or package.module:Class of a PipeSchedule",
        ["1f1b", "interleaved", "zbv", "dualpipev"],
    )
    micro_batches: list[int] = argument(
        "micro-batches per iteration; by default what profile.json says", [], at_least=1
    )
    ranks: int | None = argument(
        "pipeline ranks; by default what profile.json says, else a rank a stage", None, at_least=1
    )
    stages_per_rank: int = argument("stages on each rank, for the interleaved schedules and looped_bfs", 2, at_least=2)
    weight_share: float = argument(
        "the part of a backward's time and energy that the gradients of the weights take, where it is split and was "
        "measured as a whole; above 0 and below 1",
        0.5,
    )
    blocking_power_w: float | None = blocking_power_argument()
    plans: int = argument("number of deadlines, from T_min to T*, for which a plan is computed", 40, at_least=2)
    out: Path | None = argument("folder for schedules.json and schedules.png; by default that of the profile", None)


def run(arguments: Arguments) -> int:
    """Print the table; write ``schedules.json`` and ``schedules.png``."""
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.artifacts.schedule_table import ScheduleTable
    from perseus_ds.cli.inputs import naming
    from perseus_ds.cli.output import check_folder, progress_bar
    from perseus_ds.optimizer.schedule_comparison import compare_schedules
    from perseus_ds.report.schedules import schedules_picture, schedules_text

    if not 0 < arguments.weight_share < 1:
        raise ConfigError(f"weight_share={arguments.weight_share}: expected a number above 0 and below 1, such as 0.5.")
    profile = StageProfile.load(arguments.profile)
    counts = arguments.micro_batches
    if not counts:
        if profile.info.micro_batches is None:
            raise ConfigError(
                "micro_batches is missing: the profile has no profile.json that holds it. Write micro_batches=[…]."
            )
        counts = [profile.info.micro_batches]
    ranks = arguments.ranks or profile.info.pipeline_ranks or profile.num_stages
    chosen = choose_schedules(
        arguments.schedules,
        micro_batches=counts,
        ranks=ranks,
        chunks=arguments.stages_per_rank,
    )
    folder = arguments.profile if arguments.profile.is_dir() else arguments.profile.parent
    out = check_folder(arguments.out or folder)
    with naming(arguments.profile), progress_bar() as progress:
        compared = compare_schedules(
            profile,
            chosen,
            weight_share=arguments.weight_share,
            blocking_power_w=arguments.blocking_power_w,
            plans=arguments.plans,
            progress=progress,
        )
    table = ScheduleTable(
        profile=str(arguments.profile), simulated=profile.info.simulated, gpu=profile.info.gpu, schedules=compared
    )
    out.mkdir(parents=True, exist_ok=True)
    table.save(out / "schedules.json")
    schedules_picture(table, out / "schedules.png")
    print(f"{schedules_text(table)}\nWritten: {out / 'schedules.json'} and schedules.png")
    return 0


def choose_schedules(
    names: Sequence[str], *, micro_batches: Sequence[int], ranks: int, chunks: int
) -> list[tuple[str, Schedule]]:
    """Return the schedules with their names, each with every number of micro-batches.

    Raises:
        ConfigError: There is no such schedule.
        ScheduleError: A schedule cannot be built for these numbers.
    """
    from perseus_ds.artifacts.validation import did_you_mean

    for name in names:
        if name not in _OF_TORCH and name not in _OF_DEEPSPEED and ":" not in name:
            known = (*_OF_TORCH, *_OF_DEEPSPEED)
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}, and package.module:Class."
            raise ConfigError(f"schedules: no schedule is called {name!r}; {hint}")
    return [(name, _schedule(name, count, ranks, chunks)) for name in names for count in micro_batches]


def _schedule(name: str, micro_batches: int, ranks: int, chunks: int) -> Schedule:
    if name in _OF_TORCH:
        from torch.distributed.pipelining.schedules import get_schedule_class

        from perseus_ds.engines.torch_pipelining.order import read_class

        of_torch, stages = _OF_TORCH[name]
        return read_class(
            get_schedule_class(of_torch), ranks=ranks, stages_per_rank=stages or chunks, micro_batches=micro_batches
        )
    from perseus_ds.cli.inputs import find_schedule
    from perseus_ds.pipeline.commands import read_schedule

    _, found = find_schedule(None, _OF_DEEPSPEED.get(name, name))
    return read_schedule(found, ranks=ranks, micro_batches=micro_batches)
