"""The actor of a GPU: the thread that is the only caller of its driver.

An actor has a *target* clock and an *actual* clock, and calls the driver until both are equal. A newer target replaces
an older one. After an error, the actual clock is unknown, so that the next call is a reset. Each requested reset begins
a new *epoch*, which ends only when a reset that began later was seen to succeed. A driver may refuse, be busy, or hang:
nobody waits for this thread.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

from perseus_ds.agent.driver_health import DriverHealth
from perseus_ds.agent.gpu_records import GpuRecord, UnrecordedGpu
from perseus_ds.agent.readback import ClockReadback
from perseus_ds.agent.site_lock import check_lock_permission
from perseus_ds.errors import GpuBusyError, GpuError, GpuPermissionError
from perseus_ds.gpu.base import Gpu, gpu_facts
from perseus_ds.gpu.energy_counter import CounterLog
from perseus_ds.protocol.job_messages import ClockRefused, ClockStatus, RankFailed, RankRecovered
from perseus_ds.protocol.layout import DRIVER_HANGS_S
from perseus_ds.protocol.messages import Fault, GpuDescription
from perseus_ds.timebase import REAL_TIME, Timebase

INSIST_S = 120.0
"""Time after which a clock that the driver does not reset is given up."""
_UNKNOWN_MHZ = -1
_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays before the next attempt after consecutive refusals by the driver. The last one repeats."""
_INSISTS_EVERY_S = 0.5
"""Delay before the next attempt of a reset that was requested."""
_MOST_SET_AGAIN, _COUNTED_S = 3, 600.0
"""Number of times within the second value [s] that a clock is set again after a change from outside."""
# Number of delays that are stored, number needed for a median, and delay that counts as late [s].
_REMEMBERED, _ENOUGH, _COUNTS_S = 33, 3, 0.002


class ChangedFromOutside(NamedTuple):
    """The clock of a busy GPU was changed from outside several times, and is not set again."""

    clock_mhz: float
    reached_mhz: float
    times: int


class CounterFailed(NamedTuple):
    """The energy counter cannot be read any more. The clock follows programs as before."""

    error: str


GpuNews: TypeAlias = RankFailed | RankRecovered | ClockRefused | ChangedFromOutside | CounterFailed


class Delays:
    """The last delays of a thread on a busy node."""

    def __init__(self) -> None:
        self._seen_s: deque[float] = deque(maxlen=_REMEMBERED)

    def append(self, delay_s: float) -> None:
        self._seen_s.append(delay_s)

    @property
    def typical_s(self) -> float:
        """Median [s]. Up to 2 ms count as 0."""
        seen_s = tuple(self._seen_s)
        typical_s = statistics.median(seen_s) if len(seen_s) >= _ENOUGH else 0.0
        return typical_s if typical_s > _COUNTS_S else 0.0


class _Target(NamedTuple):
    """A clock to set (None for the default), and the time of its request if the thread waited for one [s]."""

    clock_mhz: int | None
    requested_s: float | None = None


_DEFAULT = _Target(None)


