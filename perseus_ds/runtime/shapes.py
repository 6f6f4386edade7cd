"""Profiles and plans for each frequent shape of inputs, which goes through its own phases.

Only the first ranks could know the shape of an iteration before it begins. So each rank has a request for every shape,
and selects one when the inputs of its first forward are known. When the inputs of its last forward are known, it starts
to send the shapes to the others. After the iteration all ranks know the shapes of all, and advance the phases of that
shape, which receive only iterations of that shape.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.run_records import ShapePlanned
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.reports import SHAPES, shapes_number
from perseus_ds.profiler.lengths import FEWEST_LENGTHS
from perseus_ds.ranks import Pending
from perseus_ds.runtime.iterations import UNPLANNED, IterationMeasurement, NextIteration, Phase
from perseus_ds.runtime.job import ModeContext
from perseus_ds.runtime.kinds import LAST, MEASURING, MOST_KINDS, MOST_NUMBERS, FrequentKinds, KindOfIteration

# Maximum number and share of iterations that begin like those of a shape but have another one.
_CONFUSED, _CONFUSED_SHARE = 2, 0.05
# Number of bits, one for each known shape, in a number that is sent. Two numbers are sent.
_BITS = 32


@functools.lru_cache(maxsize=4096)
def number_of_inputs(inputs: Hashable) -> float:
    """Return a number for the shapes of a forward's inputs. It is the same in every process and never 0."""
    return float(int.from_bytes(hashlib.blake2b(repr(inputs).encode(), digest_size=4).digest(), "little") + 1)


@functools.lru_cache(maxsize=4096)
def length_of_inputs(inputs: Hashable) -> float:
    """Return a number proportional to the tokens of a forward's inputs: the elements of the first one.

    NaN if unknown.

    The argument contains the shapes of all inputs, or the shape of one of them.
    """
    if isinstance(inputs, int | float):
        return float(inputs)
    if not isinstance(inputs, tuple) or not inputs:
        return math.nan
    if all(isinstance(size, int) for size in inputs):
        return float(math.prod(inputs))
    return length_of_inputs(inputs[0])


class InputShapes:
    """Numbers for the shapes of the inputs of one iteration.

    Attributes:
        first: Number of the first forward. 0 before it, and if shapes are not used.
        total: Number of all forwards so far, independent of their order.
        length: Mean length of the inputs of a forward so far.
    """

    def __init__(self, forwards: int = 0, tell: Callable[[float, float], None] | None = None) -> None:
        self.first = 0.0
        self.total = 0.0
        self.length = math.nan
        self._forwards = 0
        self._left = forwards
        self._tell = tell

    def add(self, shape: float, length: float = math.nan) -> bool:
        """Add the inputs of a forward. Return True if it is the first one."""
        is_first = self.total == 0.0
        if is_first:
            self.first, self.length = shape, length
        self.total += shape
        self._forwards += 1
        self.length += (length - self.length) / self._forwards
        self._left -= 1
        if self._left == 0 and self._tell is not None:
            self._tell(self.first, self.total)
        return is_first


@dataclass(frozen=True)
class Shape:
    """Shapes of the inputs of an iteration, as numbers.

    Attributes:
        number: Number of the first forwards and of all forwards of all ranks.
        total: Number of all forwards of all ranks, independent of their order.
        first: Number of the first forward of this rank.
    """

    number: float
    total: float
    first: float = field(compare=False)


class _Planned(KindOfIteration):
    """A shape with its own phases.

    Attributes:
        iterations: Number of its iterations.
        confused: Number of iterations that began like it but had another shape.
    """

    def __init__(self, number: int, phases: Phase[Any], came: int) -> None:
        super().__init__(number, phases, came)
        self.iterations = self.confused = 0


def _of_all(numbers: npt.NDArray[np.float64], _: list[None]) -> list[int]:
    """Return sums of the numbers of all ranks' shapes, and the shapes that begin alike on one of them."""
    of_ranks = numbers.astype(np.int64)
    sums: list[int] = (of_ranks[:, :2].sum(axis=0) % SHAPES).tolist()
    alike: list[int] = np.bitwise_or.reduce(of_ranks[:, 2:], axis=0).tolist()
    return sums + alike


