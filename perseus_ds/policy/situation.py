"""What policies decide by, and what they decide; how the run has gone so far, relative to what the profile predicts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perseus_ds.policy.hourly_programme import Timetable
from perseus_ds.policy.signals import Signal

# Times and powers are known this well; of what there is to use up, this much is left.
MARGIN = 0.005
_REMEMBERED = 10
_LEAST_POWERS = 4
_LARGEST = 1e18


@dataclass(frozen=True)
class PowerCap:
    """A power cap in force, and how near to it a faster plan may come.

    Attributes:
        watts: Of all GPUs of the job.
        headroom: A faster plan is taken only if it would draw less than the cap by this fraction of it.
        raised: Whether a faster plan was taken after a slower one.
    """

    watts: float
    headroom: float = 0.02
    raised: bool = False


@dataclass(frozen=True)
class Situation:
    """The progress of the run.

    Attributes:
        step: Steps done, those before a checkpoint included.
        time_ratio: Measured over predicted iteration time.
        power_ratio: Measured over predicted power.
        stopped_s: Time between iterations [s].
        gpus_per_rank: GPUs of the job for each pipeline rank of a plan.
        running: The plan the policy asked for last; None at the start.
        iterations_ahead: Iterations that will have run before the one that is decided on.
        idle_power_w: What all GPUs of the job draw while they wait [W].
        signals: Last good values of the signals, by file.
        timetable: What a cheapest policy has decided before.
        cap: The power cap by which the plan that runs was chosen.
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
    cap: PowerCap | None = None


@dataclass(frozen=True)
class Decision:
    """What to run.

    Attributes:
        plan: Place on the frontier.
        problem: The condition of the policy that cannot be met; empty if it is met.
        failed: Whether nothing could be decided; then the job runs at default clocks.
        halts: Whether training stands still before it.
        timetable: What a cheapest policy has decided for the time until the job ends.
        cap: The power cap in force; None for none, or where it cannot be read.
    """

    plan: int
    problem: str = ""
    failed: bool = False
    halts: bool = False
    timetable: Timetable | None = None
    cap: PowerCap | None = None


class RunStatistics:
    """Measured over predicted values of the last iterations.

    Attributes:
        stopped_s: What an iteration's end and the next one's beginning have between them, such as
            evaluations and checkpoints, on the average of all iterations so far [s].
    """

    def __init__(self) -> None:
        self.stopped_s = 0.0
        self._stops = 0
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._powers: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def add_stop(self, time_s: float) -> None:
        """Take in the time between two iterations [s]."""
        self._stops += 1
        self.stopped_s += (max(0.0, time_s) - self.stopped_s) / self._stops

    def add_iteration(
        self, *, time_s: float, energy_j: float, promised_time_s: float, promised_energy_j: float
    ) -> None:
        """Take in an iteration: of the job [s, J], and of the plan that the policy asked for."""
        self._times.append(time_s / promised_time_s)
        if math.isfinite(energy_j):  # NaN: a GPU's counter cannot be read
            self._powers.append((energy_j / time_s, promised_energy_j / promised_time_s))

    @property
    def time_ratio(self) -> float:
        """Iteration time, 1 where it is not known; a median, since single iterations may be held up."""
        times = [*self._times]  # a copy: other threads ask, too
        return statistics.median(times) if times else 1.0

    @property
    def power_ratio(self) -> float:
        """Power, 1 where few are known; of sums, since counters are refreshed more rarely than iterations end."""
        powers = [*self._powers]
        if len(powers) < _LEAST_POWERS:
            return 1.0
        return sum(measured_w for measured_w, _ in powers) / sum(promised_w for _, promised_w in powers)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        powers = [list(power) for power in self._powers]
        return {"stopped_s": self.stopped_s, "stops": self._stops, "times": [*self._times], "powers": powers}

    def state_of_stops(self) -> dict[str, Any]:
        """Return the same without the ratios, which belong to the plans of one profile."""
        return {**self.state(), "times": [], "powers": []}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept; later measurements gradually replace it.

        Raises:
            Exception: It is damaged; nothing has changed.
        """
        stopped_s, stops = float(state["stopped_s"]), int(state["stops"])
        times = [float(time) for time in state["times"]]
        powers = [(float(measured_w), float(promised_w)) for measured_w, promised_w in state["powers"]]
        divisors = [*times, *(promised_w for _, promised_w in powers)]
        figures = [stopped_s, stops, *divisors, *(measured_w for measured_w, _ in powers)]
        if not all(0 <= figure <= _LARGEST for figure in figures) or 0 in divisors:
            raise ValueError(f"statistics {state}")
        self.stopped_s, self._stops = stopped_s, stops
        self._times, self._powers = deque(times, maxlen=_REMEMBERED), deque(powers, maxlen=_REMEMBERED)
