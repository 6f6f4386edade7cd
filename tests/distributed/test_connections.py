"""Which ranks are connected, over which network interface, and what is said where that fails."""

import os
from collections import Counter
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from perseus_ds.distributed import Communicator, PipelineTopology, Widths, groups
from perseus_ds.distributed.groups import GlooGroup, gloo_interface
from perseus_ds.distributed.tree import GROUP_SIZE, groups_of
from perseus_ds.errors import PerseusError

RANKS = 8


class Job:
    """Eight ranks of which this process is one: two pipelines of two stages, two ranks of tensor parallelism each."""

    PIPELINES = ((0, 4), (1, 5), (2, 6), (3, 7))

    def __init__(self, monkeypatch, rank):
        self.rank = rank
        self.made = []
        self.waits = []
        self.store = dist.HashStore()
        for name in ("get_world_size", "get_rank", "get_backend", "barrier", "ProcessGroupGloo"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(GlooGroup, "gather", lambda *_: [])
        monkeypatch.setattr(GlooGroup, "broadcast", lambda *_: np.array([0, 0, 0, 0, 1, 1, 1, 1]))

    def get_world_size(self):
        return RANKS

    def get_rank(self):
        return self.rank

    def get_backend(self):
        return "gloo"

    def barrier(self, device_ids=None):
        self.made.append("all are there")

    def ProcessGroupGloo(self, store, place, size, timeout):  # noqa: N802  # as torch calls it
        self.made.append((place, size, timeout, os.environ.get("GLOO_SOCKET_IFNAME")))
        return self

    def gather(self, *arguments):
        self.waits.append(arguments[-1].timeout)
        return self

    scatter = broadcast = gather

    def is_completed(self):
        return True

    def wait(self):
        pass

    def communicator(self):
        (pipeline,) = (p for p in self.PIPELINES if self.rank in p)
        return Communicator(PipelineTopology(self.rank, pipeline))


def test_a_rank_is_connected_with_its_group_and_its_pipeline_and_with_its_stage_when_that_is_needed(monkeypatch):
    job = Job(monkeypatch, rank=6)
    communicator = job.communicator()
    arrived, everyone, pipeline = job.made
    assert arrived == "all are there"
    assert [group[:2] for group in (everyone, pipeline)] == [(6, 8), (1, 2)]
    monkeypatch.setattr(GlooGroup, "broadcast", lambda group, value: value)
    communicator.stage_max(1.0)
    assert job.made[3][:2] == (2, 4)


def test_collectives_begin_when_the_exchange_before_them_is_over(monkeypatch):
    """They share groups, in which messages are told apart by their order."""
    job = Job(monkeypatch, rank=1)
    communicator = job.communicator()
    order = []
    monkeypatch.setattr(Job, "wait", lambda job: order.append("exchange is over"))
    monkeypatch.setattr(GlooGroup, "barrier", lambda group: order.append("barrier"))
    communicator.start_exchange([1.0], np.array, Widths(1))
    assert order == []
    communicator.barrier()
    assert order == ["exchange is over", "barrier"]


@pytest.mark.parametrize("size", [1, 2, GROUP_SIZE, GROUP_SIZE + 1, 5 * GROUP_SIZE**2 + 3])
def test_groups_are_small_and_all_ranks_reach_rank_0(size):
    groups_by_rank = {rank: [tuple(places) for places, _ in groups_of(rank, size)] for rank in range(size)}
    for rank, theirs in groups_by_rank.items():
        assert all(rank in group and len(group) <= GROUP_SIZE for group in theirs)
        assert all(group in groups_by_rank[member] for group in theirs for member in group), "its members know of it"
        assert [group for group in theirs if group[0] != rank] == theirs[-1:] or rank == 0, "first in all but the last"
    members = Counter(len(theirs) for theirs in groups_by_rank.values())
    assert size == 1 or members[1] >= size * (GROUP_SIZE - 1) // GROUP_SIZE, "most ranks are in one group"


def test_groups_of_two_communicators_have_different_names(monkeypatch):
    job = Job(monkeypatch, rank=0)
    for _ in range(RANKS - 1):  # the other ranks
        job.store.add("perseus", 1)
    first = job.communicator()
    for _ in range(RANKS - 1):
        job.store.add("perseus", 1)
    assert (first._name, job.communicator()._name) == ("0", "1")


def test_setting_up_fails_soon_and_training_may_pause_for_days(monkeypatch):
    job = Job(monkeypatch, rank=1)
    communicator = job.communicator()
    assert {timeout for _, _, timeout, _ in job.made[1:]} == {timedelta(minutes=3)}
    communicator.start_exchange([1.0], np.array, Widths(1))
    communicator._pipeline._broadcast(None)
    assert job.waits == [timedelta(days=7)] * 3


def test_ranks_that_cannot_be_connected_are_told_what_to_set(monkeypatch):
    job = Job(monkeypatch, rank=0)

    def refuse(*_):
        raise RuntimeError("connect [10.0.0.7]:4242: timed out\nmore")

    monkeypatch.setattr(dist, "ProcessGroupGloo", refuse)
    with pytest.raises(PerseusError, match=r"rank 0 .*timed out\. Set GLOO_SOCKET_IFNAME, on every node"):
        job.communicator()


@pytest.mark.parametrize(
    ("nccl", "gloo", "used"), [("ib", None, "ib0"), ("ib", "eth0", "eth0"), (None, None, None), ("none", None, None)]
)
def test_gloo_uses_nccls_interface_unless_it_was_given_one(monkeypatch, nccl, gloo, used):
    for name, value in (("NCCL_SOCKET_IFNAME", nccl), ("GLOO_SOCKET_IFNAME", gloo)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(groups, "_interfaces", lambda: ["eth0", "ib0", "lo"])
    job = Job(monkeypatch, rank=0)
    job.communicator()
    assert {interface for *_, interface in job.made[1:]} == {used}
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", "eth0"),
        ("eth1,ib", "eth1"),
        ("=eth1", "eth1"),
        ("=eth", None),
        ("^docker,eth0", "eth1"),
        ("^=docker", "docker0"),
        ("eth1:4000", "eth1"),
        ("wlan", None),
    ],
)
def test_an_interface_is_chosen_as_nccl_reads_its_variable(value, chosen):
    assert gloo_interface(value, ["docker0", "eth0", "eth1", "lo"]) == chosen


def test_interfaces_of_this_host_have_an_address():
    assert "lo" in groups._interfaces()


def test_the_addresses_of_a_group_are_asked_for_at_once():
    asked = []

    class Asked:
        def wait(self, keys, timeout):
            asked.append(("wait", keys))

        def multi_get(self, keys):
            asked.append(("multi_get", keys))
            return [key.encode() for key in keys]

    addresses = groups._Addresses(Asked(), 3)
    for key in ("0/0", "0/1", "0/2"):
        addresses.wait([key], timedelta(minutes=3))
        assert addresses.get(key) == key.encode()
    assert asked == [("wait", ["0/0", "0/1", "0/2"]), ("multi_get", ["0/0", "0/1", "0/2"])]
