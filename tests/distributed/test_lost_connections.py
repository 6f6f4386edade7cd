"""Ranks of which two lose their connection: none of them waits for the others any more, and all say why.

The ranks are threads of this process, connected by gloo.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist
from cut_connections import Connected

from perseus_ds.distributed import Communicator, PipelineTopology, Widths, connections
from perseus_ds.distributed.tree import GROUP_SIZE
from perseus_ds.errors import ConnectionLostError

TWO_LEVELS = GROUP_SIZE + 3


class Ranks:
    """Ranks of a job, each a thread."""

    def __init__(self, monkeypatch, size):
        self._here = threading.local()
        self._meeting = threading.Barrier(size)
        self._pool = ThreadPoolExecutor(size)
        self.size = size
        self.store = dist.HashStore()
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(dist, "get_rank", lambda: self._here.rank)
        monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
        monkeypatch.setattr(dist, "barrier", lambda device_ids=None: self._meeting.wait())
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(connections, "_SLICE_S", 0.01)
        monkeypatch.setattr(connections, "_LOOK_AFTER_S", 0.05)
        monkeypatch.setattr(connections, "_LOOK_EVERY_S", 0.1)
        self.connected = Connected()
        self.communicators = self.all(lambda rank: Communicator(PipelineTopology(rank, (rank,))))

    def all(self, function):
        """Call a function on all ranks at once, and return what each returns."""

        def here(rank):
            self._here.rank = rank
            return function(rank)

        return list(self._pool.map(here, range(self.size)))

    def errors(self, use):
        """Use all communicators until that raises an error; return the error of each rank."""

        def until_error(rank):
            with pytest.raises(ConnectionLostError) as raised:
                use_until_error(self.communicators[rank])
            return str(raised.value)

        def use_until_error(communicator):
            while True:
                use(communicator)

        return self.all(until_error)


def exchange(communicator):
    communicator.start_exchange([1.0], lambda numbers: (numbers.sum(axis=0), numbers), Widths(1, 1)).result()


@pytest.mark.parametrize("use", [exchange, Communicator.barrier, lambda ranks: ranks.agree(1, sum)])
@pytest.mark.parametrize("size", [2, TWO_LEVELS])
def test_all_ranks_leave_and_say_which_rank_lost_what(monkeypatch, use, size):
    ranks = Ranks(monkeypatch, size)
    assert ranks.all(lambda rank: ranks.communicators[rank].all_sum(1)) == [size] * size
    ranks.connected.cut()
    errors = ranks.errors(use)
    assert all(error.startswith("a connection between ranks is lost (rank ") for error in errors), errors


def test_a_rank_that_hears_nothing_is_told_by_the_jobs_store(monkeypatch):
    ranks = Ranks(monkeypatch, 3)
    first, second, third = ranks.communicators
    exchanges = ranks.all(lambda rank: rank and ranks.communicators[rank].start_exchange([1.0], np.array, Widths(1)))
    assert not second._connections._cause
    told = third._connections.lose("cable pulled\nmore")  # rank 0 never begins the exchange, and no socket is closed

    def wait(rank):
        with pytest.raises(ConnectionLostError) as raised:
            exchanges[rank].result() if rank else first.barrier()
        return str(raised.value)

    drawn = random.getstate()
    assert ranks.all(wait) == [str(told)] * 3
    assert random.getstate() == drawn, "training draws the same numbers however long ranks wait"
    assert str(told) == "a connection between ranks is lost (rank 2: cable pulled)"


def test_ranks_wait_no_longer_than_half_as_long_as_the_job_allows(monkeypatch):
    monkeypatch.setattr(connections, "_timeout_s", lambda: 0.4)
    ranks = Ranks(monkeypatch, 2)

    def wait(rank):
        if rank == 0:
            return "is late"
        with pytest.raises(ConnectionLostError, match=r"rank 1: nothing has arrived for 0 s"):
            ranks.communicators[rank].barrier()
        return "has left"

    assert ranks.all(wait) == ["is late", "has left"]


def test_a_store_that_does_not_answer_counts_as_a_lost_connection(monkeypatch):
    ranks = Ranks(monkeypatch, 2)

    class Store:
        def check(self, *_):
            raise dist.DistStoreError("broken pipe")

        set = check

    monkeypatch.setattr(ranks.communicators[1]._connections, "_store", Store())

    def wait(rank):
        if rank == 1:
            with pytest.raises(ConnectionLostError, match="rank 1: the job's store does not answer: broken pipe"):
                ranks.communicators[1].barrier()

    ranks.all(wait)
