"""Fixtures for every test; in CI a skip that is not expected fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from fail_on_skip import FailOnSkip
from job import ENVIRONMENT, EXTENSIONS, PlainRuns
from stub_nvml.fixtures import make_stub_nvml, stub_library, stub_nvml, stub_nvml_here, stub_time

__all__ = ["make_stub_nvml", "stub_library", "stub_nvml", "stub_nvml_here", "stub_time"]


def pytest_configure(config):
    hypothesis.settings.load_profile("ci")  # always the same examples, and no deadline on the wall clock
    # The ninja that jobs find: of two ninjas in turn each compiles DeepSpeed's extension again.
    os.environ["PATH"] = ENVIRONMENT["PATH"]
    if os.environ.get("CI"):
        config.pluginmanager.register(FailOnSkip())


def pytest_sessionstart(session):
    """Compile DeepSpeed's extension beside the first tests of a long session: later ones would wait for it together."""
    has_workers = getattr(session.config.option, "numprocesses", None)
    if has_workers and not hasattr(session.config, "workerinput") and not any(Path(EXTENSIONS).glob("**/*.so")):
        code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, **quiet)


@pytest.fixture(scope="session")
def plain_runs(tmp_path_factory):
    """Jobs without Perseus, each run once."""
    return PlainRuns(tmp_path_factory.mktemp("plain"))
