"""Records the order that a schedule of Megatron-Core executes on this rank.

The first iteration is recorded, because Megatron's schedules are functions, and their operations are known only when
they are executed. A forward receives its micro-batch and virtual stage as arguments. The micro-batch of a backward or
transfer follows from its tensors, since each of them was returned by a pass or will be used by one. A pass may have
several of them, which are transferred one after the other, for example those of the student and the teacher in
distillation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Operation, Payload, Transfer, Wait

V = TypeVar("V")
Forward: TypeAlias = tuple[int, int, Any]
"""Index of the virtual stage on this rank, micro-batch, and inputs of a forward."""
Backward: TypeAlias = tuple[Any, Any]
"""Outputs of the forward to which a backward belongs, and their gradients."""


@dataclass
class _Communication:
    """One call that sends to and receives from the neighbours.

    A received transfer is None until a pass uses its tensor.
    """

    waits: bool
    transfers: dict[str, Transfer | None] = field(default_factory=dict)

    def named(self, *directions: str) -> tuple[Transfer, ...]:
        found = [self.transfers[name] for name in directions if name in self.transfers]
        if None in found:
            raise ScheduleError("a transfer belongs to no pass")
        return tuple(transfer for transfer in found if transfer is not None)


class OrderRecorder:
    """Records the operations of one rank in an iteration."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._done: list[Compute | _Communication | tuple[_Communication, str]] = []
        self._outputs = _ByTensor[Instruction]()
        self._gradients = _ByTensor[Instruction]()
        self._received = _ByTensor[tuple[_Communication, str]]()
        self._under_way: tuple[Instruction | None, Instruction | None] = None, None
        self._problem = ""

    def step(
        self,
        run: Callable[[], V],
        *,
        forward: Forward | None,
        backward: Backward | None,
        results: Callable[[V], tuple[Any, Any]],
    ) -> V:
        """Run and record a forward, a backward, or both as one step, which includes its own waits and sends.

        ``results`` returns the outputs and the gradients of inputs from the result of ``run``.
        """
        begins = None if forward is None else self._begin_forward(*forward)
        ends = None if backward is None else self._begin_backward(*backward)
        made = begins or ends
        if made is None:  # a backward that belongs to no forward
            return run()
        self._under_way = begins, ends
        first = len(self._done)
        result = run()
        self._under_way = None, None
        sends = (place for place, done in enumerate(self._done) if place >= first and isinstance(done, _Communication))
        kind = Kind.FORWARD_BACKWARD if begins and ends else made.kind
        self._done.insert(next(sends, len(self._done)), Compute(Instruction(made.stage, kind, made.micro_batch)))
        outputs, gradients = results(result)
        if begins:
            self._outputs.put(outputs, begins)
        if ends:
            self._gradients.put(gradients, ends)
        return result

    def _begin_forward(self, chunk: int, micro_batch: int, inputs: Any) -> Instruction:
        forward = Instruction(chunk * self._ranks + self._rank, Kind.FORWARD, micro_batch)
        self._use(inputs, Transfer("activation", forward.stage - 1, forward.stage, micro_batch))
        return forward

    def _begin_backward(self, outputs: Any, gradients: Any) -> Instruction | None:
        forward = self._outputs.get(outputs)
        if forward is None:
            self._problem = "a backward begins from a tensor that no forward has returned"
            return None
        backward = Instruction(forward.stage, Kind.BACKWARD, forward.micro_batch)
        self._use(gradients, Transfer("grad", backward.stage + 1, backward.stage, backward.micro_batch))
        return backward

    def communicate(self, run: Callable[[], Any], sends: dict[str, Any], receives: dict[str, bool], waits: bool) -> Any:
        """Run and record a communication with the neighbours.

        ``run`` returns the tensors received from the previous and the next rank, and the pending requests. The keys are
        ``send_next`` and ``send_prev``, ``recv_prev`` and ``recv_next``.
        """
        done = _Communication(waits)
        if sends["send_next"] is not None:
            made = self._outputs.get(sends["send_next"]) or self._under_way[0]
            done.transfers["send_next"] = None if made is None else _onward("activation", made, +1)
        if sends["send_prev"] is not None:
            made = self._gradients.get(sends["send_prev"]) or self._under_way[1]
            done.transfers["send_prev"] = None if made is None else _onward("grad", made, -1)
        done.transfers.update({name: None for name, wanted in receives.items() if wanted})
        if done.transfers:
            self._done.append(done)
        from_prev, from_next, requests = run()
        for name, tensor in (("recv_prev", from_prev), ("recv_next", from_next)):
            if name in done.transfers:
                self._received.put(tensor, (done, name))
        if isinstance(requests, dict):
            note = self._done.append
            requests = {name: _Request(request, partial(note, (done, name))) for name, request in requests.items()}
        return from_prev, from_next, requests

    def operations(self) -> tuple[Operation, ...]:
        """Return the operations of the iteration, with the tail at its end."""
        if self._problem:
            raise ScheduleError(self._problem)
        found: list[Operation] = []
        for done in self._done:
            if isinstance(done, Compute):
                found.append(done)
            elif isinstance(done, _Communication):
                kind = Exchange if done.waits else Launch
                found.append(kind(done.named("send_next", "send_prev"), done.named("recv_prev", "recv_next")))
            else:
                communication, name = done
                found.append(Wait(communication.named(name)))
        stages = [done.instruction.stage for done in found if isinstance(done, Compute)]
        return (*found, Compute(Instruction(min(stages, default=self._rank), Kind.TAIL, 0)))

    def _use(self, tensors: Any, transfer: Transfer) -> None:
        for communication, name in self._received.all(tensors):
            communication.transfers[name] = transfer


def _onward(payload: Payload, made: Instruction, by: int) -> Transfer:
    return Transfer(payload, made.stage, made.stage + by, made.micro_batch)


class _Request:
    """A pending transfer, for which the rank waits later."""

    def __init__(self, request: Any, note: Callable[[], None]) -> None:
        self._request = request
        self._note = note

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._request.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _ByTensor(Generic[V]):
    """Values by tensor, without keeping tensors alive."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], V]] = {}

    def put(self, tensors: Any, value: V) -> None:
        """Store a value for each of some tensors."""
        for tensor in _each(tensors):
            self._kept[id(tensor)] = weakref.ref(tensor), value

    def get(self, tensors: Any) -> V | None:
        """Return the value of the first tensor that has one. None if there is none."""
        return next(self.all(tensors), None)

    def all(self, tensors: Any) -> Iterator[V]:
        """Yield the value of each tensor that has one."""
        for tensor in _each(tensors):
            kept = self._kept.get(id(tensor))
            if kept is not None and kept[0]() is tensor:
                yield kept[1]


def _each(tensors: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(tensors):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for part in tensors:
            yield from _each(part)
