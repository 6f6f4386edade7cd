"""The cache of finished profiles, where there is nowhere to keep it, and the ranks that hear of errors together."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from perseus_ds.errors import PerseusError
from perseus_ds.ranks import Communicator, PipelineTopology

HOMELESS = """
import pwd
from perseus_ds.runtime.frontiers import Cache
def unknown(user):
    raise KeyError(user)
pwd.getpwuid = unknown
try:
    Cache("key").directory
except OSError as error:
    print(error)
"""


def cache_folder(script, **environment):
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_a_user_without_a_home_is_told_what_to_set():
    assert "Set XDG_CACHE_HOME" in cache_folder(HOMELESS)


def test_the_cache_is_where_xdg_says_or_in_the_home():
    script = "from perseus_ds.runtime.frontiers import Cache; print(Cache('key').directory)"
    assert cache_folder(script, HOME="/home/a") == "/home/a/.cache/perseus-ds/key"
    assert cache_folder(script, HOME="/home/a", XDG_CACHE_HOME="/fast") == "/fast/perseus-ds/key"


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
        alone.computed_on_rank_0(fail)
