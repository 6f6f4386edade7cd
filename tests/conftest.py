"""Fixtures for every test. In CI, a skip fails the run."""

import contextlib
import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from fail_on_skip import FailOnSkip
from job import ENVIRONMENT
from stub_cuda.fixtures import stub_cuda, stub_cuda_library
from stub_nvml.fixtures import make_stub_nvml, stub_library, stub_nvml, stub_nvml_here, stub_of_agents, stub_time
from virtual.time import VirtualTime

__all__ = [
    "make_stub_nvml",
    "stub_cuda",
    "stub_cuda_library",
    "stub_library",
    "stub_nvml",
    "stub_nvml_here",
    "stub_of_agents",
    "stub_time",
]


def pytest_configure(config):
    hypothesis.settings.load_profile("ci")  # always the same examples, without deadlines
    # Use the ninja that jobs find: if two of them alternate, each recompiles DeepSpeed's extensions.
    os.environ["PATH"] = ENVIRONMENT["PATH"]
    # Otherwise each process would compile this package again, and each session all tests.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.environ.get("CI"):
        config.pluginmanager.register(FailOnSkip())


@pytest.fixture
def now():
    """A virtual time."""
    return VirtualTime()


@pytest.fixture
def ranks(monkeypatch):
    """A function that calls a function on each rank of a job, and returns their results or errors."""
    import torch.distributed as dist  # some tests run without torch

    store, here = dist.HashStore(), threading.local()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)

    def as_rank(rank, call):
        here.rank = rank
        try:
            return call()
        except Exception as error:
            return error

    def ranks(number, call):
        monkeypatch.setattr(dist, "get_world_size", lambda: number)
        with ThreadPoolExecutor(number) as threads:
            return list(threads.map(as_rank, range(number), [call] * number))

    return ranks


@pytest.fixture
def disk_with():
    """A function that limits the size of this process's files, as a full disk would."""

    @contextlib.contextmanager
    def disk_with(free_bytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return disk_with
