"""Fixtures for every test."""

import pytest
from job import PlainRuns
from stub_nvml.fixtures import make_stub_nvml, stub_library, stub_nvml, stub_nvml_here

__all__ = ["make_stub_nvml", "stub_library", "stub_nvml", "stub_nvml_here"]


@pytest.fixture(scope="session")
def plain_runs(tmp_path_factory):
    """Jobs without Perseus, each run once."""
    return PlainRuns(tmp_path_factory.mktemp("plain"))
