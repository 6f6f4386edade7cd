"""One power limit for several jobs: each follows a cap of its own, by a file (see ``PowerCapPolicy.signal``).

- The *speed* of a job is relative to its own default clocks. Over the cap it is taken to be concave and piecewise
  linear: the upper hull of its plans.
- A job *holds* what it may draw of the limit: the highest of the cap in its file, the one that it has recorded, and the
  one under which it runs until a change has reached its plan. A job that runs by no cap holds its power at default
  clocks.

No cap is raised while what jobs hold would exceed the limit by it. Nothing is remembered but what is read: a new
process finds the caps in their files, and which of them are followed in the jobs' records.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import read_text, write_atomically
from perseus_ds.artifacts.profile import lower_hull
from perseus_ds.artifacts.run_records import (
    Ended,
    Event,
    IterationRecord,
    PolicyChanged,
    PowerCapChanged,
    Record,
    RecordFollower,
    Started,
    trains,
)
from perseus_ds.errors import FrontierError, SignalError
from perseus_ds.measures import AT_DEFAULT_CLOCKS
from perseus_ds.policy.decisions import MARGIN
from perseus_ds.policy.policies import POLICY, signal_files
from perseus_ds.timebase import REAL_TIME, Timebase
from perseus_ds.units import number, plain, watts

CAP_FILE = "power_cap"
"""In the folder of each job."""
# What jobs do while they keep a cap: they compare plans with default clocks, or return to these, only where these draw
# less than the cap.
_UNDER_CAP = ("run", "default", "observe")
_AT_DEFAULT = (*AT_DEFAULT_CLOCKS, "pause")
# A new cap decides on the plan of the iteration after the next one, whose record follows that of the next one.
_FOLLOWED_AFTER = 2
_REMEMBERED = 20
_LEAST_POWERS = 4
# By then, collectives of a job that hangs have timed out.
_LOST_AFTER_S = 600.0
_GAIN = 0.005
"""Caps change where the weighted sum of speeds becomes higher by this fraction."""
_RESERVE_CHANGE = 0.02
_PER_WATT = 10
_ROUNDING_W = 0.5 / _PER_WATT


@dataclass(frozen=True)
class SpeedOfCap:
    """What a job's speed counts at each cap: a concave, piecewise linear function.

    Attributes:
        caps_w: At which a plan of the hull runs, ascending [W].
        values: Speeds times the weight of the job.
    """

    caps_w: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, frontier: Frontier, scale: float, weight: float = 1.0) -> SpeedOfCap:
        """Return that of a job whose GPUs draw ``scale`` times what one pipeline with one GPU per rank draws."""
        values: dict[float, float] = {}
        for plan in reversed(frontier.plans):  # of those that need the same cap, the fastest one counts
            cap_w = math.ceil(scale * plan.mean_power_w / (1 - MARGIN) * _PER_WATT) / _PER_WATT
            values[cap_w] = weight * frontier.baseline.time_s / plan.time_s
        points = [*values.items()]
        corners = lower_hull(np.array([*values]), -np.array([*values.values()]))
        return cls(*zip(*(points[corner] for corner in corners), strict=True))

    def at(self, cap_w: float) -> float:
        """Return the value at a cap [W]; below the least one, the job runs the plan that draws least all the same."""
        return float(np.interp(cap_w, self.caps_w, self.values))


def allocate(jobs: Sequence[SpeedOfCap], limit_w: float) -> list[float]:
    """Return the caps under which the sum of the jobs' values is highest [W].

    From each job's least cap on, the limit is given out along the steepest piece there is. Pieces are concave, so no
    other caps have a higher sum. Of all jobs at most one gets a cap between two plans of its hull; it runs the fastest
    plan under its cap, so what jobs really do is below that sum by less than this one piece. What no job can use is
    divided in proportion to the caps.

    Args:
        jobs: What speed counts for each.
        limit_w: For all together [W]. Where it is less than they draw at least, each gets its least cap.
    """
    caps_w = [job.caps_w[0] for job in jobs]
    left_w = limit_w - sum(caps_w)
    pieces = [
        (value / width_w, place, width_w)
        for place, job in enumerate(jobs)
        for value, width_w in zip(np.diff(job.values).tolist(), np.diff(job.caps_w).tolist(), strict=True)
    ]
    for _, place, width_w in sorted(pieces, key=lambda piece: -piece[0]):
        given_w = max(0.0, min(width_w, left_w))
        caps_w[place] += given_w
        left_w -= given_w
    if left_w > 0 and caps_w:
        caps_w = [cap_w * limit_w / (limit_w - left_w) for cap_w in caps_w]
    # To tenths of a watt; the sum of floats may be above that of the pieces by its last bits.
    return [math.floor(cap_w * _PER_WATT + 1e-6) / _PER_WATT for cap_w in caps_w]


class SharingJob:
    """One of the jobs, as its folder shows it.

    Attributes:
        folder: Its ``output_dir``.
        weight: What its speed counts.
        given_w: The cap in its file [W]; None where there is none.
        speed: What its speed counts at each cap; None while it has no plans.
        problem: What cannot be read or written; empty if nothing.
    """

    def __init__(self, folder: Path, weight: float = 1.0) -> None:
        self.folder = folder
        self.weight = weight
        self.cap_file = folder / CAP_FILE
        self.given_w: float | None = None
        self.speed: SpeedOfCap | None = None
        self.problem = ""
        self._records = RecordFollower(folder)
        self._frontier: Frontier | None = None
        self._frontier_signature: tuple[int, int] | None = None
        self._policy: dict[str, Any] | None = None
        self._named_frontier: str | None = None
        self._is_under_way = False
        self._last_s = 0.0
        self._last: IterationRecord | None = None
        self._default_w = 0.0  # as its records say
        self._at_default: deque[IterationRecord] = deque(maxlen=_REMEMBERED)
        # Under plans; and those of them that are on its frontier, which plans under limits of GPUs are not.
        self._planned: deque[IterationRecord] = deque(maxlen=_REMEMBERED)
        self._on_frontier: deque[IterationRecord] = deque(maxlen=_REMEMBERED)
        self._forget_caps()

    def _forget_caps(self) -> None:
        # The cap that it has recorded last; and one that is not by the cap file, such as that of a reduction.
        self._recorded_w = self._other_cap_w = math.inf
        # What was recorded when the last iterations were: what is no longer among them, no plan follows any more.
        self._lately_w = deque([math.inf] * _FOLLOWED_AFTER, maxlen=_FOLLOWED_AFTER)

    def follow(self) -> None:
        """Read what is new."""
        self.problem = ""
        try:
            text = read_text(self.cap_file, SignalError, "power cap")
            self.given_w = float(text) if float(text) > 0 else None
        except (SignalError, ValueError):
            self.given_w = None
        try:
            for is_another_file, records in self._records.read():
                if is_another_file:
                    self._is_under_way = False
                    self._forget_caps()
                for record in records:
                    self._add(record)
        except FileNotFoundError:
            self._is_under_way = False
        except OSError as error:  # a shared disk that does not answer
            self.problem = f"{self.folder}: its records cannot be read now ({error})"
        self._read_frontier()
        self.speed = None
        if self._frontier is not None and (scale := self._scale):
            self.speed = SpeedOfCap.of(self._frontier, scale, self.weight)

    def _add(self, record: Record) -> None:
        if isinstance(record, Event):
            self._last_s = record.time or self._last_s
            self._add_event(record)
            return
        if not trains(record):
            return
        self._last, self._last_s, self._is_under_way = record, record.ended or self._last_s, True
        self._lately_w.append(self._recorded_w if record.phase in _UNDER_CAP else math.inf)
        if record.phase not in _UNDER_CAP:
            self._planned.clear()
            if not record.limited:
                self._on_frontier.clear()
        if record.default_energy_j and record.default_time_s:
            self._default_w = record.default_energy_j / record.default_time_s
        if record.phase in _AT_DEFAULT and record.energy_j is not None:
            self._at_default.append(record)
        if record.phase == "run" and record.plan is not None and record.shape is None:
            self._planned.append(record)
            if not record.limited:
                self._on_frontier.append(record)

    def _add_event(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._is_under_way = False
        elif isinstance(event, Started):
            self._is_under_way = True
            self._policy, self._last = event.policy, None
            self._named_frontier = event.frontier if event.mode == "run" else None
            self._planned.clear()
            self._on_frontier.clear()
            self._forget_caps()
        elif isinstance(event, PolicyChanged) and event.policy and not event.by_schedule:
            self._policy = event.policy
        elif isinstance(event, PowerCapChanged):
            cap_w = math.inf if event.watts is None else event.watts
            is_ours = self._is_cap_file(event.source)
            self._recorded_w, self._other_cap_w = (cap_w, math.inf) if is_ours else (math.inf, cap_w)

    def _read_frontier(self) -> None:
        """Read its plans where they are others than before."""
        path = self.folder if self._named_frontier is None else Path(self._named_frontier)
        path = path if path.is_file() else path / "frontier.json"
        try:
            status = path.stat()
            signature = status.st_mtime_ns, status.st_ino
            if signature != self._frontier_signature:
                self._frontier, self._frontier_signature = Frontier.load(path), signature
            return
        except FileNotFoundError:
            if self._named_frontier is not None:
                self.problem = (
                    f"{self.folder}: its plans, {self._named_frontier}, are not found here, so that its power at "
                    'default clocks is reserved. Give the job the absolute path of its "frontier", where this command '
                    "finds it, too."
                )
        except (OSError, FrontierError) as error:
            self.problem = f"{self.folder}: its plans cannot be read ({error})"
        self._frontier = self._frontier_signature = None

    def _is_cap_file(self, signal: str) -> bool:
        """Return whether a file is its cap file; other nodes and folders may know that by another path."""
        path = Path(signal)
        return path.parts[-2:] == (self.folder.resolve().name, CAP_FILE) or path.resolve() == self.cap_file.resolve()

    def runs(self, now_s: float) -> bool:
        """Return whether it has begun and not ended at a time [Unix seconds]; silence for ten minutes is an end."""
        return self._is_under_way and now_s - self._last_s < _LOST_AFTER_S

    @property
    def follows(self) -> bool:
        """Whether its policy names its cap file."""
        try:
            policy = POLICY.validate_python(self._policy)
        except ValidationError:  # none, or of another version
            return False
        return any(map(self._is_cap_file, signal_files(policy)))

    @property
    def is_capped(self) -> bool:
        """Whether it runs plans by its cap file."""
        last = self._last
        return (
            self.follows
            and last is not None
            and last.phase in _UNDER_CAP
            and not last.failed_ranks
            and math.isfinite(self._recorded_w)
            and self.speed is not None
        )

    @property
    def default_w(self) -> float | None:
        """Power of all its GPUs at default clocks [W], as measured, or else by its profile; None where not known."""
        time_s = sum(record.time_s for record in self._at_default)
        measured_w = sum(record.energy_j or 0.0 for record in self._at_default) / time_s if time_s else 0.0
        return max(measured_w, self._default_w) or None

    @property
    def reserve_w(self) -> float | None:
        """What it may draw while it does not run by its cap file [W]; None where nothing is known.

        That is its power at default clocks; under another cap, such as that of a reduction, what that allows.
        """
        default_w, last = self.default_w, self._last
        if default_w is None or last is None or last.phase not in _UNDER_CAP or last.failed_ranks or not self._planned:
            return default_w
        drawn_w = max(record.power_w or math.inf for record in self._planned)
        # A little more: the job records no other cap where the watts of its file are the same.
        return min(default_w, max(self._other_cap_w + 1 / _PER_WATT, drawn_w))

    @property
    def held_w(self) -> float:
        """What it may draw while it is capped [W]."""
        known_w = [
            self._recorded_w,
            *(cap_w if math.isfinite(cap_w) else self.default_w or 0.0 for cap_w in self._lately_w),
        ]
        return max(*known_w, self.given_w or 0.0)

    @property
    def _scale(self) -> float | None:
        """Power of all its GPUs over that of one pipeline, one GPU per rank, by the plans that it has run."""
        frontier = self._frontier
        if frontier is None:
            return None
        measured = [
            (record.energy_j, record.time_s * frontier.plans[record.plan].mean_power_w)
            for record in self._on_frontier
            if record.energy_j is not None and record.plan is not None and 0 <= record.plan < len(frontier.plans)
        ]
        if len(measured) >= _LEAST_POWERS:
            return sum(energy_j for energy_j, _ in measured) / sum(by_plan_j for _, by_plan_j in measured)
        return self.default_w / frontier.baseline.mean_power_w if self.default_w else None

    def give(self, cap_w: float) -> None:
        """Write its cap."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.cap_file, f"{cap_w:.1f}\n")
        except OSError as error:
            self.problem = f"{self.cap_file}: the cap cannot be written ({error}); the job stays at its last one"
        else:
            self.given_w = cap_w


