"""Fixtures for every test; in CI a skip that is not expected fails the run."""

import os

import pytest
from fail_on_skip import FailOnSkip
from job import PlainRuns
from stub_nvml.fixtures import make_stub_nvml, stub_library, stub_nvml, stub_nvml_here, stub_time

__all__ = ["make_stub_nvml", "stub_library", "stub_nvml", "stub_nvml_here", "stub_time"]


def pytest_configure(config):
    if os.environ.get("CI"):
        config.pluginmanager.register(FailOnSkip())


@pytest.fixture(scope="session")
def plain_runs(tmp_path_factory):
    """Jobs without Perseus, each run once."""
    return PlainRuns(tmp_path_factory.mktemp("plain"))
