"""A process group for engines of one rank."""

import pytest
import torch.distributed as dist

from perseus_ds.engines.engine import sessions


@pytest.fixture
def process_group():
    """A process group of this process only, in which Perseus is not attached."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    left = sessions()
    for session in left:
        session.close()
    dist.destroy_process_group()
    assert not left, "the test has not detached Perseus"