class ShapePhases:
    """Trains each frequent shape in its own phases, and iterations of others at default clocks.

    The state is the same on all ranks, which call all methods together.
    """

    def __init__(
        self,
        context: ModeContext,
        start: Callable[[int, Shape, float], tuple[Phase[Any], float | None]],
        first: float | None,
    ) -> None:
        """Start without shapes.

        Args:
            context: Context of the mode.
            start: Starts the phases of a shape, given its number and the length of its inputs. Returns them, and the
                relative error of its profile if that was predicted.
            first: Total of the shape with number 0, if there is one.
        """
        self._recorder = context.recorder
        self._topology = context.rank.communicator.topology
        self._channel = context.rank.communicator.open_channel()
        self._start = start
        self._first = first
        self._planned: dict[Shape, _Planned] = {}
        self._frequent: FrequentKinds[Shape] = FrequentKinds()
        self._numbers = 0
        self._progress: dict[str, Any] = {}
        stream = context.job.schedule.instructions[self._topology.pipeline_rank]
        self._forwards = sum(instruction.kind is Kind.FORWARD for instruction in stream)
        self._has_said = False
        self._told: Pending[list[int] | None] | None = None

    def run(self) -> Phase[None]:
        """Train for the rest of the job."""
        ran: _Planned | None = None
        try:
            while True:
                received = yield self._next_iteration(ran)
                if not isinstance(received, IterationMeasurement):  # a checkpoint
                    ran = None
                    for planned in self._planned.values():
                        if planned.phases:
                            self._advance(planned, received)
                    continue
                if ran is not None:
                    ran.add_reports(received)
                ran = self._of(received)
                if ran is not None:
                    self._advance(ran, received)
        finally:
            for planned in self._planned.values():
                planned.close()

    def _next_iteration(self, last: _Planned | None) -> NextIteration:
        """Return the next request. Until the shape is known, it is that of the last shape."""
        by_shape = {shape.first: planned.wanted for shape, planned in self._planned.items() if planned.phases}
        begin = last.wanted if last is not None else UNPLANNED
        return replace(
            begin,
            by_shape=by_shape,
            tell_shapes=self._tell,
            forwards=self._forwards,
            progress=lambda: self._progress,
        )

    def _of(self, seen: IterationMeasurement) -> _Planned | None:
        """Return the shape of an iteration if it has plans. A frequent one gets them."""
        shape, alike = self._shape_on_all_ranks(*seen.shapes)
        self._frequent.add(shape)
        for other, planned in self._planned.items():
            if other != shape and other in alike:
                planned.confused += 1
                if planned.phases and planned.confused > max(_CONFUSED, _CONFUSED_SHARE * planned.iterations):
                    self._give_up(planned, "iterations that begin with the same inputs continue with others")
        if shape not in self._planned and self._deserves_plans(shape, alike):
            self._begin(shape, seen.length)
            return None  # it did not run the request of these phases
        found = self._planned.get(shape)
        if found is None and not self._has_said:
            self._has_said = True
            self._recorder.say(
                "iterations differ in the shapes of their inputs: frequent shapes get plans, all others run at "
                "default clocks"
            )
        if found is not None:
            found.came, found.iterations = self._frequent.iterations, found.iterations + 1
        return found if found is not None and found.phases else None

    def _shape_on_all_ranks(self, first: float, total: float) -> tuple[Shape, set[Shape]]:
        """Return the shape of an iteration, and those that a rank cannot distinguish by its first forward."""
        if self._told is None:  # inputs of some forwards are not known
            self._tell(first, total)
        pending, self._told = self._told, None
        of_ranks = None if pending is None else pending.result()
        if of_ranks is None:
            raise PerseusError("ranks could not exchange the shapes of their inputs")
        number, of_all, *words = of_ranks
        bits = [word >> bit & 1 for word in words for bit in range(_BITS)]
        return Shape(number, of_all, first), {shape for shape, bit in zip(self._known, bits, strict=False) if bit}

    def _tell(self, first: float, total: float) -> None:
        """Start to send this rank's shapes to all ranks, once for each iteration."""
        if self._told is not None:
            return
        rank = self._topology.rank
        total_number = shapes_number(rank, total)
        alike = [float(other.first == first) for other in self._known]
        words = [sum(2.0**bit * here for bit, here in enumerate(alike[begin : begin + _BITS])) for begin in (0, _BITS)]
        numbers = [(shapes_number(rank, first) + 3 * total_number) % SHAPES, total_number, *words]
        with contextlib.suppress(RuntimeError):  # the connection to a rank is lost
            self._told = self._channel.exchange(numbers, None, _of_all)

    @property
    def _known(self) -> list[Shape]:
        """Shapes that an iteration may have, limited by the number of bits in two words."""
        return [*dict.fromkeys([*self._planned, *self._frequent.last])]

    def _advance(self, planned: _Planned, received: IterationMeasurement | Mapping[str, Any] | None) -> None:
        """Let the phases of a shape decide on its next iteration. None starts them."""
        try:
            if received is None:
                planned.begin()
            else:
                planned.advance(received)
        except StopIteration:
            self._give_up(planned, "its passes no longer have different times")
            return
        except PerseusError as error:  # the same on all ranks
            self._give_up(planned, str(error).rstrip("."))
            return
        wanted = planned.wanted
        if progress := wanted.progress():
            self._progress = {**progress, "plan": None}
        if wanted.phase == "observe":
            wanted = replace(UNPLANNED, reported=wanted.reported)
        # Ranks that assume different shapes for an iteration must not wait for each other.
        planned.wanted = replace(wanted, shape=planned.number, aligns_tail=False)

    def _deserves_plans(self, shape: Shape, alike: set[Shape]) -> bool:
        """Return True if a shape is frequent, can be distinguished from others, and there is room for it."""
        if not alike.isdisjoint(self._planned):
            return False
        is_first = shape.total == self._first
        if sum(other != shape and other in alike for other in self._frequent.last) > _CONFUSED or not (
            is_first or self._frequent.is_frequent(shape)
        ):
            return False
        if self._numbers >= MOST_NUMBERS or self._waits_for_profiles():
            return False
        if len(self._planned) < MOST_KINDS:
            return True
        unused = self._frequent.unused(self._planned)
        if unused is None:
            return False
        self._planned.pop(unused).close()
        return True

    def _waits_for_profiles(self) -> bool:
        """Return True if enough lengths are being profiled to predict the profiles of others."""
        now = self._frequent.iterations
        measured = (
            planned
            for planned in self._planned.values()
            if planned.wanted.phase in MEASURING and now - planned.came < LAST
        )
        return len(self._planned) >= FEWEST_LENGTHS and any(measured)

    def _begin(self, shape: Shape, length: float) -> None:
        if shape.total == self._first:
            number, self._first = 0, None
        else:
            number = self._numbers = self._numbers + 1
        phases, error = self._start(number, shape, length)
        self._recorder.announce(ShapePlanned(shape=number, profile_error=error and round(error, 5)))
        planned = self._planned[shape] = _Planned(number, phases, self._frequent.iterations)
        self._advance(planned, None)

    def _give_up(self, planned: _Planned, why: str) -> None:
        planned.close()
        self._recorder.announce(ShapePlanned(shape=planned.number, given_up=why))
