"""The host at which agents of other nodes reach the server."""

import pytest
import torch.distributed as dist

from perseus_ds.client.meeting import host_of


@pytest.mark.parametrize(("variable", "host"), [("node-1", "node-1"), (None, "localhost")])
def test_without_its_variable_the_host_is_that_of_the_jobs_store(monkeypatch, variable, host):
    """A job with ``init_method="tcp://host:port"`` needs no MASTER_ADDR."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if variable is not None:
        monkeypatch.setenv("MASTER_ADDR", variable)
    store = dist.PrefixStore("default_pg", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    assert host_of(dist.PrefixStore("again", store)) == host


def test_a_store_without_a_host_belongs_to_a_job_on_one_node(monkeypatch, tmp_path):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert host_of(dist.PrefixStore("default_pg", dist.FileStore(str(tmp_path / "store"), 1))) == "127.0.0.1"