class GpuActor:
    """Opens a GPU, and sets and reads its clock on a thread. Its methods do not wait for the driver.

    Attributes:
        gpu: The GPU. None before it was opened.
        error: Reason why it could not be opened or reset, or None.
        description: Description of the GPU for clients. None before it was read.
        description_error: Reason why it cannot be read, or None.
        left_error: Reason why a clock that another process left locked cannot be reset. Empty if it can.
        readback: Readings of the clock, latencies, and limits. Exists when the GPU was opened.
        health: Faults of the driver.
        listeners: Called with each fault and recovery, and with clocks that the GPU does not reach or others change.
        changes: Number of clock changes made.
        skips: Number of targets that were replaced before the driver was called.
        missed: Number of times that the driver refused a clock, or that a clock was not set because of its faults.
    """

    readback: ClockReadback

    def __init__(
        self,
        record: GpuRecord | UnrecordedGpu,
        open_gpu: Callable[[], Gpu],
        on_change: Callable[[], None] = lambda: None,
        timebase: Timebase = REAL_TIME,
    ) -> None:
        """Open the GPU, and reset it first if a process that has died left its clock locked.

        ``on_change`` is called on the thread after the GPU was opened, could not be opened, was reset or described.
        """
        self.record = record
        self._open_gpu = open_gpu
        self._on_change = on_change
        self._time = timebase
        self._notifier = timebase.notifier()
        self._is_waiting = False
        self.gpu: Gpu | None = None
        self.error: Exception | None = None
        self.description: GpuDescription | None = None
        self.description_error: Exception | None = None
        self.left_error = ""
        self._describes = self._checks_permission = False
        self.listeners: list[Callable[[GpuNews], None]] = []
        self.health = DriverHealth(self._report, timebase)
        self._counter_has_failed = False
        self.changes = self.skips = self.missed = 0
        # Functions that read the GPU. The loop appends, and the thread removes.
        self._calls: deque[Callable[[], None]] = deque()
        self._logs: list[CounterLog] = []
        self._target = self._taken = _DEFAULT
        self._owner: object = None
        self._actual_mhz: int | None = None
        self._may_have_locked = False
        self._epoch = int(record.left_by is not None)
        self._reset_epoch = 0
        self._reset_requested_s = timebase.now_s()
        self._lock_at_s = self._reset_at_s = -math.inf
        self._refusals = 0
        self._called_s: float | None = None
        self._busy_since_s: float | None = None
        self._late_s = Delays()
        # Times of the last changes from outside, and whether the clock stays as they set it.
        self._outside_s: deque[float] = deque(maxlen=_MOST_SET_AGAIN + 1)
        self._accepts_outside = False
        self._is_closed = False
        timebase.thread(self._work, "perseus-gpu").start()

    def request(self, clock_mhz: int | None, owner: object = None) -> None:
        """Make a clock the target (None for the default).

        If ranks share a GPU, only the ``owner`` of the target returns it to the default clock.
        """
        if clock_mhz == self._target.clock_mhz or (clock_mhz is None and owner is not self._owner):
            return
        if clock_mhz is not None and self.health.has_failed:
            self.missed += 1
            return
        if self._taken is not self._target:
            self.skips += 1
        self._owner = owner
        self._refusals, self._lock_at_s = 0, -math.inf
        self._target = _Target(clock_mhz, self._time.now_s() if self._is_waiting else None)
        self._wake()

    def reset(self) -> None:
        """Begin an epoch: void all requests, and reset the clock, whatever it is."""
        if self.is_reset:
            self._reset_requested_s = self._time.now_s()
        self._epoch += 1
        self._reset_at_s = -math.inf
        self._return_to_default()

    def call(self, function: Callable[[], None]) -> bool:
        """Call a function that reads the GPU on the thread. Returns False if the driver does not answer."""
        if self.problem is not None:
            return False
        self._calls.append(function)
        self._wake()
        return True

    def start_log(self, log: CounterLog) -> None:
        """Read the energy counter for a log, until :meth:`stop_log`."""
        self._logs.append(log)
        self._wake()

    def stop_log(self, log: CounterLog | None) -> None:
        if log in self._logs:
            self._logs.remove(log)

    def read_energy_j(self) -> float:
        """Return the value of the energy counter [J]. NaN if it cannot be read, which is reported once.

        Called on the thread.
        """
        assert self.gpu is not None
        try:
            energy_j = self.gpu.energy_j()
        except GpuBusyError:  # the client decides how long to accept this
            return math.nan
        except GpuError as error:
            if not self._counter_has_failed:
                self._counter_has_failed = True
                self._report(CounterFailed(str(error).rstrip(".")))
            return math.nan
        self._counter_has_failed = False
        return energy_j

    def fail(self, error: Exception) -> None:
        """Return to the default clock because of an error, until a probe succeeds."""
        self.health.fail(error)
        self.missed += 1
        self._busy_since_s = None
        self._return_to_default()

    def update(self) -> None:
        """Fall back if the driver hangs, and probe it when that is due. Called often, while ranks train."""
        if not self.health.has_failed and (problem := self.problem) is not None:
            self.fail(problem)
        if self.health.is_probe_due():
            self.call(partial(self._probe, self._epoch))

    def watch_default_clocks(self) -> None:
        """Report a limit that lowers the clock at default clocks, like a clock that is not reached."""
        self.readback.watch_default_clocks()
        self._wake()

    def describe(self, checks_permission: bool) -> None:
        """Request a description of the GPU. ``checks_permission`` resets the clock."""
        self._describes = True
        self._checks_permission |= checks_permission
        self._wake()

    def close(self) -> None:
        """End the thread after its current call. The clock must have been reset."""
        self._is_closed = True
        self._wake()

    @property
    def is_reset(self) -> bool:
        """True if a reset has succeeded since the last one was requested."""
        return self._reset_epoch == self._epoch

    @property
    def has_given_up(self) -> bool:
        """True if the clock may stay locked: the driver has refused or not answered for two minutes."""
        return not self.is_reset and self._time.now_s() >= self._reset_requested_s + INSIST_S

    @property
    def may_be_locked(self) -> bool:
        return self._actual_mhz is not None

    @property
    def left_problem(self) -> str:
        """Reason why a clock that another process left locked is still locked. Empty if it was reset."""
        return self.left_error if self.is_reset else str(self.error or "its driver does not answer")

    @property
    def problem(self) -> GpuBusyError | None:
        """Reason why calls are refused, or None."""
        since_s = [each_s for each_s in (self._called_s, self._busy_since_s) if each_s is not None]
        failing_s = self._time.now_s() - min(since_s) if since_s else 0.0
        if failing_s < DRIVER_HANGS_S:
            return None
        return GpuBusyError(f"the driver has not answered for {failing_s:.0f} s")

    def is_described(self, checks_permission: bool) -> bool:
        if self.description is None:
            return self.description_error is not None
        return self.description.is_permission_checked or not checks_permission

    def status(self) -> ClockStatus:
        asked_mhz, reached_mhz = self.readback.reading
        limits = self.readback.limits
        return ClockStatus(
            changes=self.changes,
            skips=self.skips,
            asked_mhz=asked_mhz,
            reached_mhz=reached_mhz,
            limit_w=limits.power_w,
            limit_mhz=limits.clock_mhz,
            late_s=self._late_s.typical_s,
            default_mhz=self.readback.default_mhz or 0.0,
        )

    def _return_to_default(self) -> None:
        self._target, self._owner = _DEFAULT, None
        self._wake()

    def _report(self, message: GpuNews) -> None:
        for listener in [*self.listeners]:
            listener(message)

    def _wake(self) -> None:
        if self._is_waiting:  # otherwise the thread checks everything before it waits
            self._is_waiting = False  # one notification is enough, however late the thread continues
            self._notifier.notify()

    # The methods below run on the thread.

    def _work(self) -> None:
        while not self._is_closed:
            self._step()
        with contextlib.suppress(Exception):  # the driver may not work
            if self.gpu is not None:
                self.gpu.close()

    def _step(self) -> None:
        """Do what is most urgent, or wait."""
        self._is_waiting = True  # from here on, other threads notify this one of changes
        if (action := self._next_action()) is not None:
            self._is_waiting = False
            self._called_s = self._time.now_s()
            try:
                action()
            except Exception as error:  # a mistake, which must leave no clock locked
                self.fail(error)
            self._called_s = None
        elif not self._is_closed:
            due_s = self._next_attempt_s()
            self._notifier.wait(None if due_s == math.inf else max(0.0, due_s - self._time.now_s()))

    def _next_action(self) -> Callable[[], None] | None:
        target, epoch, now_s = self._target, self._epoch, self._time.now_s()
        if self.gpu is None:
            return self._open if now_s >= self._reset_at_s else None
        if self._calls:
            return self._calls.popleft()
        if self._needs_reset(target, epoch):
            if now_s >= self._reset_at_s:
                return partial(self._reset, target, epoch)
        elif target.clock_mhz not in (None, self._actual_mhz):
            if now_s >= self._lock_at_s:
                return partial(self._lock, target)
        else:
            self._taken, self._busy_since_s = target, None
            if self._describes and not self.is_described(self._checks_permission):
                return partial(self._describe, self.gpu)
        for log in [*self._logs]:
            if log.due_s <= now_s:
                return log.read
        return self._read_back if self.readback.due_in_s() == 0 else None

    def _needs_reset(self, target: _Target, epoch: int) -> bool:
        is_superfluous = target.clock_mhz is None and self._actual_mhz is not None
        return self._reset_epoch != epoch or self._actual_mhz == _UNKNOWN_MHZ or is_superfluous

    def _next_attempt_s(self) -> float:
        """Return the time of the next attempt, or at which the clock is to be read back [s]."""
        now_s = self._time.now_s()
        attempts_s = [each_s for each_s in (self._reset_at_s, self._lock_at_s) if each_s > now_s]
        logs_s = [log.due_s for log in [*self._logs]]
        read_in_s = None if self.gpu is None else self.readback.due_in_s()
        return min([*attempts_s, *logs_s, math.inf if read_in_s is None else now_s + read_in_s])

    def _open(self) -> None:
        try:
            gpu = self._open_gpu()
            self.readback = ClockReadback(gpu, self._report, self._time)
            self.gpu = gpu
        except Exception as error:  # no other process would try again
            self.error = error
            self._reset_at_s = math.inf if self.is_reset else self._time.now_s() + _INSISTS_EVERY_S
        self._on_change()

    def _describe(self, gpu: Gpu) -> None:
        try:
            self.description = description_of(gpu, self._time, checks_permission=self._checks_permission)
        except Exception as error:  # a client waits for it
            self.description, self.description_error = None, error
        if self._checks_permission and self.may_be_locked:
            self.reset()  # the check has done so, but other ranks may have requested clocks before
        self._on_change()

    def _lock(self, target: _Target) -> None:
        """Lock the target clock, unless another process has taken over the GPU."""
        assert target.clock_mhz is not None
        self._taken = target
        if not self.record.is_current:
            self._target = _DEFAULT
            return
        if target.requested_s is not None:
            self._late_s.append(self._time.now_s() - target.requested_s)
        try:
            self._lock_clock(target.clock_mhz)
            self._refusals, self._busy_since_s = 0, None
        except Exception as error:
            self._lock_at_s = self._refused(error)

    def _read_back(self) -> None:
        """Read the clock, and set it again if it was changed from outside, unless that has happened too often."""
        self.readback.read()
        if not self.readback.is_changed_from_outside or self._accepts_outside:
            return
        now_s = self._time.now_s()
        self._outside_s.append(now_s)
        if len(self._outside_s) <= _MOST_SET_AGAIN or now_s > self._outside_s[0] + _COUNTED_S:
            self._actual_mhz = None  # so that the target is set again
        else:
            self._accepts_outside = True
            self._report(ChangedFromOutside(*self.readback.reading, len(self._outside_s)))

    def _reset(self, target: _Target, epoch: int) -> None:
        """Reset the clock, unless another process has taken over the GPU."""
        self._taken = target
        try:
            if self.record.is_current:
                self._reset_clock()
            else:
                self._actual_mhz = None
        except Exception as error:
            self.error = error
            self._reset_at_s = self._refused(error)
            return
        if self._reset_epoch != epoch:
            self._reset_epoch = epoch
            self._on_change()

    def _refused(self, error: Exception) -> float:
        """Handle an error of the driver, and return the time of the next attempt [s]."""
        self.missed += 1
        self.readback.forget()
        if not isinstance(error, GpuBusyError):
            self.fail(error)
        elif self._busy_since_s is None:
            self._busy_since_s = self._time.now_s()
        pause_s = _AGAIN_AFTER_S[min(self._refusals, len(_AGAIN_AFTER_S) - 1)] if self.is_reset else _INSISTS_EVERY_S
        self._refusals += 1
        return self._time.now_s() + pause_s

    def _lock_clock(self, clock_mhz: int) -> None:
        assert self.gpu is not None
        began_s = self._time.now_s()
        had_locked, self._may_have_locked = self._may_have_locked, True
        self._actual_mhz = _UNKNOWN_MHZ
        try:
            self.gpu.lock_clock(clock_mhz)
        except GpuPermissionError:
            self._may_have_locked = had_locked
            raise
        self._changed(clock_mhz, began_s)

    def _reset_clock(self) -> None:
        assert self.gpu is not None
        began_s = self._time.now_s()
        was_locked = self._actual_mhz is not None
        try:
            self.gpu.reset_clock()
        except GpuPermissionError as error:
            # A process that may not reset a clock has not locked it. Another process may have had the permission.
            if self._may_have_locked:
                raise
            if self.record.left_by is not None:
                self.left_error = str(error)
        if was_locked:
            self._changed(None, began_s)

    def _changed(self, clock_mhz: int | None, began_s: float) -> None:
        self._actual_mhz = clock_mhz
        self.changes += 1
        self.readback.changed(clock_mhz, self._time.now_s() - began_s)

    def _probe(self, epoch: int) -> None:
        """Test all operations of the driver that programs need, and set clocks again if they succeed."""
        assert self.gpu is not None
        if epoch != self._epoch or not self.record.is_current:
            return
        try:
            self._lock_clock(self.gpu.supported_clocks_mhz()[-1])
            self._reset_clock()
        except GpuError:
            self.missed += 1
            return
        self._refusals, self._busy_since_s, self._reset_at_s = 0, None, -math.inf
        self.health.recover()


def description_of(gpu: Gpu, timebase: Timebase = REAL_TIME, *, checks_permission: bool) -> GpuDescription:
    """Return the description of a GPU for clients. ``checks_permission`` resets the clock."""
    clocks_mhz: tuple[int, ...] = ()
    clocks_fault = permission_fault = None
    notices = [*getattr(gpu, "administrator_settings", ())]
    try:
        clocks_mhz = gpu.supported_clocks_mhz()
    except GpuError as error:
        clocks_fault = Fault.of(error)
    try:
        if checks_permission and (removed := check_lock_permission(gpu, timebase)):
            notices.append(removed)
    except GpuError as error:
        permission_fault = Fault.of(error)
    return GpuDescription(
        text=str(gpu),
        facts=gpu_facts(gpu),
        notices=tuple(notices),
        clocks_mhz=clocks_mhz,
        clocks_fault=clocks_fault,
        permission_fault=permission_fault,
        is_permission_checked=checks_permission,
    )
