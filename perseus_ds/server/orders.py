"""The orders of a job: the operations of all ranks in one iteration, which depend on the number of micro-batches.

Passes are the same in all orders, so all orders share one profile. The schedule of an unknown order is requested from
its ranks at first sight, and its plans are computed as soon as there is a profile. Until then, and if it cannot be
planned, its iterations run at default clocks whenever the others run under plans.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from perseus_ds.artifacts.run_events import OrderPlanned
from perseus_ds.artifacts.run_savings import NO_ORDER
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.errors import PerseusError, ScheduleError
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol.layout import OTHER_ORDERS
from perseus_ds.server.job import Job, Order
from perseus_ds.server.recorder import Recorder

_LONGEST_SCHEDULE = 1 << 24
Number: TypeAlias = Annotated[int, Field(ge=0, lt=OTHER_ORDERS)]
"""The number of an order."""


class Orders:
    """All orders that have occurred, by the key with which ranks identify them.

    Attributes:
        first: The order that was declared at this start.
        latest: The known order that occurred last.
        numbers: Number of each order by its key, also of those that only occurred before a restart.
    """

    def __init__(self, job: Job, send_all: Callable[[msg.ToRank], None], recorder: Recorder, *, reads: bool) -> None:
        """Begin with the order that was declared at the start.

        Args:
            job: The job, with the schedule of that order.
            send_all: Sends a message to all ranks.
            recorder: Records and prints events.
            reads: Whether the schedules of other orders are requested.
        """
        self.first = self.latest = Order(0, job)
        self._first_key = job.facts[0].key
        self.numbers = {self._first_key: 0}
        self._job = job
        self._send_all = send_all
        self._recorder = recorder
        self._reads = reads
        self._known = {self._first_key: self.first}
        # The schedules of requested orders that some ranks have sent, by key and rank.
        self._requested: dict[int, dict[int, Schedule]] = {}
        self._refused: set[int] = set()
        self._has_said_that_they_differ = False

    @property
    def known(self) -> list[Order]:
        """All orders with a known schedule."""
        return [*self._known.values()]

    @property
    def planned(self) -> list[Order]:
        """All orders with plans."""
        return [order for order in self.known if order.frontier is not None]

    @property
    def requested(self) -> list[int]:
        """Keys of the orders with schedules that some ranks have not sent yet."""
        return sorted(self._requested)

    def streams_of(self, key: int) -> tuple[Any, ...]:
        """Return the operations of each pipeline rank in an order. Empty if unknown."""
        order = self._known.get(key)
        return () if order is None else order.job.schedule.ranks

    def message(self) -> msg.OrderNumbers:
        """Return the message about the numbers of all orders."""
        return msg.OrderNumbers(tuple((key, order.number) for key, order in self._known.items()), OTHER_ORDERS)

    def occurs(self, key: int) -> Order | None:
        """Process the order of the next iteration, and return it. None if its schedule is not known."""
        order = self._known.get(key)
        if order is not None:
            self.latest = order
            return order
        if not self._has_said_that_they_differ:
            self._has_said_that_they_differ = True
            which = "each number gets plans" if self._reads else "all others than the first run at default clocks"
            self._recorder.say(f"iterations differ in their number of micro-batches: {which}")
        if self._reads and key not in self._requested and key not in self._refused:
            self._requested[key] = {}
            self._send_all(msg.ReadSchedule(key))
        return None

    def add_schedule(self, rank: int, message: msg.ScheduleRead) -> Order | None:
        """Add the operations of a rank in an order, and return the order once all ranks have sent theirs."""
        found = self._requested.get(message.key)
        if found is None:
            return None
        try:
            if message.error:
                raise ScheduleError(message.error)
            content = zlib.decompressobj().decompress(message.schedule, _LONGEST_SCHEDULE)
            own = found[rank] = ScheduleStreams.model_validate_json(content).to_schedule()
            if len(found) < self._job.world_size:
                return None
            schedule = replace(own, ranks=tuple(found[each].ranks[0] for each in self._job.shown))
            check_dependencies(schedule)
            number = self._number_of(message.key)
        except (PerseusError, ValueError, zlib.error) as error:
            self._requested.pop(message.key)
            self._refused.add(message.key)
            self._recorder.announce(OrderPlanned(order=NO_ORDER, given_up=str(error).rstrip(".")))
            return None
        order = Order(number, self._job.of_order(number, schedule))
        del self._requested[message.key]
        self._known[message.key] = order
        self._send_all(self.message())
        return order

    def _number_of(self, key: int) -> int:
        """Return the number of an order with a new schedule, which it may have had before a restart."""
        if key not in self.numbers:
            if len(self.numbers) >= OTHER_ORDERS:
                raise ScheduleError(f"a job can have at most {OTHER_ORDERS} orders")
            self.numbers[key] = len(self.numbers)
        return self.numbers[key]

    def restore(self, numbers: Mapping[int, int]) -> bool:
        """Restore the numbers of an earlier start. The order that the job starts with may be another one now.

        Returns False if no number is free for it, so that all orders get other numbers.
        """
        if self._first_key not in numbers and len(numbers) >= OTHER_ORDERS:
            return False
        self.numbers = dict(numbers)
        self.first.number = self._number_of(self._first_key)
        return True

    def give_up(self, order: Order, error: Exception) -> None:
        """Run an order at default clocks from now on, because it cannot be planned."""
        order.is_given_up, order.frontier = True, None
        self._recorder.announce(OrderPlanned(order=order.number, given_up=str(error).rstrip(".")))

    def forget_plans(self) -> None:
        """Forget all plans, because the profile is measured again."""
        for order in self.known:
            order.frontier, order.is_given_up = None, False
