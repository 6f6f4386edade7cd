"""What goes wrong on one rank while GPUs are measured before training is raised on all ranks."""

import threading

import pytest
import torch
import torch.distributed as dist

from perseus_ds.client.meeting import measure_gpu
from perseus_ds.timebase import REAL_TIME

RANKS, PERIOD_S, POWER_W = 3, 0.002, 100.0


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
def measure(ranks, monkeypatch):
    """A function that measures on all ranks with a load, and returns what each rank has measured or raised."""
    barrier, brought = threading.Barrier(RANKS, timeout=30.0), {}

    def all_reduce(tensor, op=None):
        brought[dist.get_rank()] = tensor.clone()
        barrier.wait()
        largest = torch.stack([*brought.values()]).amax(0)
        barrier.wait()
        tensor.copy_(largest)

    def measure_on_rank(load, pipeline_ranks):
        rank = dist.get_rank()
        place = {"pipeline_rank": rank % pipeline_ranks, "pipeline_ranks": pipeline_ranks}
        return measure_gpu(Counter(), lambda seconds: load(rank), torch.device("cpu"), **place)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return lambda load, pipeline_ranks=RANKS: ranks(RANKS, lambda: measure_on_rank(load, pipeline_ranks))


def test_a_load_that_fails_on_one_rank_is_an_error_on_all(measure):
    def load(rank):
        if rank == 1:
            raise RuntimeError("CUDA out of memory")

    errors = [str(error) for error in measure(load)]
    assert len(set(errors)) == 1
    assert "rank 1 could not keep its GPU busy to measure it: RuntimeError('CUDA out of memory')" in errors[0]


@pytest.mark.parametrize("pipeline_ranks", [RANKS, 1])
def test_all_ranks_measure_the_power_while_they_wait(measure, pipeline_ranks):
    for measured in measure(lambda rank: None, pipeline_ranks):
        assert measured.blocking_power_w == pytest.approx(POWER_W)
        assert measured.period_s == pytest.approx(PERIOD_S)
