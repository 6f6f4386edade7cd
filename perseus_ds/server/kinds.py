"""Kinds of iterations: orders of passes, such as for numbers of micro-batches, and shapes of inputs.

Each frequent kind has its own mode, which receives only iterations of that kind. All other iterations run at default
clocks. The first order of a job runs the job's mode. Passes are the same in all orders, so all orders share one
profile, which is measured in iterations of all of them, and only the schedule of a new order is read. An order whose
inputs have several frequent shapes is divided into kinds by shape, each with its own profile.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from perseus_ds.artifacts.run_records import NO_ORDER, OrderPlanned, ShapePlanned
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import PerseusError, ScheduleError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.profiler.lengths import FEWEST_LENGTHS
from perseus_ds.protocol.job_messages import Orders, ReadSchedule, ScheduleRead
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.server.iterations import Mode, Run, Seen
from perseus_ds.server.modes import mode_of, mode_of_order, mode_of_shape
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
# A shape is given up if more iterations than this number, and than this fraction of its own iterations, begin like it
# but have another shape.
_CONFUSED, _CONFUSED_SHARE = 2, 0.05
# In profile mode, iterations of other orders are used for the warm-up after this number of them in a row.
_LASTS_AFTER = 10
_LONGEST_SCHEDULE = 1 << 24
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Shape:
    """Shapes of the inputs of an iteration, encoded as numbers.

    Attributes:
        total: Number of all forwards of all ranks, regardless of their order.
        firsts: Number of the first forward of each rank.
    """

    total: float
    firsts: tuple[float, ...]

    @classmethod
    def of(cls, seen: Seen) -> Shape:
        return cls(seen.reports.shapes, tuple(message.report.first_shape for message in seen.messages))

    def begins_like(self, other: Shape) -> bool:
        """Return whether a rank cannot distinguish it from another shape by the first forward."""
        return any(own == theirs for own, theirs in zip(self.firsts, other.firsts, strict=True))


class Kind:
    """A kind of iterations with its own mode.

    Attributes:
        number: Number by which ranks identify it.
        key: Key of its order.
        shape: Shape of its inputs; None for all.
        wanted: The run that its mode requests.
        last_at: Number of iterations of its group when it last occurred.
        iterations: Number of its iterations.
        confused: Number of iterations that began like it but had another shape.
        shapes: Kinds of its iterations by shape; None if one mode is for all shapes.
        profile: Path of the profile of its passes; None before there is one.
    """

    def __init__(
        self, number: int, context: ModeContext, mode: Mode | None, key: int, shape: Shape | None = None
    ) -> None:
        self.number = number
        self.context = context
        self.key = key
        self.shape = shape
        self.wanted = UNPLANNED
        self.last_at = self.iterations = self.confused = 0
        self.shapes: _Group[Shape] | None = None
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
            StopIteration: The mode has ended.
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
            self.context.look_ahead.stop(self.context.job.order)
        self._mode, self.wanted = None, UNPLANNED


class _Group(Generic[K]):
    """Kinds of which the frequent ones get plans.

    Attributes:
        kinds: The kinds with plans, or without them after an error.
        last: The last iterations, including those of other kinds.
        iterations: Number of iterations.
        numbers: Number of kinds so far, except the first order.
        is_announced: Whether the job has printed that iterations differ.
        measured: Profiles by the lengths of inputs, in a group of shapes.
    """

    def __init__(self) -> None:
        self.kinds: dict[K, Kind] = {}
        self.last: deque[K] = deque(maxlen=_LAST)
        self.iterations = self.numbers = 0
        self.is_announced = False
        self.measured: dict[float, Path] = {}

    def add(self, key: K) -> Kind | None:
        """Add an iteration, and return its kind if there is one."""
        self.iterations += 1
        self.last.append(key)
        found = self.kinds.get(key)
        if found is not None:
            found.last_at, found.iterations = self.iterations, found.iterations + 1
        return found

    def is_frequent(self, key: K) -> bool:
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
        self._orders: _Group[int] = _Group()
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

    def orders_for(self, rank: int) -> Orders:
        numbers = []
        for key, kind in self._orders.kinds.items():
            numbers.append((key, 0.0, kind.number if kind.shapes is None else DEFAULT_CLOCKS))
            if kind.shapes is not None:
                planned = [(shape, each) for shape, each in kind.shapes.kinds.items() if each.is_planned]
                numbers += [(key, shape.firsts[rank], each.number) for shape, each in planned]
                if not planned:
                    numbers.append((key, -1.0, DEFAULT_CLOCKS))
        measured = None if self._treats_orders_alike else self._measured
        if measured is not None:
            others = self._schedules.keys() - self._orders.kinds.keys()
            alike = (key for key in sorted(others) if self._has_passes_of(key, measured))
            numbers += [(key, 0.0, measured.number) for key in alike]
        return Orders(tuple(numbers), 0 if self._treats_orders_alike else DEFAULT_CLOCKS)

    def kinds(self) -> list[Kind]:
        """Return all kinds that have plans or may get them."""
        orders = dict.fromkeys([self.first, *self._orders.kinds.values()])
        by_shape = (kind for order in orders if order.shapes is not None for kind in order.shapes.kinds.values())
        return [kind for kind in (*orders, *by_shape) if kind.is_planned]

    def route(self, seen: Seen, key: int) -> tuple[Kind | None, int | None, int | None]:
        """Return the kind of an iteration, and the number of its order and its shape for the records."""
        if not self._orders.kinds:
            self.first_key = self.first.key = key if self.first_key is None else self.first_key
            self._orders.kinds[self.first_key] = self.first
            self._schedules[self.first_key] = self._context.job.schedule
            self._send_orders()
        if self._treats_orders_alike:
            return (self.first if self._is_measured_with_first(key) else None), None, None
        kind = self._of_order(key)
        measured = self._measured
        if kind is None and measured is not None and self._has_passes_of(key, measured):
            return measured, NO_ORDER, None
        if kind is None:
            return None, NO_ORDER, None
        order = kind.context.job.order or None
        if kind.shapes is not None:
            found = self._of_shape(seen, kind, kind.shapes)
            return found, order, None if found is None else found.context.job.shape
        return kind, order, None

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
        except StopIteration:
            self._divide(kind)
            return
        except Exception as error:
            if kind is self.first:
                kind.close()
                self._on_error(error)
            elif kind.shape is not None:
                self._give_up_shape(kind, str(error).rstrip("."))
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
        self.first.shapes, self.latest = None, self.first
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
        return not is_measuring and self._has_room(orders, len(self._requested))

    def _has_room(self, group: _Group[K], requested: int = 0) -> bool:
        """Return whether a group may get another kind, which may replace an unused one.

        ``requested`` is the number of kinds that will be added to it.
        """
        if group.numbers + requested >= _MOST_NUMBERS:
            return False
        if len(group.kinds) + requested < _MOST_KINDS:
            return True
        others = [key for key, kind in group.kinds.items() if kind is not self.first]
        oldest = min(others, key=lambda key: group.kinds[key].last_at, default=None)
        if oldest is None or group.iterations - group.kinds[oldest].last_at < _UNUSED:
            return False
        self._close(group.kinds.pop(oldest))
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
        self._begin(kind, key, self._orders)

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

    # Shapes.

    def _of_shape(self, seen: Seen, order: Kind, shapes: _Group[Shape]) -> Kind | None:
        """Return the kind of an iteration by the shape of its inputs. A frequent shape becomes a kind."""
        shape = Shape.of(seen)
        found = shapes.add(shape)
        alike = {other for other in {*shapes.kinds, *shapes.last} if other != shape and other.begins_like(shape)}
        for other, kind in shapes.kinds.items():
            if other in alike:
                kind.confused += 1
                if kind.is_planned and kind.confused > max(_CONFUSED, _CONFUSED_SHARE * kind.iterations):
                    self._give_up_shape(kind, "iterations that begin with the same inputs have different ones later")
        if found is not None:
            return found if found.is_planned else None
        if self._shape_deserves_plans(shape, alike, shapes):
            self._begin_shape(shape, seen.messages[0].report.length, order, shapes)
        elif not shapes.is_announced:
            shapes.is_announced = True
            self._context.recorder.say(
                "iterations differ in the shapes of their inputs: shapes that come often get plans, all others run at "
                "default clocks"
            )
        return None  # also if its new mode begins, which has not requested what it ran

    def _shape_deserves_plans(self, shape: Shape, alike: set[Shape], shapes: _Group[Shape]) -> bool:
        """Return whether a shape is frequent and distinguishable from others, and may become a kind."""
        is_confused = not alike.isdisjoint(shapes.kinds) or sum(other in alike for other in shapes.last) > _CONFUSED
        if is_confused or not shapes.is_frequent(shape):
            return False
        # Others wait while enough lengths are profiled to predict their profiles.
        is_measuring = len(shapes.kinds) >= FEWEST_LENGTHS and any(
            kind.wanted.phase in MEASURING and shapes.iterations - kind.last_at < _LAST
            for kind in shapes.kinds.values()
        )
        return not is_measuring and self._has_room(shapes)

    def _begin_shape(self, shape: Shape, length: float, order: Kind, shapes: _Group[Shape]) -> None:
        number = shapes.numbers = shapes.numbers + 1
        context = replace(order.context, job=order.context.job.of_shape(number, f"{shape.total:.0f}"))
        mode, error = mode_of_shape(context, length, shapes.measured, order.context.job.profile_path)
        self._context.recorder.announce(ShapePlanned(shape=number, profile_error=error and round(error, 5)))
        self._begin(Kind(self._next_number(), context, mode, order.key, shape), shape, shapes)

    def _give_up_shape(self, kind: Kind, why: str) -> None:
        self._close(kind)
        self._context.recorder.announce(ShapePlanned(shape=kind.context.job.shape, given_up=why))
        self._send_orders()

    # Both.

    def _next_number(self) -> int:
        """Return a number that no other kind has."""
        used = {kind.number for kind in (*self._orders.kinds.values(), *self.kinds())}
        following = (*range(self._number + 1, DEFAULT_CLOCKS), *range(1, self._number + 1))
        self._number = next(number for number in following if number not in used)
        return self._number

    def _begin(self, kind: Kind, key: K, group: _Group[K]) -> None:
        kind.last_at = group.iterations
        group.kinds[key] = kind
        self._send_orders()
        self.advance(kind, None)

    def _divide(self, kind: Kind) -> None:
        """Divide a kind by shape, or give it up, because its passes no longer have common times."""
        if kind.shape is not None:
            self._give_up_shape(kind, "its passes no longer have common times")
            return
        kind.close()
        kind.shapes = _Group()
        self._send_orders()

    def _close(self, kind: Kind) -> None:
        """End the modes of a kind and of its shapes, and return its ranks to default clocks."""
        for each in (kind, *(kind.shapes.kinds.values() if kind.shapes is not None else ())):
            each.close()
            self._send_run(each)

    def _send_orders(self) -> None:
        for rank in range(self._context.job.world_size):
            self._context.send(rank, self.orders_for(rank))


async def _after(context: ModeContext, iterations: int) -> None:
    await observe(iterations)
    await mode_of(context)
