"""Kinds of iterations: orders of passes, such as for numbers of micro-batches.

Each frequent kind has its own mode, which receives only iterations of that kind. All other iterations run at default
clocks. The first order of a job runs the job's mode. Passes are the same in all orders, so all orders share one
profile, which is measured in iterations of all of them, and only the schedule of a new order is read. All iterations of
an order are of one kind, whatever the shapes of their inputs: they are judged on average.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.run_records import NO_ORDER, OrderPlanned
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import PerseusError, ScheduleError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol.job_messages import Orders, ReadSchedule, ScheduleRead
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.server.iterations import Mode, Run, Seen
from perseus_ds.server.modes import mode_of, mode_of_order
from perseus_ds.server.phases import ModeContext, observe
from perseus_ds.server.profiling import passes_of_stages, share_profile

UNPLANNED = Run("observe", status={"plan": None})
"""Run of iterations that belong to no kind."""
MEASURING = ("warm-up", "profile")
"""The phases in which the profile of a kind is not complete."""
_WITHOUT_PROFILE = ("calibrate", "observe")
# A kind gets plans if it occurs in 5 of the last 50 iterations. Planning takes about twenty of its iterations.
_OFTEN, _LAST = 5, 50
# Maximum number of kinds that have plans at a time, and of those that get plans during a job, each with its own folder.
_MOST_KINDS = 6
_MOST_NUMBERS = 254
# Number of iterations without a kind after which another one may replace it.
_UNUSED = 500
# Number of iterations without an order after which other orders do not wait for it.
_GONE = 10
# In profile mode, iterations of other orders are used for the warm-up after this number of them in a row.
_LASTS_AFTER = 10
_LONGEST_SCHEDULE = 1 << 24


class Kind:
    """A kind of iterations with its own mode.

    Attributes:
        number: Number by which ranks identify it.
        key: Key of its order.
        wanted: The run that its mode requests.
        last_at: Number of iterations of the job when it last occurred.
        profile: Path of the profile of its passes; None before there is one.
    """

    def __init__(self, number: int, context: ModeContext, mode: Mode | None, key: int) -> None:
        self.number = number
        self.context = context
        self.key = key
        self.wanted = UNPLANNED
        self.last_at = 0
        self.profile: Path | None = None
        self._mode = mode

    @property
    def is_planned(self) -> bool:
        """True if its mode has not ended."""
        return self._mode is not None

    @property
    def is_measured(self) -> bool:
        """True while its profile is being measured."""
        return self._mode is not None and self.profile is None

    def advance(self, seen: Seen | None) -> None:
        """Pass an iteration to the mode, or None to start it, and store the run that it requests.

        Raises:
            Exception: The mode has failed.
        """
        assert self._mode is not None, "it has not ended"
        self.wanted = self._mode.send(seen)  # type: ignore[arg-type]  # None begins it
        if self.wanted.phase in MEASURING:
            self.profile = None
        elif self.wanted.phase not in _WITHOUT_PROFILE:
            self.profile = self.context.job.profile_path

    def change_mode(self, mode: Mode) -> None:
        """Replace the mode. :meth:`advance` starts the new one."""
        self.close()
        self._mode = mode

    def close(self) -> None:
        """End the mode. Iterations of this kind then run at default clocks."""
        if self._mode is not None:
            self._mode.close()
        self._mode, self.wanted = None, UNPLANNED


class _Orders:
    """Orders of which the frequent ones get plans.

    Attributes:
        kinds: By key, the orders with plans, or without them after an error.
        last: The keys of the last iterations, including those of other orders.
        iterations: Number of iterations.
        numbers: Number of orders so far, except the first one.
        is_announced: Whether the job has printed that iterations differ.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, Kind] = {}
        self.last: deque[int] = deque(maxlen=_LAST)
        self.iterations = self.numbers = 0
        self.is_announced = False

    def add(self, key: int) -> Kind | None:
        """Add an iteration, and return its kind if there is one."""
        self.iterations += 1
        self.last.append(key)
        found = self.kinds.get(key)
        if found is not None:
            found.last_at = self.iterations
        return found

    def is_frequent(self, key: int) -> bool:
        """Return whether iterations are frequent enough for plans."""
        return self.last.count(key) >= _OFTEN


