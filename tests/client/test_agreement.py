"""Ranks agree, or all raise the same error. Those that are missing are named by the first rank that waits for them."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from perseus_ds.client.agreement import agree, await_ranks, withdraw
from perseus_ds.errors import ConfigError, GpuPermissionError, PerseusError


@pytest.fixture
def agreed(ranks):
    """A function that returns the answer or error of each of three ranks, whose parts are returned by a function."""

    def agreed(part, decide=b"+".join):
        return ranks(3, lambda: agree("a topic", "come", lambda: part(dist.get_rank()), decide))

    return agreed


def test_all_ranks_have_the_answer_of_rank_0_each_time(agreed):
    assert agreed(lambda rank: b"%d" % rank) == [b"0+1+2"] * 3
    assert agreed(lambda rank: b"%d" % (5 + rank)) == [b"5+6+7"] * 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GpuPermissionError("no right: ask"), GpuPermissionError("no right: ask")),
        (KeyError("a mistake"), PerseusError("rank 1: KeyError('a mistake')")),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(agreed, error, expected):
    def part(rank):
        if rank == 1:
            raise error
        return b""

    found = agreed(part, decide=lambda parts: pytest.fail("there is nothing to decide"))
    assert [(type(each), str(each)) for each in found] == [(type(expected), str(expected))] * 3


def test_an_error_of_the_decision_is_raised_on_all(agreed):
    def decide(parts):
        raise ConfigError("they differ")

    assert [(type(each), str(each)) for each in agreed(lambda rank: b"", decide)] == [(ConfigError, "they differ")] * 3


class StoreOfRank0:
    """A store that ends when rank 0 leaves. The answer reaches other ranks 0.1 s late, or when rank 0 has left."""

    def __init__(self, store):
        self.store, self.has_left = store, threading.Event()

    def check(self, keys):
        if dist.get_rank() != 0 and keys[0].endswith("answer"):
            self.has_left.wait(0.1)
            assert not self.has_left.is_set(), "connection reset by peer"
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_the_rank_that_holds_the_store_leaves_when_all_have_read_the_answer(ranks, monkeypatch):
    store = StoreOfRank0(dist.HashStore())
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def act():
        try:
            return agree("a topic", "come", lambda: b"x", b"+".join)
        finally:
            if dist.get_rank() == 0:
                store.has_left.set()

    assert ranks(3, act) == [b"x+x+x"] * 3


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_withdraws_is_an_error_of_the_others_and_does_not_wait(ranks, missing):
    def act():
        if dist.get_rank() == missing:
            return withdraw("a topic", ConfigError(f"rank {missing} trains without"))
        return agree("a topic", "come", bytes, b"".join)

    found = ranks(3, act)
    assert found.pop(missing) is None
    assert [(type(each), str(each)) for each in found] == [(ConfigError, f"rank {missing} trains without")] * 2


@pytest.fixture
def wait(monkeypatch, now):
    """A function that waits as one of eight ranks. The value is there after some seconds."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)

    def wait(rank, come, after_s):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=100))

        def set_value():
            now.sleep(after_s)
            store.set("value", "v")

        now.thread(set_value, "the last rank").start()
        return await_ranks(store, ["value"], come.__contains__, "attach", now)

    return wait


@pytest.mark.parametrize(
    ("come", "named"),
    [
        ({0, 2, 3, 4, 5, 6, 7}, "rank 1"),
        ({0, 1, 2, 3, 4, 5}, "ranks 6, 7"),
        ({0, 6}, "ranks 1, 2, 3, 4 and 2 others"),
        ({2, 3, 4, 5, 6, 7}, "ranks 0, 1"),
    ],
)
def test_the_first_rank_that_waits_names_the_others_after_10_s(wait, caplog, come, named):
    for rank in sorted(come):
        assert wait(rank, come, after_s=9.0) == [b"v"]
    assert not caplog.messages
    for rank in sorted(come):
        assert wait(rank, come, after_s=15.0) == [b"v"]
    assert caplog.messages == [f"perseus: waiting for {named} to attach."]


def test_nobody_is_named_if_all_have_come(wait, caplog):
    wait(0, set(range(8)), after_s=15.0)
    assert not caplog.messages


def test_a_rank_that_never_comes_is_an_error_after_the_timeout_of_the_store(wait):
    with pytest.raises(ConfigError, match=r"rank 3 did not attach within the timeout of the process group"):
        wait(0, {0, 1, 2, 4, 5, 6, 7}, after_s=120.0)
