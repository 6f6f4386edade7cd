"""Collectives by rank 0's key-value store, and the effects of a broken connection.

Ranks are threads of this process, each with a client of a real store.
"""

import datetime
import os
import pickle
import socket
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scale
import torch.distributed as dist
from forked import free_port
from job_parts import Connected
from run_log import wait_until
from virtual.time import VirtualTime

from perseus_ds import ranks
from perseus_ds.errors import ConnectionLostError, PerseusError
from perseus_ds.ranks import Communicator, Connection, PipelineTopology, StoreChannel

SIZE = 4
PIPELINES = ((2, 0), (1, 3))


class Job:
    """Ranks of a job of two pipelines, each a thread."""

    def __init__(self):
        self.address = "127.0.0.1", free_port()
        server = dist.TCPStore(*self.address, is_master=True, wait_for_workers=False)
        self.connections = [Connection(rank, SIZE, self.address) for rank in range(SIZE)]
        self.connections[0].serve(server)
        self._pool = ThreadPoolExecutor(SIZE)
        # One after the other, so that it is known which socket is whose.
        self.sockets, channels = [], []
        for connection in self.connections:
            self.sockets.append(Connected())
            channels.append(StoreChannel(connection))
            self.sockets[-1].stop()
        self.ranks = self.all(lambda rank: Communicator(place_of(rank), channels[rank]))

    def all(self, function):
        """Call a function on all ranks in parallel, and return the results."""
        return list(self._pool.map(function, range(SIZE)))

    def drop(self, rank):
        """Have a rank need its communicator no more."""
        self.ranks[rank] = self.connections[rank] = None

    def errors(self, use):
        """Use all communicators until they raise errors, and return these."""

        def until_error(rank):
            with pytest.raises(ConnectionLostError) as raised:
                use_until_error(self.ranks[rank])
            return str(raised.value)

        def use_until_error(communicator):
            while True:
                use(communicator)

        return self.all(until_error)


def place_of(rank):
    number = next(number for number, pipeline in enumerate(PIPELINES) if rank in pipeline)
    return PipelineTopology(rank, PIPELINES[number], number, len(PIPELINES))


@pytest.fixture
def job():
    return Job()


def is_open(address):
    with socket.socket() as connection:
        return connection.connect_ex(address) == 0


def exchange(communicator):
    return communicator.start_exchange([float(communicator.rank), 1.0], lambda numbers: numbers.sum(axis=0)).result()


def test_rank_0_answers_the_numbers_of_all_ranks(job):
    for _ in range(3):
        assert np.array(job.all(lambda rank: exchange(job.ranks[rank]))).tolist() == [[6.0, 4.0]] * SIZE


def test_collectives_give_each_rank_what_their_names_say(job):
    def use(rank):
        communicator = job.ranks[rank]
        assert communicator.gather(rank if rank else None) == ([None, 1, 2, 3] if rank == 0 else [])
        assert communicator.computed_on_rank_0(lambda: {"rank": rank}) == {"rank": 0}
        assert communicator.first_not_none(rank if rank > 1 else None) == 2
        assert communicator.first_not_none(None) is None
        assert (communicator.all_max(rank), communicator.all_sum(rank)) == (3, 6)
        assert communicator.pipeline_gather(rank) == list(communicator.topology.pipeline)
        communicator.barrier()
        return communicator.pipeline_of_rank.tolist()

    assert job.all(use) == [[0, 1, 0, 1], [], [], []]


class Unpickled:
    """Notes that it was unpickled."""

    times = 0

    def __reduce__(self):
        return note_unpickled, ()


def note_unpickled():
    Unpickled.times += 1


def test_what_others_write_into_the_store_is_not_unpickled(job):
    stranger = dist.TCPStore(*job.address, is_master=False, wait_for_workers=False)
    for number in range(100):
        stranger.set(f"perseus/0-{SIZE - 1}/{number}/answer", bytes(32) + zlib.compress(pickle.dumps(Unpickled())))
    assert any("signed" in error for error in job.errors(Communicator.barrier))
    assert Unpickled.times == 0


