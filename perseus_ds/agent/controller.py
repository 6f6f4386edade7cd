"""One thread sets the clock of a rank's GPU and reads the GPU.

Requests and calls are done in the order in which they were handed over, each once the GPU has passed its event. What
counts as the driver's time is a call of the driver, never a wait for the GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from perseus_ds.agent.readback import ClockReadback
from perseus_ds.errors import GpuBusyError, GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.protocol.job_messages import ClockRefused
from perseus_ds.protocol.layout import DRIVER_HANGS_S, ClockStatus, RankMemory
from perseus_ds.timebase import REAL_TIME, Flag, Timebase

_UNKNOWN_MHZ = -1
# So many waits of the clocks' thread are remembered, and so many are needed; it is late from here on [s].
_REMEMBERED, _ENOUGH, _THREAD_LATE_S = 33, 3, 0.002
_PERCENTILE = 0.9
_CLOSED = "the clock was restored for good, and the GPU is not read any more"
_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""After each refusal in a row, until the driver does what was last requested; the last one repeats."""


class Event(Protocol):
    """A point in the GPU's own progress."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def passed_s(self) -> float:
        """Return when the GPU passed it, on the host's clock [s].

        It is called only after the GPU has passed the event.
        """

    def look_again_s(self) -> float | None:
        """Return how long to wait before the next query [s]; None if somebody wakes whoever waits for it."""


class Source(Protocol):
    """Hands over requests and calls, on the clocks' thread."""

    def poll(self) -> bool:
        """Hand over what is due, and return whether what the thread waits for was withdrawn."""


class ClockRequest(NamedTuple):
    """A clock to set.

    Attributes:
        clock_mhz: The clock; None for the default.
        after: Not before the GPU has passed this event; None for now.
        delay_s: How long after that event, unless the next request is due first [s]; None for one that must be done.
    """

    clock_mhz: int | None
    after: Event | None
    delay_s: float | None = None


class DriverCall:
    """A call of the driver, made on the clocks' thread after an event, if there is one."""

    def __init__(
        self,
        function: Callable[[], float | None],
        after: Event | None,
        clocks: ClockController,
        timebase: Timebase,
    ) -> None:
        self.after = after
        self._function = function
        self._clocks = clocks
        self._value: float | None = None
        self._error: Exception | None = None
        self._returned = Flag(timebase)

    @property
    def is_over(self) -> bool:
        """Whether the function has returned, or raised an error."""
        return self._returned.is_set()

    @property
    def has_worked(self) -> bool:
        """Whether the function has returned without an error."""
        return self.is_over and self._error is None

    def make(self) -> None:
        """Call the function."""
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error
        self._returned.set()

    def refuse(self, error: Exception) -> None:
        """Answer without calling the function."""
        self._error = error
        self._returned.set()

    def value(self) -> float:
        """Wait for the GPU and the driver, and return what the function has returned.

        Raises:
            GpuBusyError: The driver does not answer.
            GpuError: The function's own, or the clocks' thread has ended.
        """
        while not self.is_over:
            if (problem := self._clocks.problem) is not None:
                raise problem
            self._returned.wait(DRIVER_HANGS_S - self._clocks.failing_s)
        if self._error is not None:
            raise self._error
        return self._value or 0.0


