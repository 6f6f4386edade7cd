"""Which ranks are connected, over which network interface, and what is said where that fails."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from perseus_ds import distributed
from perseus_ds.distributed import Communicator, PipelineTopology, gloo_interface
from perseus_ds.errors import PerseusError

RANKS = 8


class Job:
    """Eight ranks of which this process is one: two pipelines of two stages, two ranks of tensor parallelism each."""

    PIPELINES = ((0, 4), (1, 5), (2, 6), (3, 7))

    def __init__(self, monkeypatch, rank):
        self.rank = rank
        self.made = []
        self.waits = []
        for name in ("get_world_size", "get_rank", "get_backend", "barrier", "new_group", "all_gather_object"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: self.waits.append(timeout))

    def get_world_size(self):
        return RANKS

    def get_rank(self):
        return self.rank

    def get_backend(self):
        return "gloo"

    def barrier(self, device_ids=None):
        self.made.append("all are there")

    def new_group(self, ranks=None, **settings):
        self.made.append((ranks, settings, os.environ.get("GLOO_SOCKET_IFNAME")))
        return object()

    def all_gather_object(self, values, value, group):
        pipelines = {rank: pipeline for pipeline in self.PIPELINES for rank in pipeline}
        values[:] = [pipelines[rank].index(rank) for rank in range(RANKS)]

    def communicator(self):
        (pipeline,) = (p for p in self.PIPELINES if self.rank in p)
        return Communicator(PipelineTopology(self.rank, pipeline))


def test_all_ranks_of_a_stage_agree_in_whichever_pipeline_and_nobody_else_makes_their_group(monkeypatch):
    job = Job(monkeypatch, rank=6)
    job.communicator()
    arrived, (everyone, settings, _), (pipeline, alone, _), (stage, alone_too, _) = job.made
    assert arrived == "all are there"
    assert everyone is None
    assert "use_local_synchronization" not in settings
    assert pipeline == [2, 6]
    assert stage == [4, 5, 6, 7]
    assert alone["use_local_synchronization"] is alone_too["use_local_synchronization"] is True


def test_setting_up_fails_soon_and_training_may_pause_for_days(monkeypatch):
    job = Job(monkeypatch, rank=0)
    job.communicator()
    assert {settings["timeout"] for _, settings, _ in job.made[1:]} == {timedelta(minutes=3)}
    assert job.waits == [timedelta(days=7)] * 3


def test_ranks_that_cannot_be_connected_are_told_what_to_set(monkeypatch):
    job = Job(monkeypatch, rank=0)

    def refuse(*_, **__):
        raise RuntimeError("connect [10.0.0.7]:4242: timed out\nmore")

    monkeypatch.setattr(dist, "new_group", refuse)
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
    monkeypatch.setattr(distributed, "_interfaces", lambda: ["eth0", "ib0", "lo"])
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
    assert "lo" in distributed._interfaces()