@pytest.mark.parametrize(
    ("error", "of_rank_0"),
    [(PerseusError("five"), PerseusError), (ZeroDivisionError("five"), PerseusError), (OSError(28, "five"), OSError)],
    ids=["an error of ours", "another one", "a full disk"],
)
def test_what_fails_on_one_rank_is_raised_on_all_and_a_full_disk_of_rank_0_stays_one(job, error, of_rank_0):
    def fail():
        raise error

    def use(rank):
        with pytest.raises(PerseusError, match="five"):
            job.ranks[rank].raise_on_all_ranks(fail if rank == 2 else bool)
        with pytest.raises(of_rank_0, match="five"):
            job.ranks[rank].computed_on_rank_0(fail)
        job.ranks[rank].raise_on_all_ranks(bool)

    job.all(use)


def test_an_answer_that_cannot_be_made_keeps_no_rank_waiting(job, caplog):
    def use(rank):
        return job.ranks[rank].start_exchange([1.0], lambda numbers: 1 / 0).result(), job.ranks[rank].all_sum(1)

    assert job.all(use) == [(None, SIZE)] * SIZE
    assert caplog.text.count("ZeroDivisionError") == 1


def test_events_go_to_rank_0_with_the_numbers(job):
    job.ranks[1].send_event(b"event of 1\n")
    job.ranks[3].send_event(b"first of 3")
    job.ranks[3].send_event(b"second of 3")
    job.all(lambda rank: exchange(job.ranks[rank]))
    found = job.ranks[0].received_events()
    assert [line for _, line in found] == [b"event of 1", b"first of 3", b"second of 3"]
    assert all(0 <= age_s < 60 for age_s, _ in found)
    job.all(lambda rank: exchange(job.ranks[rank]))
    assert job.ranks[0].received_events() == []


def test_training_goes_on_while_an_exchange_is_under_way_and_other_channels_do_not_wait_for_it(job):
    def use(rank):
        pending = job.ranks[rank].start_exchange([1.0], lambda numbers: numbers.sum()) if rank else None
        channel = job.ranks[rank].open_channel()
        assert channel.exchange([1.0], None, lambda numbers, _: float(numbers.sum())).result() == SIZE
        if pending is None:  # the last one
            pending = job.ranks[rank].start_exchange([1.0], lambda numbers: numbers.sum())
        else:
            meeting.wait()
        return pending

    meeting = threading.Barrier(SIZE - 1)
    assert [pending.result() for pending in job.all(use)] == [SIZE] * SIZE


def test_the_store_keeps_nothing_of_exchanges_that_are_over(job):
    store = dist.TCPStore(*job.address, is_master=False)
    job.all(lambda rank: exchange(job.ranks[rank]))
    before = store.num_keys()
    for _ in range(10):
        job.all(lambda rank: (exchange(job.ranks[rank]), job.ranks[rank].gather("text")))
    assert store.num_keys() <= before + 1


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("use", [exchange, Communicator.barrier, lambda rank: rank.pipeline_gather(1)])
def test_all_ranks_leave_when_one_loses_its_connection(job, use, broken):
    job.sockets[broken].cut()
    errors = job.errors(use)
    assert all(error.startswith("a connection between ranks is lost (") for error in errors), errors


def test_a_rank_breaks_its_connections_with_the_store_and_no_others_with_the_same_port():
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.2", port)) as connection:
            Connection(1, SIZE, ("127.0.0.1", port)).cut()
            connection.send(b"1")
            Connection(1, SIZE, ("127.0.0.2", port)).cut()
            with pytest.raises(BrokenPipeError):
                connection.send(b"1")


def test_a_rank_that_waits_too_long_ends_the_exchanges_of_all(job):
    """As if a cable were pulled: nothing arrives, and no connection is closed."""
    for connection in job.connections:
        connection.longest_wait_s = 0.2

    def wait(rank):
        if rank == 3:
            return "is late"
        with pytest.raises(ConnectionLostError, match="is lost"):
            job.ranks[rank].barrier()
        return "has left"

    assert job.all(wait) == ["has left"] * 3 + ["is late"]
    with pytest.raises(ConnectionLostError):
        job.ranks[3].barrier()


def test_the_times_of_ranks_are_compared_with_the_first_of_their_pipeline(job):
    begun_s = (5.0, 100.0, 3.0, 1.0)
    ahead_s = job.all(lambda rank: job.ranks[rank].ahead_s(VirtualTime(begun_s[rank])))
    assert ahead_s == [2.0, 0.0, 0.0, -99.0]