class Kinds:
    """Routes each iteration to the mode of its kind.

    Attributes:
        first: The first order of the job.
        first_key: Its key; None before it is known.
        latest: The kind with a mode that occurred last.
    """

    def __init__(
        self,
        context: ModeContext,
        send_run: Callable[[Kind], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Create the first kind. :meth:`begin` starts its mode.

        ``send_run`` sends the run that a kind requests to the ranks. ``on_error`` is called with an error that has
        ended the mode of the first order.
        """
        self._context = context
        self._send_run = send_run
        self._on_error = on_error
        self._plans_orders = context.job.config.mode == "auto"
        self._treats_orders_alike = context.job.config.mode in ("observe", "profile")
        self.first = self.latest = Kind(0, context, None, 0)
        self.first_key: int | None = None
        self._orders = _Orders()
        self._number = 0  # the latest number of a kind
        self._schedules: dict[int, Schedule] = {}
        # The schedules of requested orders that some ranks have sent, by key and rank.
        self._requested: dict[int, dict[int, Schedule]] = {}
        self._others = 0

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Start the job's mode, given the state of an earlier start of the job, if there is one."""
        self.first.change_mode(mode_of(self._context, state))
        self.advance(self.first, None)

    def streams_of(self, key: int) -> tuple[Any, ...]:
        """Return the operations of each pipeline rank in an order. Empty if unknown."""
        return self._schedules[key].ranks if key in self._schedules else ()

    @property
    def requested(self) -> list[int]:
        """Keys of the orders with schedules that some ranks have not sent yet."""
        return sorted(self._requested)

    @property
    def orders(self) -> Orders:
        """Return the message with the numbers of orders."""
        numbers = [(key, kind.number) for key, kind in self._orders.kinds.items()]
        measured = None if self._treats_orders_alike else self._measured
        if measured is not None:
            others = self._schedules.keys() - self._orders.kinds.keys()
            alike = (key for key in sorted(others) if self._has_passes_of(key, measured))
            numbers += [(key, measured.number) for key in alike]
        return Orders(tuple(numbers), 0 if self._treats_orders_alike else DEFAULT_CLOCKS)

    def kinds(self) -> list[Kind]:
        """Return all kinds that have plans or may get them."""
        orders = dict.fromkeys([self.first, *self._orders.kinds.values()])
        return [kind for kind in orders if kind.is_planned]

    def route(self, key: int) -> tuple[Kind | None, int | None]:
        """Return the kind of an iteration, and the number of its order for the records."""
        if not self._orders.kinds:
            self.first_key = self.first.key = key if self.first_key is None else self.first_key
            self._orders.kinds[self.first_key] = self.first
            self._schedules[self.first_key] = self._context.job.schedule
            self._send_orders()
        if self._treats_orders_alike:
            return (self.first if self._is_measured_with_first(key) else None), None
        kind = self._of_order(key)
        measured = self._measured
        if kind is None and measured is not None and self._has_passes_of(key, measured):
            return measured, NO_ORDER
        if kind is None:
            return None, NO_ORDER
        return kind, kind.context.job.order or None

    def _is_measured_with_first(self, key: int) -> bool:
        """Return whether an iteration of an order is treated like those of the first order.

        The first order warms up. Then iterations of all orders are measured for its profile.
        """
        if key == self.first_key or self._context.job.config.mode != "profile":
            self._others = 0
            return True
        self._others += 1
        self._say_that_orders_differ("all of them are profiled")
        if key not in self._schedules:
            if key not in self._orders.kinds:
                self._read_schedule(key)
            return False
        return self.first.wanted.phase not in ("calibrate", "warm-up") or self._others > _LASTS_AFTER

    def advance(self, kind: Kind, seen: Seen | None) -> None:
        """Pass an iteration to the mode of its kind, or None to start it.

        An error ends only this kind, unless it is the first.
        """
        if not kind.is_planned:
            return
        if seen is not None:
            self.latest = kind
        measured = self._measured
        try:
            kind.advance(seen)
        except Exception as error:
            if kind is self.first:
                kind.close()
                self._on_error(error)
            else:
                self._give_up_order(kind.key, error)
            return
        if self._measured is not measured:
            self._send_orders()
        if kind.is_planned:
            self._send_run(kind)

    def add_schedule(self, rank: int, message: ScheduleRead) -> None:
        """Add the schedule of an order, as read by a rank."""
        found = self._requested.get(message.key)
        if found is None:
            return
        try:
            if message.error:
                raise ScheduleError(message.error)
            content = zlib.decompressobj().decompress(message.schedule, _LONGEST_SCHEDULE)
            own = found[rank] = ScheduleStreams.model_validate_json(content).to_schedule()
            if len(found) == self._context.job.world_size:
                ranks = tuple(found[each].ranks[0] for each in self._context.job.shown)
                del self._requested[message.key]
                self._schedules[message.key] = replace(own, ranks=ranks)
                if self._measured is not None:
                    self._send_orders()
        except (PerseusError, ValueError, zlib.error) as error:
            self._requested.pop(message.key, None)
            self._give_up_order(message.key, error)

    def restart(self, iterations: int) -> None:
        """Discard all kinds except the first order, and restart the job's mode after some iterations.

        Until then, and as long as a rank fails, the job trains at default clocks.
        """
        for kind in self.kinds():
            if kind is not self.first:
                self._close(kind)
        self._orders.kinds = {} if self.first_key is None else {self.first_key: self.first}
        self.latest = self.first
        self.first.change_mode(_after(self._context, iterations))
        self._send_orders()
        self.advance(self.first, None)

    def progress(self) -> dict[str, Any]:
        """Return the progress under plans to be kept, without a plan if there are several kinds."""
        found = [kind.wanted.progress() for kind in self.kinds() if kind.wanted.progress]
        if not found:
            return {}
        return found[0] if len(found) == 1 else {**found[0], "plan": None}

    def close(self) -> None:
        """End all modes."""
        for kind in self.kinds():
            self._close(kind)

    # Orders.

    def _of_order(self, key: int) -> Kind | None:
        """Return the kind of an order, or None if it has none yet."""
        if (found := self._orders.add(key)) is not None:
            return found
        which = "numbers that come often get plans" if self._plans_orders else "the plans are for one number"
        self._say_that_orders_differ(f"{which}, all others run at default clocks")
        measured = self._measured
        if measured is not None and self._has_passes_of(key, measured):
            return None  # it is measured with that order
        is_read = key in self._schedules
        if (measured is not None and not is_read) or self._deserves_plans(key):
            if is_read:
                self._begin_order(key)
            else:
                self._read_schedule(key)
        return None

    @property
    def _measured(self) -> Kind | None:
        """The order with a profile that is being measured. None if an order has a profile.

        Iterations of other orders are measured for it, too. They run at its clock, because an energy counter may need
        longer than one iteration at the same clock.
        """
        if self._profile() is not None:
            return None
        return next((kind for kind in self._orders.kinds.values() if kind.wanted.phase == "profile"), None)

    def _has_passes_of(self, key: int, kind: Kind) -> bool:
        """Return whether an order is known, and all of its passes are measured for the profile of a kind."""
        schedule = self._schedules.get(key)
        return schedule is not None and passes_of_stages(schedule) <= passes_of_stages(kind.context.job.schedule)

    def _say_that_orders_differ(self, then: str) -> None:
        if not self._orders.is_announced:
            self._orders.is_announced = True
            self._context.recorder.say(f"iterations differ in their number of micro-batches: {then}")

    def _deserves_plans(self, key: int) -> bool:
        """Return whether an order is frequent and may get plans now."""
        orders = self._orders
        if not self._plans_orders or key in self._requested or not orders.is_frequent(key):
            return False
        # Other orders wait while one is measured, unless that one no longer occurs.
        is_measuring = self._profile() is None and any(
            kind.is_measured and orders.iterations - kind.last_at < _GONE for kind in orders.kinds.values()
        )
        return not is_measuring and self._has_room()

    def _has_room(self) -> bool:
        """Return whether another order may get plans, and remove an unused one if it has to be replaced."""
        orders, requested = self._orders, len(self._requested)
        if orders.numbers + requested >= _MOST_NUMBERS:
            return False
        if len(orders.kinds) + requested < _MOST_KINDS:
            return True
        others = [key for key, kind in orders.kinds.items() if kind is not self.first]
        oldest = min(others, key=lambda key: orders.kinds[key].last_at, default=None)
        if oldest is None or orders.iterations - orders.kinds[oldest].last_at < _UNUSED:
            return False
        self._close(orders.kinds.pop(oldest))
        self._send_orders()
        return True

    def _profile(self) -> Path | None:
        """Return the path of a profile of the job's passes, if there is one."""
        return next((kind.profile for kind in self._orders.kinds.values() if kind.profile), None)

    def _read_schedule(self, key: int) -> None:
        if key not in self._requested:
            self._requested[key] = {}
            self._context.send_all(ReadSchedule(key))

    def _begin_order(self, key: int) -> None:
        """Start the mode of an order with a known schedule."""
        schedule, profile = self._schedules[key], self._profile()
        number = self._orders.numbers + 1
        job = self._context.job.of_order(number, schedule)
        try:
            has_profile = profile is not None and share_profile(job, profile)
        except (OSError, PerseusError) as error:
            self._give_up_order(key, error)
            return
        self._orders.numbers = number
        context = replace(self._context, job=job)
        planned = OrderPlanned(order=number, micro_batches=schedule.micro_batches, shares_profile=has_profile)
        self._context.recorder.announce(planned)
        kind = Kind(self._next_number(), context, mode_of_order(context, has_profile=has_profile), key)
        kind.last_at = self._orders.iterations
        self._orders.kinds[key] = kind
        self._send_orders()
        self.advance(kind, None)

    def _give_up_order(self, key: int, error: Exception) -> None:
        kind = self._orders.kinds.get(key)
        if kind is not None:
            self._close(kind)
        else:
            self._orders.numbers += 1
            context = replace(self._context, job=replace(self._context.job, order=self._orders.numbers))
            kind = self._orders.kinds[key] = Kind(DEFAULT_CLOCKS, context, None, key)
        given_up = OrderPlanned(order=kind.context.job.order, given_up=str(error).rstrip("."))
        self._context.recorder.announce(given_up)
        self._send_orders()

    def _next_number(self) -> int:
        """Return a number that no other kind has."""
        used = {kind.number for kind in self._orders.kinds.values()}
        following = (*range(self._number + 1, DEFAULT_CLOCKS), *range(1, self._number + 1))
        self._number = next(number for number in following if number not in used)
        return self._number

    def _close(self, kind: Kind) -> None:
        """End the mode of a kind, and return its ranks to default clocks."""
        kind.close()
        self._send_run(kind)

    def _send_orders(self) -> None:
        self._context.send_all(self.orders)


async def _after(context: ModeContext, iterations: int) -> None:
    await observe(iterations)
    await mode_of(context)
