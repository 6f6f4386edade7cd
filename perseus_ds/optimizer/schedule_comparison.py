"""The frontiers of several schedules from one profile, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.schedule_table import ComparedSchedule
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.recut import recut
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule


def compare_schedules(
    profile: StageProfile,
    schedules: Sequence[tuple[str, Schedule]],
    *,
    weight_share: float,
    blocking_power_w: float | None,
    plans: int,
    progress: Callable[[str, float], None],
) -> list[ComparedSchedule]:
    """Compute the frontier of each schedule.

    Args:
        profile: As measured under any of them.
        schedules: Names for people, and the schedules.
        weight_share: As in :func:`recut`.
        blocking_power_w: What a waiting GPU draws [W]; the profile's own value by default.
        plans: How many deadlines to plan for with each schedule.
        progress: Called with the schedule's name and the fraction done of all.

    Raises:
        PerseusError: The profile does not fit a schedule.
    """
    result = []
    for number, (name, schedule) in enumerate(schedules):

        def report(_: str, done: float, name: str = name, number: int = number) -> None:
            progress(name, (number + done) / len(schedules))

        fitted = recut(profile, schedule, weight_share=weight_share)
        frontier = optimize(schedule, fitted.profile, blocking_power_w=blocking_power_w, plans=plans, progress=report)
        gaps = [plan.gap for plan in frontier.plans if plan.gap is not None]
        result.append(
            ComparedSchedule(
                name=name,
                micro_batches=schedule.micro_batches,
                ranks=len(schedule.ranks),
                stages=schedule.num_stages,
                held_by_stage=held_by_stage(schedule),
                held_by_rank=held_by_rank(schedule),
                t_min_s=frontier.t_min_s,
                baseline_time_s=frontier.baseline.time_s,
                baseline_energy_j=frontier.baseline.energy_j,
                plans=[(plan.time_s, plan.energy_j) for plan in frontier.plans],
                worst_gap=max(gaps),
                assumptions=list(fitted.assumptions),
            )
        )
    return result


def held_by_stage(schedule: Schedule) -> list[int]:
    """Return for how many micro-batches each stage holds activations at most.

    They are held from the forward to the backward; where that is split, to the gradients of the weights.
    """
    most = {stage: max(held) for stream in schedule.instructions for stage, held in _held(stream).items()}
    return [most[stage] for stage in sorted(most)]


def held_by_rank(schedule: Schedule) -> list[float]:
    """Return how many micro-batches each rank holds at a time at most; one of its n stages counts as 1/n."""
    return [max(map(sum, zip(*held.values(), strict=True))) / len(held) for held in map(_held, schedule.instructions)]


def _held(stream: tuple[Instruction, ...]) -> dict[int, list[int]]:
    """Return by stage how many micro-batches it holds after each instruction of its rank."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    return {
        stage: list(accumulate(change.get(i.kind, 0) if i.stage == stage else 0 for i in stream))
        for stage in sorted({i.stage for i in stream})
    }
