"""Passes the clocks of iterations to the GPU's controller, each with the mark after which it is due.

When the host begins an iteration, the :class:`Follower` passes its requests to the thread of the GPU's
:class:`~perseus_ds.agent.controller.ClockController`. The agent's loop checks their marks, even while the driver is
busy, and wakes that thread.

A clock takes effect 10 ms or more after its request, and only one request can be pending. So a request is made before
the clock is due, by the latency of that clock. A higher clock is due when the previous instruction ends, and its
latency is the 90th percentile, because a late one would slow the next instruction down. A lower one is due when the
next instruction has begun, after the transfers in between, which a clock change may delay. Its latency is the 10th
percentile, so that it is not early. Plans hold clocks for long enough that all requests fit.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from perseus_ds.agent.controller import ClockController, ClockStatus
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.protocol.job_messages import Follow, Follows, LatencyTable
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, IDLE_S, NEXT_WITHIN_S, POSITIONS, REMEMBERED, RankMemory
from perseus_ds.timebase import Timebase

_MOST_AHEAD, _MOST_TRANSITIONS = 8, 64
# An iteration that begins within this time [s] after the previous one shares its last reading of the energy counter.
_TOGETHER_S = 0.001
# Polling intervals of a mark around its expected time [s], and growth of the interval after that time.
_SOON_S, _OFTEN_S, _SELDOM_S, _LESS_OFTEN = 0.001, 0.0005, 0.005, 0.1
_BETWEEN_S = 0.05
"""Longest polling interval [s]."""
# A mark may come earlier than expected by this multiple of the recent variation of times between marks.
_VARIES, _FORGETS = 2.0, 0.95
_LATE_S = 1.5
"""A reading of the energy counter is discarded if it is later than this after its mark."""
_LAUNCHED_S = 0.001
"""Time after an instruction within which a transfer is launched that neither side waits for."""
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


class MarkEvent:
    """A mark of an iteration: that of a position by its slot, or ``_BEGUN`` or ``_ENDED``."""

    __slots__ = ("_follower", "_passed_s", "iteration", "slot")

    def __init__(self, follower: Follower, iteration: int, slot: int) -> None:
        self._follower = follower
        self.iteration = iteration
        self.slot = slot
        self._passed_s: float | None = None

    def query(self) -> bool:
        if self._passed_s is not None:
            return True
        memory, now_s = self._follower.memory, self._follower.timebase.now_s()
        begun = memory.begun
        marked_s: float | None = None
        if begun > self.iteration:  # the GPU has continued, and the marks are those of another iteration
            marked_s = 0.0
        elif self.slot >= 0 and memory.ended == self.iteration:  # the iteration was aborted
            marked_s = memory.marked_s(self.slot) or 0.0
        elif self.slot == _BEGUN:
            marked_s = self._follower.begun_s(begun) if begun == self.iteration else None
        elif self.slot == _ENDED:
            marked_s = memory.ended_s if memory.ended >= self.iteration else None
        elif begun == self.iteration:
            marked_s = memory.marked_s(self.slot)
        if marked_s is None:
            return False
        # A GPU writes no time, so the time at which the mark was found is used.
        self._passed_s = marked_s if 1.0 < marked_s < now_s else now_s
        self._follower.note(self.iteration, self.slot, self._passed_s)
        return True

    def passed_s(self) -> float:
        return self._follower.timebase.now_s() if self._passed_s is None else self._passed_s


class IterationRecord(NamedTuple):
    """Start of an iteration on the GPU, its energy (NaN if unknown), and the status at its end."""

    begun_s: float
    energy_j: float
    status: ClockStatus


class Follower:
    """Passes the requests of a rank's iterations to the controller."""

    def __init__(
        self,
        gpu: Gpu,
        memory: RankMemory,
        clocks: ClockController,
        to_server: Callable[[LatencyTable], None],
        on_record: Callable[[], None],
        *,
        timebase: Timebase,
    ) -> None:
        """Begin with the iteration that the host begins next. The functions are called on the controller's thread."""
        self.memory = memory
        self.timebase = timebase
        self._gpu = gpu
        self._clocks = clocks
        self._to_server = to_server
        self._on_record = on_record
        self._follows = Follows()
        # By the serial of a message and the number of the order.
        self._transitions: dict[tuple[int, int], list[ClockTransition]] = {}
        # By the number of an iteration.
        self._serials: dict[int, int] = {}
        self._records: dict[int, IterationRecord] = {}
        self._latencies = LatencyTable()
        self._status = ClockStatus()
        # The iteration that was passed to the controller last, and its order.
        self._iteration = self._followed = self._recorded = memory.iteration
        self._order = DEFAULT_CLOCKS
        self._is_handed_over = self._has_ended = False
        self._unmarked = memory.unmarked
        self._idle = 0, 0.0
        # Readings of the energy counter at the start of that iteration, and at the end of the previous one.
        self._begun_of, self._began_s, self._begun_j = 0, math.nan, math.nan
        self._ended_s, self._ended_j = -math.inf, math.nan
        # Times of marks since the start of their iteration [s]: of the last complete iteration, and of this one.
        self._times_s: dict[int, float] = {}
        self._new_times_s: dict[int, float] = {}
        self._times_of, self._begun_s = -1, -math.inf
        self._last_slot, self._last_s, self._varies_s = _BEGUN, -math.inf, 0.0
        # Future events in their expected order. The controller's thread appends to them.
        self._awaited: deque[MarkEvent] = deque()
        self._lock = threading.Lock()
        # The last iteration that the loop has seen start, and the time of that [s].
        self._seen_begun = 0, 0.0
        clocks.source = self.poll
        clocks.wake()

    def add(self, follow: Follow) -> None:
        """Accept a message with the program of the iterations of an order. Thread-safe.

        Iterations that the host has begun are not changed.
        """
        self._follows.add(follow)
        self._clocks.wake()

    def forget(self) -> None:
        self._follows.clear()
        self._clocks.wake()

    def serial_of(self, iteration: int) -> int:
        """Return the serial of the message that an iteration followed, or -1 if it is not known."""
        return self._serials.get(iteration, -1)

    def record_of(self, iteration: int) -> IterationRecord | None:
        """Return the measurements of an iteration. None if the GPU has not finished it."""
        if iteration > self._recorded:
            return None
        return self._records.get(iteration) or IterationRecord(math.nan, math.nan, self._status)

    def end(self) -> None:
        self._has_ended = True
        self._clocks.wake()

    def poll(self) -> bool:
        """Pass on the requests of the iterations that the host has begun.

        Runs on the controller's thread. Returns True if it withdrew the item that the thread waits for.
        """
        if self._has_ended:
            with self._lock:
                self._awaited.clear()
            return self._clocks.withdraw(lambda event: event is not None)
        memory, is_withdrawn = self.memory, False
        if (latencies := self._clocks.readback.latencies) is not self._latencies:
            self._latencies = latencies
            self._transitions.clear()
            self._to_server(latencies)
        if self._is_handed_over and self.memory.program(self._iteration) != self._order:
            iteration = self._iteration
            is_withdrawn = self._clocks.withdraw(lambda event: event is not None and event.iteration == iteration)
            with self._lock:
                self._awaited = deque(event for event in self._awaited if event.iteration != iteration)
            self._hand_over(iteration)
        unmarked = memory.unmarked  # before the iteration is read, so that this one is handed over
        if (iteration := memory.iteration) != self._iteration:
            for number in range(max(self._iteration + 1, iteration - _MOST_AHEAD), iteration + 1):
                self._hand_over(number)
        if unmarked != self._unmarked:
            self._unmarked = unmarked
            is_withdrawn = self._withdraw_until(unmarked) or is_withdrawn
        self._note_idleness()
        return is_withdrawn

    def _withdraw_until(self, unmarked: int) -> bool:
        """Return to default clocks, and wait for no mark up to an iteration in which one could not be written.

        Returns True if the thread waits for one of them.
        """
        is_withdrawn = self._clocks.withdraw(lambda event: event is not None and event.iteration <= unmarked)
        with self._lock:
            self._awaited = deque(event for event in self._awaited if event.iteration > unmarked)
        self._clocks.fail(GpuError("a mark could not be written, so its clock cannot follow its operations"))
        for iteration in range(self._recorded + 1, unmarked + 1):
            self._record(iteration, math.nan, math.nan)
        return is_withdrawn

    def _note_idleness(self) -> None:
        memory = self.memory
        idle_since_s, is_open = memory.idle_since_s, memory.progress % 2
        after_s = IDLE_S if is_open else NEXT_WITHIN_S
        if idle_since_s and not is_open:
            # The host has issued everything, but the GPU may not have finished.
            is_done = memory.ended == self._iteration % 2**32
            idle_since_s = max(idle_since_s, self._ended_s) if is_done and idle_since_s > 0 else is_done * idle_since_s
        if (idle := (self._iteration, idle_since_s)) != self._idle:
            self._idle = idle
            if idle_since_s:
                left_s = idle_since_s + after_s - self.timebase.now_s() if idle_since_s > 0 else 0.0
                self._clocks.reset_when_idle(max(0.0, left_s))

    def check_marks(self) -> float:
        """Check marks on the agent's loop, and return the time until the next call [s].

        If there are any, it wakes the controller's thread.
        """
        if (begun := self.memory.begun) != self._seen_begun[0]:
            self._seen_begun = begun, self.timebase.now_s()
        with self._lock:
            awaited = self._awaited
            before = len(awaited)
            while awaited and awaited[0].query():
                awaited.popleft()
            if len(awaited) != before:
                self._clocks.wake()
            if awaited:
                return self._expected_in_s(awaited[0])
        # The controller's thread may not have processed an iteration that the host has just begun.
        return _BETWEEN_S if self._followed == self.memory.iteration else _SOON_S

    def _expected_in_s(self, event: MarkEvent) -> float:
        expected_s = self._times_s.get(event.slot)
        if event.slot == _BEGUN or expected_s is None or self._times_of != event.iteration:
            return _SOON_S
        # Durations of passes vary, so the time since the last mark is used.
        since_s = expected_s - self._times_s.get(self._last_slot, 0.0)
        in_s = self._last_s + since_s - self.timebase.now_s()
        soon_s = min(max(_SOON_S, _VARIES * self._varies_s), since_s)
        if in_s > soon_s:
            return min(in_s - soon_s, _BETWEEN_S)
        return min(max(_OFTEN_S, -_LESS_OFTEN * in_s), _SELDOM_S)

    def begun_s(self, iteration: int) -> float:
        """Return the time at which an iteration began [s], or 0 if it is not known."""
        number, seen_s = self._seen_begun
        return self.memory.begun_s or (seen_s if number == iteration else 0.0)

    def note(self, iteration: int, slot: int, passed_s: float) -> None:
        if slot in self._times_s and self._times_of == iteration:
            since_s = self._times_s[slot] - self._times_s.get(self._last_slot, 0.0)
            self._varies_s = max(abs(passed_s - self._last_s - since_s), _FORGETS * self._varies_s)
        self._last_slot, self._last_s = slot, passed_s
        if slot == _BEGUN:
            if self._new_times_s:
                self._times_s, self._new_times_s = self._new_times_s, {}
            self._times_of, self._begun_s = iteration, passed_s
        elif iteration == self._times_of:
            self._new_times_s[slot] = passed_s - self._begun_s

    def _hand_over(self, iteration: int) -> None:
        """Pass the requests and readings of an iteration to the controller."""
        self._iteration, self._is_handed_over = iteration, True
        self._order = self.memory.program(iteration)
        follow = self._follows.select(self._order, iteration)
        self._serials[iteration] = 0 if follow is None else follow.serial
        self._serials.pop(iteration - REMEMBERED, None)
        clocks = self._clocks
        begun = self._event(iteration, _BEGUN)
        clocks.call(partial(self._read_begun, begun), begun)
        if follow is None or (follow.program.first_mhz is None and not follow.program.clocks_mhz):
            clocks.request(None, begun)
        else:
            self._request(follow, iteration, begun)
        ended = self._event(iteration, _ENDED)
        if not clocks.call(partial(self._read_ended, ended), ended):
            self._record(iteration, math.nan, math.nan)
        self._followed = iteration

    def _event(self, iteration: int, slot: int) -> MarkEvent:
        event = MarkEvent(self, iteration, slot)
        with self._lock:
            self._awaited.append(event)
        return event

    def _request(self, follow: Follow, iteration: int, begun: MarkEvent) -> None:
        program = follow.program
        key = follow.serial, program.number
        transitions = self._transitions.get(key)
        if transitions is None:
            if len(self._transitions) >= _MOST_TRANSITIONS:
                self._transitions.clear()
            transitions = plan_transitions(program.clocks_mhz, program.spans_s, program.time_s, self._latencies)
            self._transitions[key] = transitions
        clocks = self._clocks
        clock_mhz = transitions[0].clock_mhz if transitions else program.first_mhz
        clocks.request(clock_mhz, begun)
        for position, transition in enumerate(transitions[:POSITIONS]):
            if transition.clock_mhz != clock_mhz:
                clocks.request(transition.clock_mhz, self._event(iteration, 2 * position))
            if transition.early_s is not None:
                event = self._event(iteration, 2 * position)
                clocks.request_early(transition.next_clock_mhz, event, transition.early_s)
            clock_mhz = transition.next_clock_mhz
            if clock_mhz != transition.clock_mhz:
                clocks.request(clock_mhz, self._event(iteration, 2 * position + 1))

    def _read_begun(self, begun: MarkEvent) -> None:
        if self._begun_of == begun.iteration:
            return  # it was read before, under another program
        if self.timebase.now_s() - begun.passed_s() > _LATE_S:
            return  # the driver was busy, and the counter has advanced
        together = begun.passed_s() - self._ended_s < _TOGETHER_S
        self._begun_of, self._began_s = begun.iteration, begun.passed_s()
        self._begun_j = self._ended_j if together else self._read_energy_j()

    def _read_ended(self, ended: MarkEvent) -> None:
        self._ended_s, self._ended_j = ended.passed_s(), self._read_energy_j()
        if self.timebase.now_s() - self._ended_s > _LATE_S:
            self._ended_j = math.nan
        if self._begun_of != ended.iteration:  # the driver did not answer at its start
            self._began_s = self._begun_j = math.nan
        self._clocks.readback.limits.read()
        self._record(ended.iteration, self._began_s, self._ended_j - self._begun_j)

    def _record(self, iteration: int, begun_s: float, energy_j: float) -> None:
        self._status = self._clocks.status()
        self._records[iteration] = IterationRecord(begun_s, energy_j, self._status)
        self._records.pop(iteration - REMEMBERED, None)
        self._recorded = max(self._recorded, iteration)
        self._on_record()

    def _read_energy_j(self) -> float:
        try:
            return self._gpu.energy_j()
        except GpuBusyError:  # the client decides how long to accept this
            return math.nan
        except GpuError as error:
            self._clocks.fail(error)
            return math.nan