class Share:
    """Keeps several jobs under one limit.

    Attributes:
        jobs: The jobs, those that have not begun or have ended too.
    """

    def __init__(
        self,
        jobs: Sequence[SharingJob],
        limit_w: float,
        say: Callable[[str], None],
        timebase: Timebase = REAL_TIME,
    ) -> None:
        self.jobs = jobs
        self._limit_w = limit_w
        self._say = say
        self._timebase = timebase
        # What capped jobs are to get, and what others may draw.
        self._targets_w: dict[Path, float] = {}
        self._reserved_w: dict[Path, float] = {}
        self._said: dict[str, object] = {}

    def step(self) -> None:
        """Read what jobs do, lower caps, and raise others as far as the limit allows now."""
        now_s = self._timebase.date().timestamp()
        for job in self.jobs:
            job.follow()
        running = [job for job in self.jobs if job.runs(now_s)]
        capped = [job for job in running if job.is_capped]
        self._reserved_w = {job.folder: self._reserve_w(job) for job in running if job not in capped}
        self._aim(capped, self._limit_w - sum(self._reserved_w.values()))
        targets_w = {**self._targets_w, **self._reserved_w}
        for job in self.jobs:
            if job not in running:
                self._prepare(job)
            elif job.given_w is not None and targets_w[job.folder] < job.given_w:
                job.give(targets_w[job.folder])
        held_w = {job.folder: max(self._reserved_w.get(job.folder, job.held_w), job.given_w or 0.0) for job in running}
        free_w = self._limit_w - sum(held_w.values())
        for job in running:
            target_w = targets_w[job.folder]
            more_w = max(0.0, target_w - held_w[job.folder])
            if (job.given_w is None or target_w > job.given_w) and more_w <= max(0.0, free_w) + _ROUNDING_W:
                free_w -= more_w
                job.give(target_w)
        self._tell(running, capped, targets_w)

    def _reserve_w(self, job: SharingJob) -> float:
        """Return what a job that runs by no cap may draw [W]; an equal share as long as nothing is known of it."""
        known_w = job.reserve_w
        if known_w is None:
            return math.floor(self._limit_w / len(self.jobs) * _PER_WATT) / _PER_WATT
        before_w = self._reserved_w.get(job.folder, 0.0)
        # Noise of what is measured must not change the caps of others at every step.
        is_near = known_w <= before_w <= (1 + _RESERVE_CHANGE) * known_w
        return before_w if is_near else math.ceil(known_w * _PER_WATT) / _PER_WATT

    def _aim(self, capped: Sequence[SharingJob], budget_w: float) -> None:
        """Choose caps where others must be, or where others are worth it."""
        speeds = {job.folder: job.speed for job in capped if job.speed is not None}
        fresh = dict(zip(speeds, allocate([*speeds.values()], budget_w), strict=True))
        now = self._targets_w

        def value(caps_w: dict[Path, float]) -> float:
            return sum(speed.at(caps_w[folder]) for folder, speed in speeds.items())

        if (
            now.keys() != fresh.keys()
            or sum(now.values()) > budget_w + _ROUNDING_W
            or value(fresh) > value(now) * (1 + _GAIN)
        ):
            self._targets_w = fresh

    def _prepare(self, job: SharingJob) -> None:
        """Let a job that has not begun, or has ended, begin at its least cap."""
        speed = job.speed
        least_w = self._limit_w / len(self.jobs) if speed is None else speed.caps_w[0]
        if job.given_w is None or job.given_w > least_w + _ROUNDING_W:
            job.give(math.floor(least_w * _PER_WATT) / _PER_WATT)

    def _tell(self, running: Sequence[SharingJob], capped: Sequence[SharingJob], targets_w: dict[Path, float]) -> None:
        """Say what has changed."""
        for job in self.jobs:
            self._say_once(f"problem of {job.folder}", job.problem, job.problem)
            self._say_once(
                f"policy of {job.folder}",
                job in running and not job.follows,
                f"{job.folder}: the job does not follow {job.cap_file}, so what it draws at most is reserved. "
                f'Give it "policy": {{"name": "power_cap", "signal": "{job.cap_file}"}} in its perseus block, or run '
                f'"perseus-ds control policy {job.folder} policy.name=power_cap '
                f'policy.signal={job.cap_file.resolve()}" on the node of its rank 0.',
            )
        shares = [self._share_in_words(job, job in capped, targets_w[job.folder]) for job in running]
        # What is reserved follows what is measured; a line for each change would hide the caps.
        state = [
            (job.folder, job in capped, bool(job.default_w), round((100 if job in capped else 20) * part))
            for job, part in ((job, targets_w[job.folder] / self._limit_w) for job in running)
        ]
        self._say_once("caps", state or "none", "; ".join(shares) or "no job runs")
        needed_w = sum(job.speed.caps_w[0] if job in capped and job.speed else targets_w[job.folder] for job in running)
        self._say_once(
            "limit",
            needed_w > self._limit_w + _ROUNDING_W and [(job.folder, job in capped) for job in running],
            f"the limit of {watts(self._limit_w)} cannot be kept"
            + ("" if len(capped) == len(running) else " until all jobs run plans by their caps")
            + f": these jobs draw up to {watts(needed_w)}. Each that follows a cap gets its least."
            + (" Raise the limit, or stop a job." if len(capped) == len(running) else ""),
        )

    def _share_in_words(self, job: SharingJob, is_capped: bool, target_w: float) -> str:
        if is_capped and job.speed is not None:
            return f"{job.folder} {watts(target_w)}, speed {number(job.speed.at(target_w) / job.weight, 3)}"
        assumed = "" if job.default_w else ", an equal share until its power is measured"
        return f"{job.folder} {watts(target_w)} reserved{assumed}"

    def _say_once(self, what: str, state: object, text: str) -> None:
        """Say something where its state has become another one, and is not false."""
        if self._said.get(what, False) != state:
            self._said[what] = state
            if state:
                self._say(plain(text))
