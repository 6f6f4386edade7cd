"""Sends the runs that modes request to the ranks, with a program of clocks for each.

Each message to the ranks (:class:`~perseus_ds.protocol.job_messages.Follow`) has a serial, with which they report what
they ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol.job_messages import Follow, Program, RankReport, Times
from perseus_ds.server.iterations import Plans, Run
from perseus_ds.server.job import MOST_PROFILED
from perseus_ds.server.kinds import UNPLANNED, Kind
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.recorder import TimelineLog

_MOST_RUNS = 512
_KNOWN_AFTER_S = 5.0
"""Time in which a message reaches all ranks, even on a busy machine."""
_RESENT_EVERY = 10
"""Number of iterations between two messages to a rank that does not follow the last run."""


@dataclass
class _Sent:
    """A run that was sent for a kind."""

    serial: int
    kind: Kind
    wanted: Run
    times: Times
    every: int
    from_iteration: int
    shown_after: int
    programs: dict[Any, Program] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.wanted.key, self.times, self.every)

    def follow(self, rank: int, from_iteration: int) -> Follow:
        """Return the message for a rank, given its first iteration."""
        wanted, job = self.wanted, self.kind.context.job
        place = job.places[rank]
        plan = None if wanted.plans is None else wanted.plans.assignment.plans[place.pipeline]
        if (program := self.programs.get((plan, place.pipeline_rank))) is None:
            program = program_of(wanted, self.kind.number, place.pipeline, place.pipeline_rank, job.schedule)
            self.programs[plan, place.pipeline_rank] = program
        is_profiled = place.pipeline < MOST_PROFILED
        return Follow(
            program,
            self.serial,
            from_iteration,
            from_iteration + self.shown_after,
            wanted.phase,
            wanted.plan,
            self.times if is_profiled else wanted.otherwise,
            self.every,
            wanted.otherwise,
            wanted.logs_energy and is_profiled,
        )


class RunSender:
    """Sends runs, and remembers them by their serials.

    Attributes:
        known: The last runs by serial.
        issued: Number of the last iteration that a rank is known to have begun.
        time_s: Time of the last iteration [s].
    """

    def __init__(self, context: ModeContext, timelines: TimelineLog, last_serial: int) -> None:
        self._context = context
        self._timelines = timelines
        self._serial = last_serial
        self._sent: dict[int, _Sent] = {}  # by the number of the kind
        self._resent_after: dict[int, int] = {}  # an iteration, by rank
        self.known: dict[int, Run] = {0: UNPLANNED}
        self.issued = 0
        self.time_s = 0.0

    @property
    def from_iteration(self) -> int:
        """The first iteration that no rank begins before it receives a message sent now.

        Ranks begin the next iteration without waiting for an answer to their report.
        """
        return self.issued + 2 if self.issued else 1

    def send(self, kind: Kind) -> None:
        """Send the run that a kind requests to the ranks, for the next iterations that none can have begun."""
        wanted, before = kind.wanted, self._sent.get(kind.number)
        times, every = wanted.times, wanted.every
        if kind.number == 0 and self._timelines.wants(wanted):
            times, every = "all", 1
        if before is not None and before.key == (*wanted.key, times, every):
            self.known[before.serial] = before.wanted = wanted  # its next phase or status may differ
            return
        sent = self._sent[kind.number] = self._new(kind, wanted, times, every)
        for rank, state in enumerate(self._context.job.states):
            if state.is_here:
                self._context.send(rank, sent.follow(rank, sent.from_iteration))

    def _new(self, kind: Kind, run: Run, times: Times, every: int) -> _Sent:
        self._serial += 1
        self.known[self._serial] = run
        if len(self.known) > _MOST_RUNS:
            kept = {0, *(sent.serial for sent in self._sent.values())}
            del self.known[next(serial for serial in self.known if serial not in kept)]
        shown_after = max(2, math.ceil(_KNOWN_AFTER_S / self.time_s)) if self.time_s else 2
        return _Sent(self._serial, kind, run, times, every, self.from_iteration, shown_after)

    def resend(self, rank: int) -> None:
        """Send the last run of each kind again to a rank."""
        for sent in self._sent.values():
            self._context.send(rank, sent.follow(rank, self.from_iteration))

    def behind(self, kind: Kind, iteration: int, messages: Sequence[RankReport]) -> list[int]:
        """Return the ranks that did not follow the last run of a kind, and are due to receive it."""
        sent = self._sent.get(kind.number)
        if sent is None or iteration <= sent.from_iteration + 1:
            return []
        found = []
        for rank, message in enumerate(messages):
            is_behind = not message.serial == message.report.serial == sent.serial
            if is_behind and iteration >= self._resent_after.get(rank, -_RESENT_EVERY) + _RESENT_EVERY:
                self._resent_after[rank] = iteration
                found.append(rank)
        return found

    def ran(self, messages: Sequence[RankReport]) -> Run | None:
        """Return what all ranks ran from the begin of an iteration to its end. None if they differ."""
        # A rank whose client and agent followed different serials ran neither.
        serials = {message.serial if message.serial == message.report.serial else -1 for message in messages}
        runs = [self.known.get(serial) for serial in sorted(serials)]
        known = [run for run in runs if run is not None]
        if len(known) < len(runs) or len({run.clocks for run in known}) > 1:
            return None
        return known[0]


def program_of(run: Run, number: int, pipeline: int, rank: int, schedule: Schedule) -> Program:
    """Return the clocks of a pipeline's rank in iterations of an order.

    Instructions of the schedule that have no clock in the plan keep the clock of the previous instruction. At the
    end of an iteration, they have the clock that the next one starts with.
    """
    if run.plans is None:
        return Program(number, run.clock_mhz)
    plan = run.plans.of_pipeline(pipeline)
    instructions = run.plans.frontier.instructions[rank]
    own_mhz, stream = plan.clocks_mhz[rank], schedule.instructions[rank]
    if len(set(own_mhz)) == 1:
        return Program(number, own_mhz[0])
    clock_of = dict(zip(instructions, own_mhz, strict=True))
    clocks_mhz = _filled([clock_of.get(instruction) for instruction in stream])
    spans_s = _spans_s(plan, run.plans, stream)
    return Program(number, own_mhz[0], clocks_mhz, tuple(spans_s), plan.time_s)


def _filled(clocks_mhz: Sequence[int | None]) -> tuple[int, ...]:
    known = [clock_mhz for clock_mhz in clocks_mhz if clock_mhz is not None]
    last = max(position for position, clock_mhz in enumerate(clocks_mhz) if clock_mhz is not None)
    found, latest_mhz = [], known[0]
    for clock_mhz in clocks_mhz[: last + 1]:
        latest_mhz = latest_mhz if clock_mhz is None else clock_mhz
        found.append(latest_mhz)
    return (*found, *[known[0]] * (len(clocks_mhz) - last - 1))


def _spans_s(plan: FrequencyPlan, plans: Plans, stream: Sequence[Instruction]) -> list[tuple[float, float]]:
    """Return start and end of each instruction of a rank, predicted from the profile [s].

    The list is empty if the profile lacks a time. Operations without a choice of clock have no duration here; their
    time is at the end of the iteration.
    """
    times_s, dag = plans.frontier.instruction_times_s, plans.dag
    node_of = {node.work: number for number, node in enumerate(dag.nodes)}
    duration_s = np.zeros(len(dag.nodes))
    for instructions, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        for instruction, clock_mhz in zip(instructions, clocks, strict=True):
            time_s = times_s.get((instruction.stage, instruction.kind, clock_mhz))
            if time_s is None or instruction not in node_of:
                return []
            duration_s[node_of[instruction]] = time_s
    own = [node_of[instruction] for instruction in stream]
    ends_s = dag.finish_s(duration_s)[own]
    return list(zip((ends_s - duration_s[own]).tolist(), ends_s.tolist(), strict=True))
