"""Sends the runs that modes request to the ranks, with a program of clocks for each order and rank.

Each run has a serial, with which ranks report what they ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.plans import Plans
from perseus_ds.protocol.job_messages import Follow, Program, RankReport, Times
from perseus_ds.protocol.layout import OTHER_ORDERS
from perseus_ds.server.iterations import Run
from perseus_ds.server.job import MOST_PROFILED
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.recorder import TimelineLog

UNPLANNED = Run("observe", status={"plan": None})
"""Run at default clocks before there is a mode, or after it has failed."""
_MOST_RUNS = 512
_KNOWN_AFTER_S = 5.0
"""Time in which a message reaches all ranks, even on a busy machine."""
_RESENT_EVERY = 10
"""Number of iterations between two messages to a rank that does not follow the last run."""
_MOST_PLANS = 64


@dataclass
class _Sent:
    """A run that was sent to the ranks, with the times that they measure."""

    serial: int
    run: Run
    times: Times
    every: int
    from_iteration: int
    shown_after: int

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.run.key, self.times, self.every)


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
        self._sent: _Sent | None = None
        # Of all ranks of a pipeline, by order and plan.
        self._programs: dict[tuple[object, ...], list[Program]] = {}
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

    def send(self, run: Run) -> None:
        """Send a run to the ranks, for the next iterations that none can have begun."""
        times, every = run.times, run.every
        if self._timelines.wants(run):
            times, every = "all", 1
        before = self._sent
        if before is not None and before.key == (*run.key, times, every):
            self.known[before.serial] = before.run = run  # its next phase or status may differ
            return
        self._serial += 1
        self.known[self._serial] = run
        if len(self.known) > _MOST_RUNS:
            del self.known[next(serial for serial in self.known if serial)]
        shown_after = max(2, math.ceil(_KNOWN_AFTER_S / self.time_s)) if self.time_s else 2
        self._sent = _Sent(self._serial, run, times, every, self.from_iteration, shown_after)
        for rank, state in enumerate(self._context.job.states):
            if state.is_here:
                self._send(rank, self._sent, self._sent.from_iteration)

    def resend(self, rank: int) -> None:
        """Send the last run again to a rank."""
        if self._sent is not None:
            self._send(rank, self._sent, self.from_iteration)

    def send_order(self, number: int) -> None:
        """Send the last run of an order that has become known, which ranks do not have yet."""
        if self._sent is None:
            return
        for rank, state in enumerate(self._context.job.states):
            if state.is_here:
                follow = self._follow(rank, self._sent, self.from_iteration, number)
                self._context.send(rank, follow)

    def _send(self, rank: int, sent: _Sent, from_iteration: int) -> None:
        numbers = [order.number for order in self._context.orders.known]
        for number in (*numbers, OTHER_ORDERS):
            self._context.send(rank, self._follow(rank, sent, from_iteration, number))

    def _follow(self, rank: int, sent: _Sent, from_iteration: int, number: int) -> Follow:
        run, place = sent.run, self._context.job.places[rank]
        plans = run.plans.get(number)
        is_profiled = place.pipeline < MOST_PROFILED
        return Follow(
            self._program(rank, run, number),
            sent.serial,
            from_iteration,
            from_iteration + sent.shown_after,
            run.phase_of(number),
            None if plans is None else plans.shown_plan,
            sent.times if is_profiled else run.otherwise,
            sent.every,
            run.otherwise,
            run.logs_energy and is_profiled,
        )

    def _program(self, rank: int, run: Run, number: int) -> Program:
        """Return the program of a rank in an order. Those of a plan are computed once."""
        if rank in self._context.job.fixed_ranks:
            return Program(number)
        plans = run.plans.get(number)
        if plans is None:
            return Program(number, run.clock_mhz)
        place = self._context.job.places[rank]
        plan = plans.plans[place.pipeline]
        key = number, id(plans.frontier), plan
        if key not in self._programs:
            if len(self._programs) >= _MOST_PLANS:
                self._programs.clear()
            schedule = next(o.job.schedule for o in self._context.orders.known if o.number == number)
            self._programs[key] = programs_of(plans.frontier.plans[plan], plans, number, schedule)
        return self._programs[key][place.pipeline_rank]

    def behind(self, iteration: int, messages: Sequence[RankReport]) -> list[int]:
        """Return the ranks that did not follow the last run, and are due to receive it."""
        sent = self._sent
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
        order = messages[0].report.order
        if len(known) < len(runs) or len({run.clocks(order) for run in known}) > 1:
            return None
        return known[0]


def programs_of(plan: FrequencyPlan, plans: Plans, number: int, schedule: Schedule) -> list[Program]:
    """Return the clocks of each rank of a pipeline in iterations of an order.

    Instructions of the schedule that have no clock in the plan keep the clock of the previous instruction. At the
    end of an iteration, they have the clock that the next one starts with.
    """
    spans_s = _spans_s(plan, plans)
    programs = []
    for instructions, own_mhz, stream in zip(plan.instructions, plan.clocks_mhz, schedule.instructions, strict=True):
        if len(set(own_mhz)) == 1:
            programs.append(Program(number, own_mhz[0]))
            continue
        clock_of = dict(zip(instructions, own_mhz, strict=True))
        clocks_mhz = _filled([clock_of.get(instruction) for instruction in stream])
        own_spans_s = tuple(spans_s[instruction] for instruction in stream) if spans_s else ()
        programs.append(Program(number, own_mhz[0], clocks_mhz, own_spans_s, plan.time_s))
    return programs


def _filled(clocks_mhz: Sequence[int | None]) -> tuple[int, ...]:
    known = [clock_mhz for clock_mhz in clocks_mhz if clock_mhz is not None]
    last = max(position for position, clock_mhz in enumerate(clocks_mhz) if clock_mhz is not None)
    found, latest_mhz = [], known[0]
    for clock_mhz in clocks_mhz[: last + 1]:
        latest_mhz = latest_mhz if clock_mhz is None else clock_mhz
        found.append(latest_mhz)
    return (*found, *[known[0]] * (len(clocks_mhz) - last - 1))


def _spans_s(plan: FrequencyPlan, plans: Plans) -> dict[Instruction, tuple[float, float]]:
    """Return start and end of each instruction of a pipeline, predicted from the profile [s].

    There are none if the profile lacks a time. Operations without a choice of clock have no duration here; their time
    is at the end of the iteration.
    """
    times_s, dag = plans.frontier.instruction_times_s, plans.dag
    node_of = {node.work: number for number, node in enumerate(dag.nodes) if isinstance(node.work, Instruction)}
    duration_s = np.zeros(len(dag.nodes))
    for instructions, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True):
        for instruction, clock_mhz in zip(instructions, clocks, strict=True):
            time_s = times_s.get((instruction.stage, instruction.kind, clock_mhz))
            if time_s is None or instruction not in node_of:
                return {}
            duration_s[node_of[instruction]] = time_s
    ends_s = dag.finish_s(duration_s)
    starts_s = ends_s - duration_s
    return {instruction: (float(starts_s[node]), float(ends_s[node])) for instruction, node in node_of.items()}
