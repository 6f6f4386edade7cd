"""What goes wrong on one rank while GPUs are measured before training is raised on all ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from perseus_ds.client import meeting
from perseus_ds.client.meeting import measure_gpu
from perseus_ds.errors import PerseusError
from perseus_ds.timebase import REAL_TIME

RANKS, PERIOD_S, POWER_W = 3, 0.002, 100.0


class Together:
    """``torch.distributed`` for ranks on threads."""

    ReduceOp = dist.ReduceOp

    def __init__(self):
        self._rank = threading.local()
        self._barrier = threading.Barrier(RANKS, timeout=30.0)
        self._brought = {}
        store = dist.HashStore()
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)

    def use(self, rank):
        self._rank.number = rank

    def get_rank(self):
        return self._rank.number

    def all_reduce(self, tensor, op=None):
        self._brought[self.get_rank()] = tensor.clone()
        self._barrier.wait()
        largest = torch.stack([*self._brought.values()]).amax(0)
        self._barrier.wait()
        tensor.copy_(largest)


class Counter:
    """The clocks of a rank, as far as they read an energy counter."""

    def log_counter(self, is_on):
        self._since_s = REAL_TIME.now_s()

    def refreshes(self):
        count = int((REAL_TIME.now_s() - self._since_s) / PERIOD_S)
        begin_s, self._since_s = self._since_s, self._since_s + count * PERIOD_S
        times_s = [begin_s + (number + 1) * PERIOD_S for number in range(count)]
        return [(time_s, POWER_W * time_s) for time_s in times_s]


@pytest.fixture
def measure(monkeypatch):
    """A function that measures on all ranks with a load, and returns what each rank has measured or raised."""
    together = Together()
    monkeypatch.setattr(meeting, "dist", together)

    def measure_on(load, rank):
        together.use(rank)
        place = {"pipeline_rank": rank, "pipeline_ranks": RANKS}
        try:
            return measure_gpu(Counter(), lambda seconds: load(rank), torch.device("cpu"), **place)
        except PerseusError as error:
            return str(error)

    def measure(load):
        with ThreadPoolExecutor(RANKS) as ranks:
            return list(ranks.map(lambda rank: measure_on(load, rank), range(RANKS)))

    return measure


def test_a_load_that_fails_on_one_rank_is_an_error_on_all(measure):
    def load(rank):
        if rank == 1:
            raise RuntimeError("CUDA out of memory")

    errors = measure(load)
    assert len(set(errors)) == 1
    assert "rank 1 could not keep its GPU busy to measure it: RuntimeError('CUDA out of memory')" in errors[0]


def test_all_ranks_measure_the_power_while_they_wait(measure):
    for measured in measure(lambda rank: None):
        assert measured.blocking_power_w == pytest.approx(POWER_W)
        assert measured.period_s == pytest.approx(PERIOD_S)
