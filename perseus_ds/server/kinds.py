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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from perseus_ds.artifacts.run_records import NO_ORDER, OrderPlanned, ShapePlanned
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import PerseusError, ScheduleError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.policy.reports import SHAPES, shapes_number
from perseus_ds.profiler.lengths import FEWEST_LENGTHS
from perseus_ds.protocol.job_messages import Orders, ReadSchedule, ScheduleRead
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.server.context import ModeContext
from perseus_ds.server.default_clocks import wait_until_none_has_failed
from perseus_ds.server.iterations import Mode, Run, Seen
from perseus_ds.server.modes import mode_of, mode_of_order, mode_of_shape
from perseus_ds.server.profiling import passes_of_stages, share_profile

OFTEN, LAST = 5, 50
"""A kind gets plans if it occurs in 5 of the last 50 iterations. Planning takes about twenty of its iterations."""
MOST_KINDS = 6
"""Maximum number of kinds that have plans at a time."""
MOST_NUMBERS = 254
"""Maximum number of kinds that get plans during a job, each with its own folder."""
MEASURING = ("warm-up", "profile")
"""The phases in which the profile of a kind is not complete."""
UNUSED = 500
"""Number of iterations without a kind after which another one may replace it."""
# Number of iterations without an order after which other orders do not wait for it.
_GONE = 10
_WITHOUT_PROFILE = ("calibrate", "observe")
# A shape is given up if more iterations than this number, and than this fraction of its own iterations, begin like it
# but have another shape.
_CONFUSED, _CONFUSED_SHARE = 2, 0.05
# In profile mode, iterations of other orders are used for the warm-up after this number of them in a row.
_LASTS_AFTER = 10
_LONGEST_SCHEDULE = 1 << 24

UNPLANNED = Run("observe", status={"plan": None})
"""Run of iterations that belong to no kind."""
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Shape:
    """Shapes of the inputs of an iteration, encoded as numbers.

    Attributes:
        number: Number of the first forwards and all forwards of all ranks.
        total: Number of all forwards of all ranks, regardless of their order.
        firsts: Number of the first forward of each rank.
    """

    number: int
    total: int
    firsts: tuple[float, ...] = field(compare=False)

    @classmethod
    def of(cls, seen: Seen) -> Shape:
        """Return the shape of an iteration."""
        reports = [message.report for message in seen.messages]
        totals = [shapes_number(rank, report.shapes) for rank, report in enumerate(reports)]
        firsts = [shapes_number(rank, report.first_shape) for rank, report in enumerate(reports)]
        total = sum(totals) % SHAPES
        return cls((sum(firsts) + 3 * total) % SHAPES, total, tuple(report.first_shape for report in reports))

    def begins_like(self, other: Shape) -> bool:
        """Return whether a rank cannot distinguish it from another shape by the first forward."""
        return any(own == theirs for own, theirs in zip(self.firsts, other.firsts, strict=True))


class Kind:
    """A kind of iterations with its own mode.

    Attributes:
        number: Number by which ranks identify it.
        context: Context of its mode.
        key: Key of its order.
        shape: Shape of its inputs; None for all.
        wanted: The run that its mode requests.
        came: Number of iterations when it last occurred.
        iterations: Number of its iterations.
        confused: Number of iterations that began like it but had another shape.
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
        self.came = self.iterations = self.confused = 0
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
            StopIteration: The mode has ended, with its return value.
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
            self.context.look_ahead.stop(self.context.order)
        self._mode, self.wanted = None, UNPLANNED


class Frequent(Generic[K]):
    """Counts the kinds of the last iterations.

    Attributes:
        iterations: Number of iterations.
        last: The kinds of the last iterations.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.last: deque[K] = deque(maxlen=LAST)

    def add(self, kind: K) -> None:
        """Add an iteration."""
        self.iterations += 1
        self.last.append(kind)

    def is_frequent(self, kind: K) -> bool:
        """Return whether a kind is frequent enough for plans."""
        return self.last.count(kind) >= OFTEN

    def unused(self, planned: Mapping[K, Kind]) -> K | None:
        """Return the kind to be replaced by another one, or None if all are in use."""
        oldest = min(planned, key=lambda kind: planned[kind].came)
        return oldest if self.iterations - planned[oldest].came >= UNUSED else None


