"""What a job did from its first iteration to its last, over all its starts, from ``run.jsonl``.

A folder may have served several jobs. Nothing of one says what another saved: its history is that of
the job that trained last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.run_records import read_records

# Stretched by nothing yet, so that their times and energies mean nothing.
_NOT_TRAINING = "calibrate"
_PLANNING = ("auto", "run")
# Warm-up comes last: its ranks wait for each other before the tail, which an ordinary iteration does not.
_DEFAULT_CLOCKS = ("observe", "plan", "warm-up")


@dataclass(frozen=True)
class Step:
    """One iteration.

    Attributes:
        number: Position in the job's history over all starts, 1 first.
        iteration: As ``run.jsonl`` counts it, from the last start on.
        phase: What Perseus was doing.
        plan: The plan's place on the frontier; None without a plan.
        time_s: Iteration time [s].
        energy_j: Energy of the whole job [J]; NaN where it could not be read.
        default_energy_j: What the profile says the same takes at default clocks [J]; None without a plan.
        frontier: What tells the frontier its plan is of from the job's earlier ones.
        disturbed: Whether a rank has failed, or it is the first since the start, which allocates.
    """

    number: int
    iteration: int
    phase: str
    plan: int | None
    time_s: float
    energy_j: float
    default_energy_j: float | None
    frontier: tuple[str | None, int]
    disturbed: bool


@dataclass(frozen=True)
class Happening:
    """Something other than an iteration.

    Attributes:
        after: Steps before it.
        name: The event's name.
        text: The event in words.
    """

    after: int
    name: str
    text: str


@dataclass(frozen=True)
class History:
    """What a job did.

    Attributes:
        folder: Where its ``run.jsonl`` lies.
        name: What to call it.
        job: What tells it from others; None where it is not recorded.
        started: When, in seconds since the epoch; 0 where it is not recorded.
        mode: The mode of its last start.
        gpu: The GPU's name.
        simulated: Whether any of it is simulated.
        steps: All iterations but those that calibrate a simulated GPU.
        happenings: All events.
        frontier: Where the last start under plans had its frontier from, if it was named.
        left_out: Iterations of other jobs in the same file.
    """

    folder: Path
    name: str
    job: str | None
    started: float
    mode: str | None
    gpu: str | None
    simulated: bool
    steps: tuple[Step, ...]
    happenings: tuple[Happening, ...] = field(repr=False)
    frontier: str | None = None
    left_out: int = 0

    @property
    def at_default_clocks(self) -> list[Step]:
        """Iterations without a plan, all of one phase, that nothing disturbed and are most like any other."""
        for phase in _DEFAULT_CLOCKS:
            found = [step for step in self.steps if step.phase == phase and not step.disturbed]
            if found:
                return found
        return []

    @property
    def under_plans(self) -> list[Step]:
        """Iterations under a plan of the frontier last in use: a plan's number means nothing on another."""
        planned = [step for step in self.steps if step.phase == "run" and step.plan is not None]
        return [step for step in planned if step.frontier == planned[-1].frontier]


def read_history(folder: Path, name: str) -> History:
    """Read a job's ``run.jsonl``.

    Raises:
        ConfigError: The file is missing, or a line of it is no record.
    """
    everything = read_records(folder / "run.jsonl")
    records = _of_last_job(everything)
    starts = [record for record in records if record.get("event") == "start"]
    last = starts[-1] if starts else {}
    planning = [start.get("frontier") for start in starts if start.get("mode") in _PLANNING]
    return History(
        folder=folder,
        name=name,
        job=last.get("job"),
        started=float(starts[0].get("time", 0.0)) if starts else 0.0,
        mode=last.get("mode"),
        gpu=last.get("gpu"),
        simulated=any(record.get("simulated") for record in records),
        steps=tuple(_steps(records)),
        happenings=tuple(_happenings(records)),
        frontier=planning[-1] if planning else None,
        left_out=sum(map(_trains, everything)) - sum(map(_trains, records)),
    )


def median(values: Iterable[float]) -> float | None:
    """Return the median of the finite values, None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _trains(record: dict[str, Any]) -> bool:
    return "event" not in record and record["phase"] != _NOT_TRAINING


def _of_last_job(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    starts: list[list[dict[str, Any]]] = [[]]
    for record in records:
        if record.get("event") == "start":
            starts.append([])
        starts[-1].append(record)
    jobs = [start[0].get("job") if start else None for start in starts]
    trained = [job for job, start in zip(jobs, starts, strict=True) if any(map(_trains, start))]
    last = (trained or jobs)[-1]
    return [record for job, start in zip(jobs, starts, strict=True) if job == last for record in start]


def _steps(records: list[dict[str, Any]]) -> Iterator[Step]:
    number, profiles, frontier, is_first = 0, 0, None, True
    for record in records:
        if not _trains(record):
            if record.get("event") == "start":
                frontier, is_first = record.get("frontier"), True
            profiles += record.get("event") == "profile"
            continue
        number += 1
        energy_j, saved = record["energy_j"], record.get("saved")
        yield Step(
            number=number,
            iteration=int(record.get("iteration", number)),
            phase=record["phase"],
            plan=record.get("plan"),
            time_s=record["time_s"],
            energy_j=math.nan if energy_j is None else energy_j,
            default_energy_j=None if energy_j is None or saved is None else energy_j / (1 - saved),
            frontier=(frontier, profiles),
            disturbed=is_first or bool(record.get("failed_ranks")),
        )
        is_first = False


def _happenings(records: list[dict[str, Any]]) -> Iterator[Happening]:
    steps = 0
    for record in records:
        if "event" in record:
            yield Happening(steps, record["event"], _in_words(record))
        elif _trains(record):
            steps += 1


def _in_words(event: dict[str, Any]) -> str:
    match event["event"]:
        case "start":
            policy = f", {_policy(event['policy'])}" if event.get("mode") in _PLANNING and "policy" in event else ""
            return f"start in {event.get('mode')} mode{policy}"
        case "plan" if event.get("paused"):
            return "paused"
        case "plan":
            straggler, plans = event.get("straggler"), set(event.get("plans", []))
            late = f", pipeline {straggler} is {event.get('slowdown')} times as slow" if straggler is not None else ""
            others = f", pipelines run {', '.join(map(str, event['plans']))}" if len(plans) > 1 else ""
            return f"plan {event.get('plan')}{late}{others}"
        case "policy" if "policy" in event:
            return _policy(event["policy"])
        case "profile":
            cost = {key: event[key] for key in ("lost_s", "spent_s", "lost_j", "spent_j") if key in event}
            spent = [f"{value:g} {'s' if key.endswith('_s') else 'J'}" for key, value in cost.items()]
            return "profile written" + (f", which cost {' and '.join(spent)}" if spent else "")
        case "refused":
            why = ", ".join(event.get("reasons") or [])
            return (
                f"rank {event.get('rank')}'s GPU was asked for {event.get('clock_mhz')} MHz and runs at "
                f"{event.get('reached_mhz')} MHz" + (f" ({why})" if why else "")
            )
        case "drift":
            return f"times drifted by {event.get('drift', 0):.0%}: profiling again"
        case "end":
            return "end"
        case name:
            return ": ".join(str(part) for part in (name, event.get("problem") or event.get("error")) if part)


def _policy(policy: dict[str, Any]) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in policy.items() if key != "name")
    return f"policy {policy.get('name')}" + (f": {settings}" if settings else "")
