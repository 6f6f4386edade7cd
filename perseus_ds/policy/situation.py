"""What policies decide by, and what they decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from perseus_ds.policy.signal_values import Signal
from perseus_ds.policy.timetable import Timetable

# Times and powers are known this well; of what there is to use up, this much is left.
MARGIN = 0.005


@dataclass(frozen=True)
class Situation:
    """The progress of the run.

    Attributes:
        step: Steps done, those before a checkpoint included.
        now: The time.
        time_ratio: Measured over predicted iteration time.
        power_ratio: Measured over predicted power.
        stopped_s: Time between iterations [s].
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        running: The plan the policy asked for last; None at the start.
        iterations_ahead: Iterations that will have run before the one that is decided on.
        idle_power_w: What all GPUs of the job draw while they wait [W].
        signals: Last good values of the signals, by file.
        timetable: What a cheapest policy has decided before.
    """

    step: int
    now: datetime
    time_ratio: float = 1.0
    power_ratio: float = 1.0
    stopped_s: float = 0.0
    gpus_per_rank: int = 1
    running: int | None = None
    iterations_ahead: int = 1
    idle_power_w: float = 0.0
    signals: Mapping[str, Signal] = field(default_factory=dict)
    timetable: Timetable | None = None


@dataclass(frozen=True)
class Decision:
    """What to run.

    Attributes:
        plan: Place on the frontier.
        problem: The condition of the policy that cannot be met; empty if it is met.
        failed: Whether nothing could be decided; then the job runs at default clocks.
        halts: Whether training stands still before it.
        timetable: What a cheapest policy has decided for the time until the job ends.
    """

    plan: int
    problem: str = ""
    failed: bool = False
    halts: bool = False
    timetable: Timetable | None = None