def test_rank_0_serves_the_others_until_they_need_it_no_more(job):
    job.all(lambda rank: exchange(job.ranks[rank]))
    job.drop(0)
    assert job.all(lambda rank: job.ranks[rank].pipeline_gather(rank) if rank in PIPELINES[1] else None)[3] == [1, 3]
    assert is_open(job.address)
    for rank in (1, 2, 3):
        job.drop(rank)
    wait_until(lambda: not is_open(job.address), "the end of the store")


# Each rank ends as a Python process does; they are forked from one that has imported torch.
ENDING = """
import os, sys, time
import torch.distributed as dist
from perseus_ds.ranks import Communicator, PipelineTopology

class LongEnd:
    def __del__(self):
        time.sleep(2.0)

def train(end, rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    communicator = Communicator(PipelineTopology(rank, (1, 2) if rank else (0,)))
    communicator.barrier()
    if end == "an exchange is under way" and rank == 0:
        time.sleep(1.0)
    elif end == "an exchange is under way":  # an answer for which rank 0 does nothing, and which comes while it ends
        communicator.start_exchange([1.0], sum)
        sys.long_end = communicator, LongEnd()
    elif rank == 0:
        os.write(ends, b"12")
    else:
        os.read(end_of_0, 1)
        assert communicator.pipeline_gather(rank) == [1, 2]

children = []
end_of_0, ends = os.pipe()
for end, address in zip(("an exchange is under way", "rank 0 ends first"), sys.argv[1:]):
    for rank in range(3):
        if not (child := os.fork()):
            train(end, rank, address)
            sys.exit()
        children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(f"{codes}" if any(codes) else 0)
"""


def test_processes_end_without_an_error_while_an_exchange_is_under_way_and_after_rank_0():
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    done = subprocess.run([sys.executable, "-c", ENDING, *addresses], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("job_s", "longest_s"), [(20, 10), (600, 300), (1800, 900), (36000, 1800)])
def test_ranks_wait_half_as_long_as_collectives_of_the_job_may_take_and_half_an_hour_at_most(job_s, longest_s):
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=job_s)
    )
    try:
        assert Connection.of_job().longest_wait_s == longest_s
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "10.0.0.7"])
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_an_address_that_means_another_node_elsewhere_is_not_imposed_on_other_nodes(monkeypatch, host, node):
    """Launchers may set MASTER_ADDR to localhost on rank 0's node, and to its address on others."""

    def broadcast(served):
        served[0] = ((host, 4242), b"secret", "node0")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(ranks, "_timeout_s", lambda: 60.0)
    monkeypatch.setattr(socket, "gethostname", lambda: node)
    expected = "node0" if node == "node1" and host != "10.0.0.7" else host
    assert Connection.of_job().address == (expected, 4242)


def test_a_rank_that_cannot_reach_rank_0_says_what_to_set(monkeypatch):
    monkeypatch.setattr(ranks, "_store", lambda *_: (_ for _ in ()).throw(RuntimeError("timed out\nmore")))
    with pytest.raises(PerseusError, match=r"rank 5 .* rank 0 at node0:4242: timed out\. Set MASTER_ADDR, on every"):
        StoreChannel(Connection(5, 8, ("node0", 4242)))


ALONE = """
import resource
import torch.distributed as dist
from perseus_ds.ranks import Communicator, PipelineTopology

resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
communicator = Communicator(lambda alone: PipelineTopology(alone.rank, (0,)))
print(communicator.gather("text"), resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200)
"""


def test_a_job_is_connected_whatever_has_begun_its_process_groups():
    """Each rank is a file of rank 0, so that its process may have more of them open."""
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['text'] True\n"


@pytest.mark.extended
def test_the_benchmark_of_scale_runs_the_real_code_and_a_leaf_does_the_same_however_many_ranks_there_are():
    small, large = (scale.rank_0_and_a_leaf(ranks, until_run=scale.UNTIL_RUN, measured=4) for ranks in (64, 192))
    for name in ("leaf: numbers sent [bytes]", "set-up: collectives that wait for all ranks"):
        assert small[name] == large[name]
    for name in ("run.jsonl [bytes an iteration]", "control status [bytes]"):
        assert large[name] <= 3.3 * small[name]
