"""Ranks that have not come to a meeting are named, by the first rank that waits for them."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from perseus_ds.client.meeting import await_ranks
from perseus_ds.errors import ConfigError


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
        return await_ranks(store, "value", come.__contains__, "attach", now)

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
        assert wait(rank, come, after_s=9.0) == b"v"
    assert not caplog.messages
    for rank in sorted(come):
        assert wait(rank, come, after_s=15.0) == b"v"
    assert caplog.messages == [f"perseus: waiting for {named} to attach."]


def test_nobody_is_named_if_all_have_come(wait, caplog):
    wait(0, set(range(8)), after_s=15.0)
    assert not caplog.messages


def test_a_rank_that_never_comes_is_an_error_after_the_timeout_of_the_store(wait):
    with pytest.raises(ConfigError, match=r"rank 3 did not attach within the timeout of the process group"):
        wait(0, {0, 1, 2, 4, 5, 6, 7}, after_s=120.0)