class ClockController:
    """Sets clocks without stalling training, and always restores the default.

    A request is skipped if the next one is already due when its turn comes: its instruction is over. A driver that is
    busy is asked again, with default clocks meanwhile; any other error ends all requests until a :meth:`probe` works.

    Attributes:
        changes: Clock changes made.
        overtaken: Requests skipped because a later one was already due.
        readback: What was read of the clock, how late clocks are, and what limits them.
        is_closed: Whether the default clock is restored for good.
        memory: Says whether the clock may be locked, and that it was reset; receives the status.
        source: Hands over requests; None without one.
    """

    def __init__(
        self,
        gpu: Gpu,
        on_error: Callable[[Exception], None],
        on_refusal: Callable[[ClockRefused], None] = lambda refusal: None,
        *,
        timebase: Timebase = REAL_TIME,
        memory: RankMemory | None = None,
        may_lock: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread.

        Args:
            gpu: The GPU whose clock to control.
            on_error: Called on the thread when a clock cannot be set.
            on_refusal: Called there when the GPU does not reach a clock that the driver has accepted.
            timebase: Its timebase.
            memory: What the rank shares; by default memory of its own.
            may_lock: Asked before each clock is set.
        """
        self._gpu = gpu
        self._on_error = on_error
        self._time = timebase
        self.readback = ClockReadback(gpu, on_refusal, timebase)
        self.changes = self.overtaken = 0
        # Any thread appends, the clocks' thread alone removes.
        self._items: deque[ClockRequest | DriverCall] = deque()
        self._requested_mhz: int | None = None
        self._is_idle = False
        self._idle_at_s = 0.0
        self._notifier = timebase.notifier()
        # Notified when the thread ends a call after the end, and when the default clock is restored.
        self._changed = timebase.condition()
        self._is_waiting = False
        self._called_s: float | None = None
        self._busy_since_s: float | None = None
        self._closing: threading.Thread | None = None
        self.is_closed = False
        self.memory = memory or RankMemory.create()
        self._may_lock = may_lock
        self.source: Source | None = None
        self._resets = 0
        self._is_restored = self._has_ended = False
        # Of the clocks' thread: what the driver was last asked for, and what it has accepted.
        self._wanted_mhz: int | None = None
        self._clock_mhz: int | None = None
        self._has_failed = False
        self._refusals = 0
        self._late_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._again_at_s: float | None = None
        self._awaited: Event | None = None
        timebase.thread(self._work, "perseus-clocks").start()

    def request(self, clock_mhz: int | None, after: Event | None = None) -> None:
        """Request a clock (None for the default) once the GPU has passed an event; returns at once."""
        if clock_mhz != self._requested_mhz or self._is_idle or self._was_reset:
            self._requested_mhz = clock_mhz
            self._is_idle = False
            self._put(ClockRequest(clock_mhz, after))

    def request_early(self, clock_mhz: int, begun: Event, delay_s: float) -> None:
        """Request a clock some time after an event, or at the next :meth:`request` if that comes first.

        A :meth:`request` for the same clock must follow. This one only makes the driver's call earlier.
        """
        self._put(ClockRequest(clock_mhz, begun, delay_s))

    def reset_when_idle(self, after_s: float) -> None:
        """Return to the default clock unless there is a :meth:`request` before some time has passed [s]."""
        if self._requested_mhz is not None:
            self._idle_at_s = self._time.now_s() + after_s
            self._is_idle = True
            self.wake()

    def call(self, function: Callable[[], float | None], after: Event | None = None) -> DriverCall:
        """Have a function that reads from the GPU called after all that was handed over before; returns at once.

        A driver that does not answer is not asked for more.
        """
        made = DriverCall(function, after, self, self._time)
        problem = GpuError(_CLOSED) if self.is_closed else self.problem
        if problem is not None:
            made.refuse(problem)
        else:
            self._put(made)
        return made

    def probe(self, on_success: Callable[[], None]) -> None:
        """Have the driver do once all that plans need; if it does, clocks are set again. Returns at once."""

        def probe() -> None:
            self.try_driver()
            on_success()

        self.call(probe)

    def give_up(self) -> None:
        """Set no clock but the default one until a :meth:`probe` works; from any thread, and returns at once."""
        self._has_failed = True
        self.call(self._give_up)

    def watch_default_clocks(self) -> None:
        """Report, like a clock that is not reached, a limit that keeps the GPU down at default clocks."""
        self.readback.watch_default_clocks()
        self.wake()

    @property
    def thread_late_s(self) -> float:
        """How late the thread sees that the GPU has passed an event, nine times of ten at most [s].

        Up to 2 ms count as 0.
        """
        late_s = sorted(self._late_s)
        most_s = late_s[int(_PERCENTILE * (len(late_s) - 1))] if len(late_s) >= _ENOUGH else 0.0
        return most_s if most_s > _THREAD_LATE_S else 0.0

    @property
    def failing_s(self) -> float:
        """How long the driver has not answered the call under way, or has been too busy to set a clock [s]; else 0."""
        since_s = _sooner(self._called_s, self._busy_since_s)
        return 0.0 if since_s is None else self._time.now_s() - since_s

    @property
    def is_calling(self) -> bool:
        """Whether a call of the driver is under way."""
        return self._called_s is not None

    @property
    def problem(self) -> GpuError | None:
        """Why no call is made, if none is."""
        if self._has_ended:
            return GpuError(_CLOSED)
        if self.failing_s >= DRIVER_HANGS_S:
            return GpuBusyError(f"the driver has not answered for {self.failing_s:.0f} s")
        return None

    @property
    def _was_reset(self) -> bool:
        """Whether the agent has reset the clock since it was set."""
        return self._clock_mhz is not None and self.memory.resets != self._resets

    def take_over(self) -> None:
        """Assume that another agent has locked the clock; before the first request."""
        self._clock_mhz = self._wanted_mhz = self._requested_mhz = _UNKNOWN_MHZ

    def leave(self) -> None:
        """Set no clock any more, and let somebody else reset the one that is set; returns at once.

        A call that is under way restores the default clock itself. Calls that were handed over before are still made.
        """
        self._closing, self.is_closed = threading.current_thread(), True
        self._is_restored = True
        self._notifier.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Restore the default clock for good; from any thread, a signal's handler included.

        It waits for a call of the driver that is under way, but not for the GPU. If that call does not return in time,
        the driver hangs and would hang this thread as well: then nothing is done. Called again, it waits for the first
        call. Calls that were handed over before are still made.
        """
        with self._changed:
            if self._closing is not None:
                # A signal may have interrupted this very thread here.
                if self._closing is not threading.current_thread():
                    self._wait_until(lambda: self._is_restored, timeout_s)
                return
            self._closing, self.is_closed = threading.current_thread(), True
            self._notifier.notify()
            self._wait_until(lambda: self._called_s is None, timeout_s)
        try:
            if self._called_s is None and self._clock_mhz is not None:
                self._gpu.reset_clock()
                self._clock_mhz = None
        except Exception as error:
            if not self._has_failed:
                self._on_error(error)
        with self._changed:
            self._is_restored = True
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        end_s = self._time.now_s() + timeout_s
        while not condition() and (left_s := end_s - self._time.now_s()) > 0:
            self._changed.wait(left_s)

    def _put(self, item: ClockRequest | DriverCall) -> None:
        if self._closing is None:
            self._items.append(item)
            self.wake()

    def withdraw(self, is_void: Callable[[Any], bool]) -> bool:
        """Withdraw what is to be done after some events; on the clocks' thread.

        Returns:
            Whether the thread waits for one of these events.
        """
        for _ in range(len(self._items)):  # in place: other threads may append
            item = self._items.popleft()
            if not is_void(item.after):
                self._items.append(item)
        self._requested_mhz = _UNKNOWN_MHZ
        return self._awaited is not None and is_void(self._awaited)

    def wake(self) -> None:
        """Have the thread look at once, if it waits."""
        if self._is_waiting:  # otherwise the thread looks before it waits
            self._is_waiting = False  # once is enough, however late the thread goes on
            self._notifier.notify()

    # From here on, the clocks' thread.

    def _work(self) -> None:
        while not self._has_ended:
            self._serve()

    def _serve(self) -> None:
        try:
            item = self._next()
            if isinstance(item, ClockRequest):
                self._handle(item)
            elif item is not None:
                self._make(item)
            else:
                self._has_ended = True
        except Exception as error:  # such as that of an event that cannot be queried
            self._fail(error)

    def _next(self) -> ClockRequest | DriverCall | None:
        """Return the oldest item, None at the end; meanwhile do what is due without one."""
        while not self._items:
            self._is_waiting = True  # from here on, who changes what follows rings
            self._poll()
            if self._items:
                break
            if self.is_closed:
                return None
            due_in_s = self._due_in_s()
            if due_in_s is None or due_in_s > 0:
                self._wait_for_more_than(0, due_in_s)
            else:
                self._do_what_is_due()
        self._is_waiting = False
        return self._items.popleft()

    def _poll(self) -> bool:
        return self.source is not None and self.source.poll()

    def _wait_for_more_than(self, count: int, timeout_s: float | None) -> None:
        """Wait until there are more items, or something else has changed; at most for some time [s]."""
        self._is_waiting = True
        if len(self._items) <= count and not self.is_closed:
            self._notifier.wait(timeout_s)
        self._is_waiting = False

    def _due_in_s(self) -> float | None:
        """Return how long until the clock is to be read back, set again or reset [s]; None for never."""
        if self.is_closed:
            return None
        idle_at_s = self._idle_at_s if self._may_idle() else None
        at_s = _sooner(self._again_at_s, idle_at_s)
        return _sooner(self.readback.due_in_s(), None if at_s is None else max(0.0, at_s - self._time.now_s()))

    def _may_idle(self) -> bool:
        """Whether the clock is one for an idle GPU to give up: none is requested after an event that is to come."""
        return self._is_idle and self._wanted_mhz is not None and self._following() is None

    def _do_what_is_due(self) -> None:
        now_s = self._time.now_s()
        if self._may_idle() and self._idle_at_s <= now_s:
            self._set(None)
        elif self._again_at_s is not None and self._again_at_s <= now_s:
            self._set(self._wanted_mhz)
        else:
            self._in_call(self.readback.read)

    def _wait_for(self, event: Event) -> bool:
        """Wait until the GPU has passed an event; meanwhile do what is due.

        Returns:
            Whether it has. If not, something else was handed over instead.
        """
        had_passed = has_passed = event.query()
        while not has_passed:
            self._is_waiting, self._awaited = True, event
            is_void, self._awaited = self._poll(), None
            if is_void:
                self._is_waiting = False
                return False
            due_in_s = self._due_in_s()
            if due_in_s is not None and due_in_s <= 0:
                self._do_what_is_due()
            elif not event.query():
                self._notifier.wait(_sooner(due_in_s, event.look_again_s()))
            self._is_waiting = False
            has_passed = event.query()
        # The sooner it is asked, the better the events after it are known.
        late_s = self._time.now_s() - event.passed_s()
        if not had_passed:
            self._late_s.append(late_s)
        return True

    def _make(self, call: DriverCall) -> None:
        try:
            if call.after is not None and not self._wait_for(call.after):
                return
        except Exception as error:
            call.refuse(error)
            raise
        self._in_call(call.make)

    def _handle(self, request: ClockRequest) -> None:
        if self._has_failed:
            return
        if request.after is not None and not self._wait_for(request.after):
            return
        if request.after is not None and request.delay_s is not None:
            if self._sleep_until(request.after, request.delay_s):
                return  # the next request says what to do
        elif self._is_overtaken():
            self.overtaken += 1
            return
        self._refusals = 0
        self._set(request.clock_mhz)

    def _sleep_until(self, after: Event, delay_s: float) -> bool:
        """Sleep until some time after an event [s], or the next request is due; returns whether it is."""
        until_s = after.passed_s() + delay_s
        while True:
            count = len(self._items)
            if self._is_overtaken() or self.is_closed:
                return True
            self._awaited = after
            is_void, self._awaited = self._poll(), None
            if is_void:
                return True
            left_s = until_s - self._time.now_s()
            if left_s <= 0:
                return False
            due_in_s = self._due_in_s()
            if due_in_s is not None and due_in_s <= 0:
                self._do_what_is_due()
                continue
            self._wait_for_more_than(count, _sooner(_sooner(left_s, due_in_s), self._look_again_s()))

    def _is_overtaken(self) -> bool:
        """Whether the next request that must be done is due already."""
        following = self._following()
        return following is not None and (following.after is None or following.after.query())

    def _look_again_s(self) -> float | None:
        """Return how long until the next request that must be done may be due [s]; None if somebody wakes this."""
        following = self._following()
        return None if following is None or following.after is None else following.after.look_again_s()

    def _following(self) -> ClockRequest | None:
        required = (item for item in tuple(self._items) if isinstance(item, ClockRequest) and item.delay_s is None)
        return next(required, None)

    def _set(self, clock_mhz: int | None) -> None:
        """Set a clock, now or, after a refusal, later; None for the default."""
        self._wanted_mhz, self._again_at_s = clock_mhz, None
        try:
            if clock_mhz != self._clock_mhz or self._was_reset:
                self._call_driver(clock_mhz)
            self._refusals, self._busy_since_s = 0, None
        except GpuBusyError:
            if self._busy_since_s is None:
                self._busy_since_s = self._time.now_s()
            self._fall_back()
        except Exception as error:
            self._fail(error)
        self.memory.busy_since_s = self._busy_since_s or 0.0

    def _fail(self, error: Exception) -> None:
        """Give up but for the default clock."""
        has_failed_before, self._has_failed = self._has_failed, True
        if not has_failed_before:
            self._on_error(error)
        self._give_up()

    def _give_up(self) -> None:
        self._wanted_mhz, self._busy_since_s = None, None
        self._fall_back()

    def _fall_back(self) -> None:
        """Return to the default clock, if the driver does that, until what is wanted is tried again."""
        self.readback.forget()
        with suppress(Exception):
            if self._clock_mhz is not None:
                self._call_driver(None)
        if self._clock_mhz != self._wanted_mhz:
            self._again_at_s = self._time.now_s() + _AGAIN_AFTER_S[min(self._refusals, len(_AGAIN_AFTER_S) - 1)]
            self._refusals += 1

    def _call_driver(self, clock_mhz: int | None) -> None:
        """Have the driver set a clock, unless the default one was restored for good.

        Raises:
            GpuError: The driver refused.
        """
        self._in_call(partial(self._ask_driver, clock_mhz))

    def _ask_driver(self, clock_mhz: int | None) -> None:
        if self.is_closed or (clock_mhz is not None and (self.memory.is_revoked or not self._may_lock())):
            return
        self._resets = self.memory.resets
        self.memory.may_be_locked = True
        self._clock_mhz = _UNKNOWN_MHZ  # if the call fails half-way, the clock may have changed or not
        begin_s = self._time.now_s()
        if clock_mhz is None:
            self._gpu.reset_clock()
        else:
            self._gpu.lock_clock(clock_mhz)
        # The call was late, and neither close() nor the agent has waited for it.
        if clock_mhz is not None and (self.is_closed or self.memory.is_revoked):
            self._gpu.reset_clock()
            clock_mhz = None
        self._clock_mhz = clock_mhz
        self.memory.may_be_locked = clock_mhz is not None
        self.changes += 1
        self.readback.changed(clock_mhz, self._time.now_s() - begin_s)

    def try_driver(self) -> None:
        """Have the driver do once all that programs need; on the clocks' thread.

        Raises:
            GpuError: It refuses.
        """
        try:
            self._call_driver(self._gpu.supported_clocks_mhz()[-1])
            self._call_driver(None)
            self._gpu.energy_j()
        except Exception:
            self._fall_back()
            raise
        self._has_failed, self._refusals, self._busy_since_s, self._again_at_s = False, 0, None, None
        self._requested_mhz = _UNKNOWN_MHZ  # what was requested meanwhile was not set

    def _in_call(self, function: Callable[[], None]) -> None:
        """Make a call of the driver, which :meth:`close` waits for and :attr:`failing_s` counts from."""
        self._called_s = self._time.now_s()
        if self._busy_since_s is None:
            self.memory.busy_since_s = self._called_s
        try:
            function()
        finally:
            self._called_s = None
            self.memory.busy_since_s = self._busy_since_s or 0.0
            if self.is_closed:  # nobody else waits
                with self._changed:
                    self._changed.notify_all()

    def tell(self) -> None:
        """Write the status into the memory; on the clocks' thread."""
        asked_mhz, reached_mhz = self.readback.reading
        limits = self.readback.limits
        self.memory.status = ClockStatus(
            self.changes,
            self.overtaken,
            asked_mhz,
            reached_mhz,
            self.thread_late_s,
            self._busy_since_s or 0.0,
            limits.power_w,
            limits.clock_mhz,
            self.readback.default_mhz or 0,
        )


def _sooner(first_s: float | None, second_s: float | None) -> float | None:
    return min((each_s for each_s in (first_s, second_s) if each_s is not None), default=None)
