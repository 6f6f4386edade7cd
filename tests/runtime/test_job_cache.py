"""The cache of finished profiles, where there is nowhere to keep it, and the ranks that hear of errors together."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.errors import PerseusError

HOMELESS = """
import os
from perseus_ds.runtime.cache import Cache
os.setuid(54321)
try:
    Cache("key").directory
except OSError as error:
    print(error)
"""


def test_a_user_without_a_home_is_told_what_to_set():
    done = subprocess.run([sys.executable, "-c", HOMELESS], env={}, capture_output=True, text=True, check=False)
    if "PermissionError" in done.stderr:
        pytest.skip("only root can become somebody else")
    assert "set XDG_CACHE_HOME" in done.stdout, done.stderr


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Communicator(PipelineTopology(0, (0,)))
    dist.destroy_process_group()


@pytest.mark.parametrize("error", [ValueError("five"), ZeroDivisionError("five"), PerseusError("five")])
def test_whatever_goes_wrong_on_the_first_rank_reaches_all_as_one_kind_of_error(alone, error):
    def fail():
        raise error

    with pytest.raises(PerseusError, match="five"):
        alone.from_first(fail)
