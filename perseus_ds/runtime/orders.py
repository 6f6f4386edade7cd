"""Plans for each order of passes, for example for numbers of micro-batches that alternate or grow.

All ranks know the order of an iteration when it begins. The first order goes through the phases of the mode. Another
frequent order goes through its own phases, which receive only iterations of that order. Passes are the same in all
orders, so all orders share one profile: for a new order only the schedule is read, for which all ranks exchange data
once. Rare orders run at default clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.run_records import NO_ORDER, OrderPlanned
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.runtime.iterations import UNPLANNED, IterationMeasurement, NextIteration, Phase
from perseus_ds.runtime.job import ModeContext
from perseus_ds.runtime.kinds import MEASURING, MOST_KINDS, MOST_NUMBERS, FrequentKinds, KindOfIteration
from perseus_ds.runtime.profiling import share_profile

_OF_UNKNOWN_ORDER = replace(UNPLANNED, order=NO_ORDER)
# An order that has not occurred in this number of iterations is not waited for.
_GONE = 10
_WITHOUT_PROFILE = ("calibrate", "observe")


class _Order(KindOfIteration):
    """An order with its own phases.

    Attributes:
        profile: Profile of its passes. None before it is complete.
    """

    def __init__(self, number: int, phases: Phase[Any], profile_path: Path, came: int = 0) -> None:
        super().__init__(number, phases, came)
        self._profile_path = profile_path
        self.profile: Path | None = None

    def note_profile(self) -> None:
        """Update the path of the profile according to the current phase."""
        if self.wanted.phase in MEASURING and not self.wanted.shape:
            self.profile = None
        elif self.wanted.phase not in _WITHOUT_PROFILE:
            self.profile = self._profile_path

    @property
    def is_measured(self) -> bool:
        """True if its profile is being measured."""
        return self.phases is not None and self.profile is None


class OrderPhases:
    """Trains each frequent order in its own phases. All ranks call all methods together.

    Args:
        context: Context of the mode.
        first: The phases of the first order.
        start: Starts the phases of another order, given whether its profile is known. None if only the first order has
            plans.
        profiles_all: Whether iterations of all orders are measured for the profile of the first one.
    """

    def __init__(
        self,
        context: ModeContext,
        first: Phase[None],
        start: Callable[[ModeContext, bool], Phase[None]] | None,
        *,
        profiles_all: bool = False,
    ) -> None:
        self._context = context
        self._start = start
        self._profiles_all = profiles_all
        self._first = _Order(0, first, context.job.profile_path)
        self._planned: dict[Hashable, _Order] = {}
        self._frequent: FrequentKinds[Hashable] = FrequentKinds()
        # Orders that get phases at their next occurrence, because only then can their schedule be read.
        self._awaited: set[Hashable] = set()
        self._numbers = 0
        self._has_said = False

    def run(self) -> Phase[None]:
        """Train for the rest of the job, or until the phases of the first order end."""
        ran: _Order | None = None
        try:
            self._first.begin()
            while True:
                received = yield self._next_iteration(ran)
                if isinstance(received, IterationMeasurement):
                    if ran is not None:
                        ran.add_reports(received)
                    ran = self._of(received.order)
                    affected = [ran] if ran is not None else []
                else:  # a checkpoint
                    ran, affected = None, [order for order in self._planned.values() if order.phases] or [self._first]
                for order in affected:
                    if not self._advance(order, received):
                        return
        finally:
            for order in (self._first, *self._planned.values()):
                order.close()

    def _next_iteration(self, ran: _Order | None) -> NextIteration:
        """Return the request for an iteration with an order that is not known yet."""
        begin = ran.wanted if ran is not None else _OF_UNKNOWN_ORDER if self._planned else self._first.wanted
        # Reports must have been sent before an iteration in which ranks exchange other data.
        aligns_tail = begin.aligns_tail or any(order.wanted.aligns_tail for order in self._planned.values())
        return replace(
            begin,
            of_order=self._of_order,
            new_orders=frozenset(self._awaited),
            aligns_tail=aligns_tail,
            progress=self._progress,
        )

    def _progress(self) -> dict[str, Any]:
        progress = self._first.wanted.progress()
        return {**progress, "plan": None} if progress and len(self._planned) > 1 else progress

    def _of_order(self, order: Hashable, read: Callable[[], Schedule] | None) -> NextIteration:
        """Return the request for an iteration that is about to begin."""
        if order not in self._planned and self._context.orders.is_first(order):
            self._planned[order] = self._first
        if order in self._awaited and read is not None:
            self._awaited.remove(order)
            self._begin(order, read)
        found = self._planned.get(order, self._measured_with_all)
        return found.wanted if found is not None and found.phases else _OF_UNKNOWN_ORDER

    def _of(self, order: Hashable) -> _Order | None:
        """Return the order of an iteration that has ended. None if it has no phases yet."""
        self._frequent.add(order)
        self._awaited = {awaited for awaited in self._awaited if self._frequent.is_frequent(awaited)}
        found = self._planned.get(order, self._measured_with_all)
        if found is not None:
            found.came = self._frequent.iterations
            return found if found.phases else None
        if not self._has_said:
            self._has_said = True
            which = "frequent numbers get plans" if self._start else "the plans are for one number"
            then = "all of them are profiled" if self._profiles_all else f"{which}, all others run at default clocks"
            self._context.recorder.say(f"iterations differ in their number of micro-batches: {then}")
        if self._deserves_plans(order):
            self._awaited.add(order)
        return None

    @property
    def _measured_with_all(self) -> _Order | None:
        """The first order while iterations of all orders are measured for its profile, else None."""
        return self._first if self._profiles_all and self._first.wanted.phase == "profile" else None

    def _deserves_plans(self, order: Hashable) -> bool:
        """Return True if an order is frequent and may get plans now."""
        if self._start is None or order in self._awaited or not self._frequent.is_frequent(order):
            return False
        if self._numbers + len(self._awaited) >= MOST_NUMBERS:
            return False
        # Other orders wait for an order that is being measured, unless it no longer occurs.
        now = self._frequent.iterations
        if self._profile() is None and any(o.is_measured and now - o.came < _GONE for o in self._planned.values()):
            return False
        if len(self._planned) + len(self._awaited) < MOST_KINDS:
            return True
        others = {known: planned for known, planned in self._planned.items() if planned is not self._first}
        unused = self._frequent.unused(others) if others else None
        if unused is None:
            return False
        self._planned.pop(unused).close()
        return True

    def _profile(self) -> Path | None:
        """Return the path of a profile of the job's passes, if any."""
        return next((order.profile for order in self._planned.values() if order.profile), None)

    def _begin(self, order: Hashable, read: Callable[[], Schedule]) -> None:
        """Start the phases of the order of an iteration that is about to begin."""
        assert self._start is not None, "orders are awaited to be begun"
        communicator = self._context.rank.communicator
        self._numbers += 1
        micro_batches: int | None = None
        profile = self._profile()
        try:
            own = communicator.raise_on_all_ranks(read)
            schedule = replace(own, ranks=tuple(communicator.pipeline_gather(own.ranks[0])))
            micro_batches = schedule.micro_batches
            job = self._context.job.of_order(self._numbers, schedule)
            context = replace(self._context, job=job, order=self._numbers)
            has_profile = profile is not None and share_profile(context, profile)
            phases = self._start(context, has_profile)
            found = _Order(self._numbers, phases, job.profile_path, self._frequent.iterations)
            self._announce(self._numbers, micro_batches, shares_profile=has_profile)
            self._planned[order] = found
            found.begin()
            self._settle(found)
        except PerseusError as error:  # the same on all ranks
            self._planned.setdefault(order, _Order(self._numbers, _nothing(), self._context.job.profile_path)).close()
            self._announce(self._numbers, micro_batches, given_up=str(error).rstrip("."))

    def _advance(self, order: _Order, received: Any) -> bool:
        """Advance the phases of an order. Return False if those of the first order have ended.

        Raises:
            PerseusError: The phases of the first order failed.
        """
        try:
            order.advance(received)
        except StopIteration:
            order.close()
            return order is not self._first
        except PerseusError as error:  # the same on all ranks
            if order is self._first:
                raise
            order.close()
            self._announce(order.number, None, given_up=str(error).rstrip("."))
            return True
        self._settle(order)
        return True

    def _settle(self, order: _Order) -> None:
        order.note_profile()
        if order.number:
            order.wanted = replace(order.wanted, order=order.number)

    def _announce(
        self, number: int, micro_batches: int | None, *, shares_profile: bool = False, given_up: str | None = None
    ) -> None:
        self._context.recorder.announce(
            OrderPlanned(order=number, micro_batches=micro_batches, shares_profile=shares_profile, given_up=given_up)
        )


def _nothing() -> Phase[None]:
    yield UNPLANNED
