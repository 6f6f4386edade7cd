"""The order of an iteration is read from the tensors that passes and transfers exchange."""

from collections import Counter

import torch

from perseus_ds.engines.megatron.order import OrderRecorder
from perseus_ds.pipeline.dependencies import check_dependencies
from perseus_ds.pipeline.schedule import Exchange, Schedule, Transfer


class Rank:
    """A rank that transfers several tensors one after the other, as Megatron does with a list of shapes."""

    def __init__(self, rank, ranks, tensors):
        self.recorder = OrderRecorder(rank, ranks)
        self._tensors = tensors

    def pass_of(self, **passes):
        """Run a pass that returns new tensors, and return them."""
        made = self._new()
        is_forward = passes["forward"] is not None
        self.recorder.step(lambda: made, results=lambda found: (found, None) if is_forward else (None, found), **passes)
        return made

    def receive(self, name):
        received = self._new()
        for tensor in received:
            self._communicate(receives=name, received=tensor)
        return received

    def send(self, name, tensors):
        for tensor in tensors:
            self._communicate(sends=name, sent=tensor)

    def _new(self):
        return [torch.zeros(2) for _ in range(self._tensors)]

    def _communicate(self, sends="", sent=None, receives="", received=None):
        result = tuple(received if receives == name else None for name in ("recv_prev", "recv_next"))
        self.recorder.communicate(
            lambda: (*result, None),
            {name: sent if name == sends else None for name in ("send_next", "send_prev")},
            {name: name == receives for name in ("recv_prev", "recv_next")},
            True,
        )


def test_each_tensor_between_two_stages_is_a_transfer_of_its_pass():
    student_and_teacher = 2
    first, last = (Rank(rank, 2, student_and_teacher) for rank in range(2))
    outputs = first.pass_of(forward=(0, 0, [None, None]), backward=None)
    first.send("send_next", outputs)
    first.pass_of(forward=None, backward=(outputs, first.receive("recv_next")))
    outputs = last.pass_of(forward=(0, 0, last.receive("recv_prev")), backward=None)
    last.send("send_prev", last.pass_of(forward=None, backward=(outputs, [None, None])))
    schedule = Schedule("megatron", 1, (first.recorder.operations(), last.recorder.operations()))
    exchanges = [operation for stream in schedule.ranks for operation in stream if isinstance(operation, Exchange)]
    transfers = Counter(transfer for exchange in exchanges for transfer in exchange.transfers)
    sides = 2 * student_and_teacher
    assert transfers == {Transfer("activation", 0, 1, 0): sides, Transfer("grad", 1, 0, 0): sides}
    check_dependencies(schedule)
