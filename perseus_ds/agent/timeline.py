"""The timeline of a rank: follows the marks of its iterations, and requests the clocks of its program.

The steps of a program, each due at a mark or some time after it, are compiled once for each table of latencies. The
agent's loop calls :meth:`Timeline.advance`, which does what is due and returns when to look again.

A clock takes effect 10 ms or more after its request, and only one request can be pending. So a request is made before
the clock is due, by the latency of that clock. A higher clock is due when the previous instruction ends, and its
latency is the 90th percentile, because a late one would slow the next instruction down. A lower one is due when the
next instruction has begun, after the transfers in between, which a clock change may delay. Its latency is the 10th
percentile, so that it is not early. Plans hold clocks for long enough that all requests fit.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from perseus_ds.agent.actor import Delays, GpuActor
from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import ClockStatus, Follow, Follows, LatencyTable, Program
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, IDLE_S, NEXT_WITHIN_S, POSITIONS, REMEMBERED, RankMemory
from perseus_ds.timebase import Timebase

_MOST_AHEAD = 8
_MORE_COMPILED = 64
"""Number of compiled programs that are kept in addition to those of the last messages."""
# An iteration that begins within this time [s] after the previous one shares its last reading of the energy counter.
_TOGETHER_S = 0.001
_LATE_S = 1.5
"""A reading of the energy counter is discarded if it is later than this after its mark."""
_LAUNCHED_S = 0.001
"""Time after an instruction within which a transfer is launched that neither side waits for."""
# A mark is looked for from some time before its expected time on, which is bounded by these values [s] and by a share
# of the time since the previous mark, and divided into a few looks. Afterwards the interval grows with the time for
# which the mark is late, or with the time since the previous mark if no time is expected.
_MOST_EARLY_S, _MOST_EARLY = 0.005, 0.1
_LOOKS, _OFTEN_S, _LESS_OFTEN, _SELDOM = 4, 0.0005, 0.1, 0.02
_BETWEEN_S, _OVERDUE_S = 0.05, 0.01
"""Longest time until the next look [s], and that if a mark is overdue."""
_GAPS = 5
"""Number of times between two marks from which the next one is expected."""
_BEGUN, _ENDED = -2, -1


Spans = Sequence[tuple[float, float]]
"""Start and end of each instruction of a rank in an iteration [s]."""


class ClockTransition(NamedTuple):
    """Clocks to request around one instruction.

    Attributes:
        clock_mhz: Clock requested at its start: its own, or the next one if that is requested even earlier.
        next_clock_mhz: Clock requested at its end.
        early_s: Time after its start at which ``next_clock_mhz`` is requested [s]. None for at its end.
    """

    clock_mhz: int
    next_clock_mhz: int
    early_s: float | None = None


def plan_transitions(
    clocks_mhz: Sequence[int], spans_s: Spans, length_s: float, latencies: LatencyTable
) -> list[ClockTransition]:
    """Return the clocks to request around each instruction of one rank, in every iteration.

    If the times of instructions are unknown, ``spans_s`` is empty.
    """
    requested = list(clocks_mhz)
    early_s: list[float | None] = [None] * len(requested)

    def span_s(number: int) -> tuple[float, float]:
        """Return start and end of an instruction. A negative number is one of the previous iteration."""
        begin_s, end_s = spans_s[number]
        return (begin_s - length_s, end_s - length_s) if number < 0 else (begin_s, end_s)

    for position, clock_mhz in enumerate(clocks_mhz if spans_s and latencies.is_known else ()):
        before = position - 1
        if clock_mhz == clocks_mhz[before]:
            continue
        rises = clock_mhz > clocks_mhz[before]
        due_s = over_s = span_s(before)[1]
        if not rises:
            due_s = max(span_s(position)[0], over_s + _LAUNCHED_S)
        due_s = min(due_s - latencies.lead_s(clock_mhz, rises=rises), over_s)
        # If the previous instruction is shorter than the latency, the request belongs to an earlier one. A lower clock
        # is not requested in the previous iteration, because its energy would be read only after the driver has set the
        # clock.
        while (rises or before > 0) and span_s(before)[0] > due_s and clocks_mhz[before - 1] == clocks_mhz[before]:
            requested[before] = clock_mhz
            before -= 1
        begin_s, end_s = span_s(before)
        if due_s <= end_s:
            early_s[before] = max(0.0, due_s - begin_s)
        elif not rises:  # due while the rank waits: a higher clock may be early, a lower one may not
            requested[before + 1] = clocks_mhz[before]
            early_s[before + 1] = 0.0
    following = requested[1:] + requested[:1]
    return [ClockTransition(*values) for values in zip(requested, following, early_s, strict=True)]


class Step(NamedTuple):
    """A clock (None for the default) to request some time after a mark [s], which is given by its index."""

    mark: int
    delay_s: float
    clock_mhz: int | None


class CompiledProgram:
    """The marks of an iteration for which the agent waits, and the steps that follow them.

    Attributes:
        slots: Slots of the marks in their order, from ``_BEGUN`` to ``_ENDED``.
        steps: The steps in their order.
        gaps: Times between the marks.
    """

    def __init__(self, program: Program | None, latencies: LatencyTable) -> None:
        """Compile a program. None means default clocks."""
        self.slots = [_BEGUN]
        self.steps: list[Step] = []
        if program is not None and program.clocks_mhz:
            transitions = plan_transitions(program.clocks_mhz, program.spans_s, program.time_s, latencies)
            self._add_transitions(transitions[:POSITIONS])
        else:
            self._add(_BEGUN, None if program is None else program.first_mhz)
        self.slots.append(_ENDED)
        self.gaps = Gaps(len(self.slots))

    def _add_transitions(self, transitions: Sequence[ClockTransition]) -> None:
        clock_mhz = transitions[0].clock_mhz
        self._add(_BEGUN, clock_mhz)
        for position, transition in enumerate(transitions):
            if transition.clock_mhz != clock_mhz:
                self._add(2 * position, transition.clock_mhz)
            if transition.early_s is not None:
                self._add(2 * position, transition.next_clock_mhz, transition.early_s)
            clock_mhz = transition.next_clock_mhz
            if clock_mhz != transition.clock_mhz:
                self._add(2 * position + 1, clock_mhz)

    def _add(self, slot: int, clock_mhz: int | None, delay_s: float = 0.0) -> None:
        if self.slots[-1] != slot:
            self.slots.append(slot)
        self.steps.append(Step(len(self.slots) - 1, delay_s, clock_mhz))


class Gaps:
    """Times from the previous mark to each mark of a program in its last iterations.

    Attributes:
        expected_s: Median for each mark [s]. NaN before its first one.
        varies_s: Difference from the median that all but the extreme ones are within [s].
    """

    def __init__(self, marks: int) -> None:
        self._seen_s: list[deque[float]] = [deque(maxlen=_GAPS) for _ in range(marks)]
        self.expected_s = [math.nan] * marks
        self.varies_s = [0.0] * marks

    def add(self, mark: int, gap_s: float) -> None:
        seen_s = self._seen_s[mark]
        seen_s.append(gap_s)
        ordered_s = sorted(seen_s)
        expected_s = self.expected_s[mark] = statistics.median(ordered_s)
        if len(ordered_s) > 2:
            self.varies_s[mark] = max(expected_s - ordered_s[1], ordered_s[-2] - expected_s)


class EndedIteration(NamedTuple):
    """Start of an iteration on the GPU, its energy (NaN if unknown), and the status at its end."""

    begun_s: float
    energy_j: float
    status: ClockStatus


class Timeline:
    """Requests the clocks of a rank's iterations, and reads their energy. Used on the agent's loop.

    Attributes:
        due_s: Time of the next step that waits for no mark [s]. Infinite if there is none.
    """

    def __init__(
        self,
        memory: RankMemory,
        actor: GpuActor,
        on_record: Callable[[], None],
        timebase: Timebase,
    ) -> None:
        """Begin with the iteration that the host begins next.

        ``on_record`` is called on the actor's thread when the energy of an iteration was read.
        """
        self._memory = memory
        self._actor = actor
        self._on_record = on_record
        self._time = timebase
        self._follows = Follows()
        # By the number of an order without a message, or by a program and the slots that the client marks for it.
        self._compiled: dict[int | tuple[Program, tuple[int, ...]], CompiledProgram] = {}
        # The last iteration that the host has begun, and its order. By number, programs and serials of the iterations.
        self._issued = memory.iteration
        self._order = DEFAULT_CLOCKS
        self._programs = [CompiledProgram(None, LatencyTable())] * REMEMBERED
        self._serials: dict[int, int] = {}
        # The iteration of the next mark, the index of that mark, the times of earlier marks, and the next step.
        self._iteration = memory.iteration + 1
        self._mark = self._step = 0
        self._marked_s = [0.0] * (2 * POSITIONS + 2)
        self._last_s = self._ended_s = -math.inf
        # The last look that did not find the next mark, and the time for which the last mark may have been there.
        self._looked_s, self._unsure_s = -math.inf, 0.0
        self._late_s = Delays()
        self._was_missed = False
        self._unmarked = memory.unmarked
        self._handled_idle_s = 0.0
        self._requests_clocks = True
        self.due_s = math.inf
        self._records: dict[int, EndedIteration] = {}
        self._recorded = memory.iteration
        # Readings on the actor's thread: at the start of an iteration, and at the end of the previous one.
        self._begun_of, self._begun_s, self._begun_j = 0, math.nan, math.nan
        self._read_s, self._ended_j = -math.inf, math.nan

    def add(self, follow: Follow) -> Follow:
        """Accept a message with the program of the iterations of an order, from the next iteration on.

        Returns it with the slots that the client must mark.
        """
        compiled = CompiledProgram(follow.program, self._actor.readback.latencies)
        follow = msgspec.structs.replace(follow, slots=tuple(slot for slot in compiled.slots if slot >= 0))
        key = follow.program, follow.slots
        if key in self._compiled:
            compiled.gaps = self._compiled[key].gaps
        self._compiled[key] = compiled
        self._follows.add(follow)
        held = list(self._follows.held())
        if len(self._compiled) > 2 * len(held) + _MORE_COMPILED:
            keys = {(each.program, each.slots) for each in held}
            self._compiled = {key: each for key, each in self._compiled.items() if key in keys}
        return follow

    def add_again(self) -> list[Follow]:
        """Accept the last message of each order again with the current latencies, which may need other marks.

        Returns them as :meth:`add` does. They apply from an iteration on that the client begins after it has received
        them.
        """
        from_iteration = self._memory.iteration + 2
        latest = {follow.program.number: follow for follow in self._follows.held() if follow.program.clocks_mhz}
        return [
            self.add(msgspec.structs.replace(follow, from_iteration=max(follow.from_iteration, from_iteration)))
            for follow in latest.values()
        ]

    def forget(self) -> None:
        """Return to default clocks from the next iteration on."""
        self._follows.clear()

    def revoke(self) -> None:
        """Request no more clocks, but continue to read energy. The caller resets the clock."""
        self._requests_clocks = False

    def serial_of(self, iteration: int) -> int:
        """Return the serial of the message that an iteration followed, or -1 if it is not known."""
        return self._serials.get(iteration, -1)

    def record_of(self, iteration: int) -> EndedIteration | None:
        """Return the measurements of an iteration. None if the GPU has not finished it."""
        if iteration > self._recorded:
            return None
        return self._records.get(iteration) or EndedIteration(math.nan, math.nan, self._status())

    def advance(self) -> float:
        """Do what is due, and return the time until the next look at the marks [s]."""
        now_s = self._time.now_s()
        self._note_issued(now_s)
        delayed_s = self._take_steps(now_s)
        while self._iteration <= self._issued and self._pass_mark(now_s):
            delayed_s = self._take_steps(now_s)
        self.due_s = min(delayed_s, self._return_to_default(now_s))
        return max(0.0, min(self.due_s - now_s, self._look_in_s(now_s), _BETWEEN_S))

    def _note_issued(self, now_s: float) -> None:
        """Choose the programs of the iterations that the host has begun."""
        memory = self._memory
        if self._iteration <= self._issued and memory.program(self._issued) != self._order:
            self._choose(self._issued)
            if self._iteration == self._issued:
                self._mark = self._step = 0
        unmarked = memory.unmarked  # before the iteration is read, so that this one is known
        if (issued := memory.iteration) != self._issued:
            for iteration in range(max(self._issued + 1, issued - _MOST_AHEAD), issued + 1):
                self._choose(iteration)
            if self._iteration > self._issued:
                self._last_s = now_s  # the GPU was idle, for whatever time
            self._issued = issued
            self._begin(max(self._iteration, issued - _MOST_AHEAD))
        if unmarked != self._unmarked:
            self._unmarked = unmarked
            self._actor.fail(GpuError("a mark could not be written, so its clock cannot follow its operations"))
            self._begin(max(self._iteration, unmarked + 1))

    def _choose(self, iteration: int) -> None:
        self._order = self._memory.program(iteration)
        self._handled_idle_s = 0.0
        follow = self._follows.select(self._order, iteration)
        self._serials[iteration] = 0 if follow is None else follow.serial
        self._serials.pop(iteration - REMEMBERED, None)
        key = self._order if follow is None else (follow.program, follow.slots)
        if key not in self._compiled:  # the order has no program
            self._compiled[key] = CompiledProgram(None, LatencyTable())
        self._programs[iteration % REMEMBERED] = self._compiled[key]

    def _begin(self, iteration: int) -> None:
        """Wait for the marks of an iteration. The energy of skipped ones is unknown."""
        if iteration == self._iteration:
            return
        for skipped in range(max(self._iteration, iteration - REMEMBERED), iteration):
            self._record(skipped, math.nan, math.nan)
        self._iteration = iteration
        self._mark = self._step = 0

    def _pass_mark(self, now_s: float) -> bool:
        """Return True if the GPU has passed the next mark."""
        program, mark = self._programs[self._iteration % REMEMBERED], self._mark
        slot = program.slots[mark]
        passed_s = self._passed_s(slot, now_s)
        if passed_s is None:
            self._looked_s = now_s
            return False
        self._unsure_s = now_s - max(self._last_s, self._looked_s) if passed_s == now_s else 0.0
        if passed_s >= self._last_s:  # it is a later mark, unless another program begins again
            program.gaps.add(mark, passed_s - self._last_s)
        self._marked_s[mark] = self._last_s = passed_s
        self._mark += 1
        if mark:  # for the begin, the client wakes the agent
            self._late_s.append(now_s - passed_s)
        if slot == _BEGUN:
            self._was_missed = self._memory.begun != self._iteration % 2**32
            if not self._was_missed:
                self._actor.call(partial(self._read_begun, self._iteration, passed_s))
        elif slot == _ENDED:
            self._end_iteration(passed_s)
        return True

    def _passed_s(self, slot: int, now_s: float) -> float | None:
        """Return when the GPU has passed a slot of the current iteration [s]. None if it has not.

        A GPU writes no time, so the time at which the mark is found is used.
        """
        memory, iteration = self._memory, self._iteration % 2**32
        begun = memory.begun
        if begun < iteration:
            return None
        marked_s: float | None = 0.0  # the GPU has continued, and the marks are those of another iteration
        if begun == iteration:
            has_ended = memory.ended == iteration
            if slot == _BEGUN:
                marked_s = memory.begun_s
            elif slot == _ENDED:
                marked_s = memory.ended_s if has_ended else None
            else:
                marked_s = memory.marked_s(slot)
                if marked_s is None and has_ended:  # the iteration was aborted
                    marked_s = 0.0
        if marked_s is None:
            return None
        return marked_s if 1.0 < marked_s < now_s else now_s

    def _end_iteration(self, ended_s: float) -> None:
        iteration = self._iteration
        self._iteration, self._mark, self._step, self._ended_s = iteration + 1, 0, 0, ended_s
        if self._was_missed or not self._actor.call(partial(self._read_ended, iteration, ended_s)):
            self._record(iteration, math.nan, math.nan)

    def _take_steps(self, now_s: float) -> float:
        """Request the clocks that are due, and return the time at which the next one is that waits for no mark [s]."""
        steps = self._programs[self._iteration % REMEMBERED].steps
        while self._step < len(steps):
            step = steps[self._step]
            if step.mark >= self._mark:
                break
            due_s = self._marked_s[step.mark] + step.delay_s
            following = steps[self._step + 1] if self._step + 1 < len(steps) else None
            if step.delay_s and (following is not None and following.mark < self._mark):
                pass  # the clock is requested by the next step
            elif due_s > now_s:
                return due_s
            elif self._requests_clocks:
                self._actor.request(step.clock_mhz, self)
            self._step += 1
        return math.inf

    def _return_to_default(self, now_s: float) -> float:
        """Request the default clock if no work follows, and return the time at which to do so [s]."""
        since_s = self._memory.idle_since_s
        if not since_s or since_s == self._handled_idle_s:
            return math.inf
        is_within_iteration = self._memory.progress % 2
        if is_within_iteration:  # its tail, which the user's code continues
            at_s = since_s + IDLE_S
            slots = self._programs[self._iteration % REMEMBERED].slots
            is_idle = self._iteration == self._memory.iteration and self._mark == len(slots) - 1
        else:
            at_s = max(since_s, self._ended_s) + NEXT_WITHIN_S
            is_idle = self._iteration > self._memory.iteration  # the GPU has finished everything
        if not is_idle:
            return math.inf
        if since_s > 0 and at_s > now_s:  # not PAUSED, which is negative
            return at_s
        self._handled_idle_s = since_s
        if self._requests_clocks:
            self._actor.request(None, self)
        return math.inf

    def _look_in_s(self, now_s: float) -> float:
        """Return the time until the next look [s], which is short only around the expected time of the next mark."""
        if self._iteration > self._issued:
            return math.inf  # the client wakes the agent
        gaps = self._programs[self._iteration % REMEMBERED].gaps
        since_s, expected_s = now_s - self._last_s, gaps.expected_s[self._mark]
        if math.isnan(expected_s):
            return max(_OFTEN_S, _SELDOM * since_s)
        varies_s = min(gaps.varies_s[self._mark], _MOST_EARLY * expected_s)
        early_s = max(_OFTEN_S, min(max(varies_s, self._unsure_s), _MOST_EARLY_S))
        in_s = expected_s - since_s
        if in_s > early_s:
            return in_s - early_s
        overdue_s = max(0.0, -in_s)
        return max(_OFTEN_S, early_s / _LOOKS, min(_LESS_OFTEN * overdue_s, _OVERDUE_S))

    def _record(self, iteration: int, begun_s: float, energy_j: float) -> None:
        self._records[iteration] = EndedIteration(begun_s, energy_j, self._status())
        self._records.pop(iteration - REMEMBERED, None)
        self._recorded = max(self._recorded, iteration)

    def _status(self) -> ClockStatus:
        """Return the status of the GPU, in which the delay until marks are found is added to that of the actor."""
        status = self._actor.status()
        return msgspec.structs.replace(status, late_s=status.late_s + self._late_s.typical_s)

    # The methods below run on the actor's thread.

    def _read_begun(self, iteration: int, passed_s: float) -> None:
        if self._begun_of == iteration:
            return  # it was read before, under another program
        if self._time.now_s() - passed_s > _LATE_S:
            return  # the driver was busy, and the counter has advanced
        together = passed_s - self._read_s < _TOGETHER_S
        self._begun_of, self._begun_s = iteration, passed_s
        self._begun_j = self._ended_j if together else self._actor.read_energy_j()

    def _read_ended(self, iteration: int, passed_s: float) -> None:
        self._read_s, self._ended_j = passed_s, self._actor.read_energy_j()
        if self._time.now_s() - passed_s > _LATE_S:
            self._ended_j = math.nan
        if self._begun_of != iteration:  # the driver did not answer at its start
            self._begun_s = self._begun_j = math.nan
        self._actor.readback.limits.read()
        self._record(iteration, self._begun_s, self._ended_j - self._begun_j)
        self._on_record()
