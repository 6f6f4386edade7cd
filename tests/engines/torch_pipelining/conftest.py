"""Schedules of one rank."""

import pytest
import torch


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A process group of this process only."""
    store = tmp_path_factory.mktemp("rank") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
