"""The schedules that ``perseus-ds schedules`` knows by name."""

from __future__ import annotations

from collections.abc import Sequence

from perseus_ds.artifacts.validation import did_you_mean
from perseus_ds.cli.inputs import find_schedule
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.schedule import Schedule, read_schedule

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


def choose_schedules(
    names: Sequence[str], *, micro_batches: Sequence[int], ranks: int, chunks: int
) -> list[tuple[str, Schedule]]:
    """Return the schedules with their names, each with every number of micro-batches.

    Args:
        names: As the user wrote them.
        micro_batches: Per iteration.
        ranks: Pipeline ranks.
        chunks: Stages on each rank, where the schedule does not say.

    Raises:
        ConfigError: There is no such schedule.
        ScheduleError: A schedule cannot be built for these numbers.
    """
    for name in names:
        if name not in _OF_TORCH and name not in _OF_DEEPSPEED and ":" not in name:
            known = (*_OF_TORCH, *_OF_DEEPSPEED)
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}, and package.module:Class."
            raise ConfigError(f"schedules: no schedule is called {name!r}; {hint}")
    return [(name, _schedule(name, count, ranks, chunks)) for name in names for count in micro_batches]


def _schedule(name: str, micro_batches: int, ranks: int, chunks: int) -> Schedule:
    if name in _OF_TORCH:
        from torch.distributed.pipelining.schedules import get_schedule_class

        from perseus_ds.torch_pipelining.order import read_class

        of_torch, stages = _OF_TORCH[name]
        return read_class(
            get_schedule_class(of_torch), ranks=ranks, stages_per_rank=stages or chunks, micro_batches=micro_batches
        )
    _, found = find_schedule(None, _OF_DEEPSPEED.get(name, name))
    return read_schedule(found, ranks=ranks, micro_batches=micro_batches)
