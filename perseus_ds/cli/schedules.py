"""``perseus-ds schedules``: what another schedule or other numbers of micro-batches would give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from perseus_ds.cli.arguments import argument
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute from one profile the frontiers of several schedules, and show them side by side.

    Nothing is run. A profile cannot know what a part of a stage or of a backward takes; what is assumed of them is
    printed below the table. Each rank holds the same share of the model under every schedule.
    """

    examples: ClassVar = (
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
    blocking_power_w: float | None = argument(
        "power of a GPU that waits for its neighbour [W]; by default what profile.json says", None, at_least=0
    )
    plans: int = argument("number of deadlines, from T_min to T*, for which a plan is computed", 40, at_least=2)
    out: Path | None = argument("folder for schedules.json and schedules.png; by default that of the profile", None)


def run(arguments: Arguments) -> int:
    """Print the table; write ``schedules.json`` and ``schedules.png``."""
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.artifacts.schedule_table import ScheduleTable
    from perseus_ds.cli.inputs import naming
    from perseus_ds.cli.output import check_folder, progress_bar
    from perseus_ds.cli.schedule_choice import choose_schedules
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