class _Shapes:
    """The kinds of one order by shape.

    Attributes:
        planned: The kinds.
        frequent: Counts the shapes.
        first: Total of the shape with which the order was profiled, if it is only one.
        measured: Profiles by the lengths of inputs.
    """

    def __init__(self, first: float | None) -> None:
        self.planned: dict[Shape, Kind] = {}
        self.frequent: Frequent[Shape] = Frequent()
        self.first = first
        self.measured: dict[float, Path] = {}
        self.numbers = 0
        self.has_said = False


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

        Args:
            context: Context of the job.
            send_run: Sends the run that a kind requests to the ranks.
            on_error: Called with an error that has ended the mode of the first order.
        """
        self._context = context
        self._send_run = send_run
        self._on_error = on_error
        self._plans_orders = context.job.config.mode == "auto"
        self._treats_orders_alike = context.job.config.mode in ("observe", "profile")
        self.first = self.latest = Kind(0, context, None, 0)
        self.first_key: int | None = None
        self._orders: dict[int, Kind] = {}
        self._frequent: Frequent[int] = Frequent()
        self._shapes: dict[int, _Shapes] = {}
        self._numbers = self._order_numbers = 0
        self._schedules: dict[int, Schedule] = {}
        # By key and rank, the schedules of requested orders that are not yet complete.
        self._read: dict[int, dict[int, Schedule]] = {}
        self._wanted: set[int] = set()
        self._has_said = False
        self._others = 0

    def begin(self) -> None:
        """Start the job's mode."""
        self.first.change_mode(mode_of(self._context))
        self.advance(self.first, None)

    def streams_of(self, key: int) -> tuple[Any, ...]:
        """Return the operations of each pipeline rank in an order. Empty if unknown."""
        return self._schedules[key].ranks if key in self._schedules else ()

    @property
    def requested(self) -> list[int]:
        """Keys of the orders whose schedules some ranks have not sent yet."""
        return sorted(self._wanted)

    def orders_for(self, rank: int) -> Orders:
        """Return the numbers of all kinds for a rank."""
        numbers = []
        for key, kind in self._orders.items():
            numbers.append((key, 0.0, kind.number if kind.is_planned or key not in self._shapes else DEFAULT_CLOCKS))
            if key in self._shapes:
                for shape, each in self._shapes[key].planned.items():
                    if each.is_planned:
                        numbers.append((key, shape.firsts[rank], each.number))
                if not any(each.is_planned for each in self._shapes[key].planned.values()):
                    numbers.append((key, -1.0, DEFAULT_CLOCKS))
        measured = None if self._treats_orders_alike else self._measured
        if measured is not None:
            alike = (key for key in self._schedules if key not in self._orders and self._has_passes_of(key, measured))
            numbers += [(key, 0.0, measured.number) for key in alike]
        return Orders(tuple(numbers), 0 if self._treats_orders_alike else DEFAULT_CLOCKS)

    def kinds(self) -> list[Kind]:
        """Return all kinds that have plans or may get them."""
        by_shape = (kind for shapes in self._shapes.values() for kind in shapes.planned.values())
        return [kind for kind in (self.first, *self._orders.values(), *by_shape) if kind.is_planned]

    def route(self, seen: Seen, key: int) -> tuple[Kind | None, int | None, int | None]:
        """Return the kind of an iteration, and the number of its order and its shape for the records."""
        if not self._orders:
            self.first_key = self.first.key = key if self.first_key is None else self.first_key
            self._orders[self.first_key] = self.first
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
        order = kind.context.order or None
        if key in self._shapes:
            found = self._of_shape(seen, kind, self._shapes[key])
            return found, order, None if found is None else found.context.shape
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
            if key not in self._orders:
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
        except StopIteration as ended:
            self._ends(kind, ended.value)
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
        if message.key not in self._wanted:
            return
        try:
            if message.error:
                raise ScheduleError(message.error)
            content = zlib.decompressobj().decompress(message.schedule, _LONGEST_SCHEDULE)
            own = ScheduleStreams.model_validate_json(content).to_schedule()
            found = self._read.setdefault(message.key, {})
            found[rank] = own
            if len(found) == self._context.job.world_size:
                ranks = tuple(found[each].ranks[0] for each in self._context.job.shown)
                self._wanted.discard(message.key)
                del self._read[message.key]
                self._schedules[message.key] = replace(own, ranks=ranks)
                if self._measured is not None:
                    self._send_orders()
        except (PerseusError, ValueError, zlib.error) as error:
            self._wanted.discard(message.key)
            self._read.pop(message.key, None)
            self._give_up_order(message.key, error)

    def begin_again(self, iterations: int) -> None:
        """Discard all kinds except the first order, and restart the job's mode after some iterations."""
        for kind in self.kinds():
            if kind is not self.first:
                self._close(kind)
        self._shapes.clear()
        self._orders = {} if self.first_key is None else {self.first_key: self.first}
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
        self._frequent.add(key)
        found = self._orders.get(key)
        if found is not None:
            found.came = self._frequent.iterations
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
        """The order whose profile is measured. None if an order has a profile.

        Iterations of other orders are measured for it, too. They run at its clock, because an energy counter may need
        longer than one iteration at the same clock.
        """
        if self._profile() is not None:
            return None
        return next((kind for kind in self._orders.values() if kind.wanted.phase == "profile"), None)

    def _has_passes_of(self, key: int, kind: Kind) -> bool:
        """Return whether an order is known, and all of its passes are measured for the profile of a kind."""
        schedule = self._schedules.get(key)
        return schedule is not None and passes_of_stages(schedule) <= passes_of_stages(kind.context.job.schedule)

    def _say_that_orders_differ(self, then: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._context.recorder.say(f"iterations differ in their number of micro-batches: {then}")

    def _deserves_plans(self, key: int) -> bool:
        """Return whether an order is frequent and may get plans now."""
        if not self._plans_orders or key in self._wanted or not self._frequent.is_frequent(key):
            return False
        if self._order_numbers + len(self._wanted) >= MOST_NUMBERS:
            return False
        # Other orders wait while one is measured, unless that one no longer occurs.
        now = self._frequent.iterations
        if self._profile() is None and any(o.is_measured and now - o.came < _GONE for o in self._orders.values()):
            return False
        if len(self._orders) + len(self._wanted) < MOST_KINDS:
            return True
        others = {known: kind for known, kind in self._orders.items() if kind is not self.first}
        unused = self._frequent.unused(others) if others else None
        if unused is None:
            return False
        self._close(self._orders.pop(unused))
        if unused in self._shapes:
            for kind in self._shapes.pop(unused).planned.values():
                self._close(kind)
        self._send_orders()
        return True

    def _profile(self) -> Path | None:
        """Return the path of a profile of the job's passes, if there is one."""
        return next((kind.profile for kind in self._orders.values() if kind.profile), None)

    def _read_schedule(self, key: int) -> None:
        if key not in self._wanted:
            self._wanted.add(key)
            self._context.send_all(ReadSchedule(key))

    def _begin_order(self, key: int) -> None:
        """Start the mode of an order whose schedule is known."""
        schedule, profile = self._schedules[key], self._profile()
        job = self._context.job.of_order(self._order_numbers + 1, schedule)
        try:
            has_profile = profile is not None and share_profile(job, profile)
        except (OSError, PerseusError) as error:
            self._give_up_order(key, error)
            return
        self._order_numbers += 1
        context = replace(self._context, job=job, order=self._order_numbers)
        kind = Kind(self._next_number(), context, mode_of_order(context, has_profile=has_profile), key)
        kind.came = self._frequent.iterations
        planned = OrderPlanned(order=context.order, micro_batches=schedule.micro_batches, shares_profile=has_profile)
        self._context.recorder.announce(planned)
        self._orders[key] = kind
        self._send_orders()
        self.advance(kind, None)

    def _give_up_order(self, key: int, error: Exception) -> None:
        if key in self._orders:
            self._close(self._orders[key])
        else:
            self._order_numbers += 1
            context = replace(self._context, order=self._order_numbers)
            self._orders[key] = Kind(DEFAULT_CLOCKS, context, None, key)
        given_up = OrderPlanned(order=self._orders[key].context.order, given_up=str(error).rstrip("."))
        self._context.recorder.announce(given_up)
        self._send_orders()

    # Shapes.

    def _of_shape(self, seen: Seen, order: Kind, shapes: _Shapes) -> Kind | None:
        """Return the kind of an iteration by the shape of its inputs. A frequent shape becomes a kind."""
        shape = Shape.of(seen)
        shapes.frequent.add(shape)
        known = dict.fromkeys([*shapes.planned, *shapes.frequent.last])
        alike = {other for other in known if other != shape and other.begins_like(shape)}
        for other, kind in shapes.planned.items():
            if other in alike:
                kind.confused += 1
                if kind.is_planned and kind.confused > max(_CONFUSED, _CONFUSED_SHARE * kind.iterations):
                    self._give_up_shape(kind, "iterations that begin with the same inputs have different ones later")
        if shape not in shapes.planned and self._shape_deserves_plans(shape, alike, shapes):
            self._begin_shape(shape, seen.messages[0].report.length, order, shapes)
            return None  # it did not run what the new mode requests
        found = shapes.planned.get(shape)
        if found is None and not shapes.has_said:
            shapes.has_said = True
            self._context.recorder.say(
                "iterations differ in the shapes of their inputs: shapes that come often get plans, all others run at "
                "default clocks"
            )
        if found is not None:
            found.came, found.iterations = shapes.frequent.iterations, found.iterations + 1
        return found if found is not None and found.is_planned else None

    def _shape_deserves_plans(self, shape: Shape, alike: set[Shape], shapes: _Shapes) -> bool:
        """Return whether a shape is frequent and distinguishable from others, and may become a kind."""
        if not alike.isdisjoint(shapes.planned):
            return False
        is_first = shape.total == shapes.first
        if sum(other in alike for other in shapes.frequent.last) > _CONFUSED or not (
            is_first or shapes.frequent.is_frequent(shape)
        ):
            return False
        if shapes.numbers >= MOST_NUMBERS or self._waits_for_profiles(shapes):
            return False
        if len(shapes.planned) < MOST_KINDS:
            return True
        unused = shapes.frequent.unused(shapes.planned)
        if unused is None:
            return False
        self._close(shapes.planned.pop(unused))
        self._send_orders()
        return True

    def _waits_for_profiles(self, shapes: _Shapes) -> bool:
        """Return whether enough lengths are being profiled to predict the profiles of others."""
        now = shapes.frequent.iterations
        measured = (
            kind for kind in shapes.planned.values() if kind.wanted.phase in MEASURING and now - kind.came < LAST
        )
        return len(shapes.planned) >= FEWEST_LENGTHS and any(measured)

    def _begin_shape(self, shape: Shape, length: float, order: Kind, shapes: _Shapes) -> None:
        if shape.total == shapes.first:
            number, shapes.first, job = 0, None, order.context.job
        else:
            number = shapes.numbers = shapes.numbers + 1
            job = order.context.job.of_shape(number, f"{shape.total}")
        context = replace(order.context, job=job, shape=number)
        mode, error = mode_of_shape(context, length, shapes.measured, order.context.job.profile_path)
        self._context.recorder.announce(ShapePlanned(shape=number, profile_error=error and round(error, 5)))
        kind = shapes.planned[shape] = Kind(self._next_number(), context, mode, order.key, shape)
        kind.came = shapes.frequent.iterations
        self._send_orders()
        self.advance(kind, None)

    def _give_up_shape(self, kind: Kind, why: str) -> None:
        self._close(kind)
        self._context.recorder.announce(ShapePlanned(shape=kind.context.shape, given_up=why))
        self._send_orders()

    # Both.

    def _next_number(self) -> int:
        """Return a number that no other kind has."""
        used = {kind.number for kind in (*self._orders.values(), *self.kinds())}
        self._numbers = self._numbers % MOST_NUMBERS + 1
        while self._numbers in used:
            self._numbers = self._numbers % MOST_NUMBERS + 1
        return self._numbers

    def _ends(self, kind: Kind, first: float | None) -> None:
        """Divide a kind by shape, or give it up, because its passes no longer have common times."""
        if kind.shape is not None:
            self._give_up_shape(kind, "its passes no longer have common times")
            return
        kind.close()
        self._shapes[kind.key] = _Shapes(first)
        self._send_orders()

    def _close(self, kind: Kind) -> None:
        """End the mode of a kind, and return its ranks to default clocks."""
        kind.close()
        self._send_run(kind)

    def _send_orders(self) -> None:
        for rank in range(self._context.job.world_size):
            self._context.send(rank, self.orders_for(rank))


async def _after(context: ModeContext, iterations: int) -> Any:
    """Train at default clocks for some iterations and until no rank fails, then run the job's mode."""
    await wait_until_none_has_failed(iterations)
    return await mode_of(context)
