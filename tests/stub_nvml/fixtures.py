"""Pytest fixtures of the stub NVML library, available to all tests through tests/conftest.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from stub_nvml.controller import STATE_VARIABLE, StubNvml, build
from virtual.time import VirtualTime

from perseus_ds.protocol.places import RUNTIME_VARIABLE

MakeStub = Callable[[int], StubNvml]


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    try:
        return build(tmp_path_factory.mktemp("stub_nvml"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def make_stub_nvml(stub_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStub:
    """A function that makes a node of GPUs, for processes started with its ``environment``."""
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "memory"))
    return lambda gpu_count: StubNvml(stub_library, tmp_path / "stub_nvml_state", gpu_count)


@pytest.fixture
def stub_nvml(make_stub_nvml: MakeStub) -> StubNvml:
    """A node with four A100 GPUs."""
    return make_stub_nvml(4)


@pytest.fixture
def stub_nvml_here(stub_nvml: StubNvml, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubNvml]:
    """The same node, visible to the real pynvml in this process.

    The dynamic linker returns a library that is already loaded under the requested name, so loading the stub first is
    enough. It stays loaded: without its variable it reports that no driver is loaded.
    """
    library = ctypes.CDLL(str(stub_library))
    monkeypatch.setenv(STATE_VARIABLE, stub_nvml.environment[STATE_VARIABLE])
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    pynvml.nvmlInit()
    if not pynvml.nvmlSystemGetDriverVersion().endswith("-stub"):
        pynvml.nvmlShutdown()
        pytest.skip(
            "this process has loaded a real libnvidia-ml.so.1 before; run these tests in a process of their own"
        )
    pynvml.nvmlShutdown()
    yield stub_nvml
    stub_nvml.fail("shutdown", "none")
    while library.nvmlShutdown() == 0:  # Release what a failed test left open.
        pass


@pytest.fixture
def stub_of_agents(stub_nvml_here: StubNvml, monkeypatch: pytest.MonkeyPatch) -> StubNvml:
    """The same node, visible to agents that this process starts as well."""
    for name, value in stub_nvml_here.environment.items():
        monkeypatch.setenv(name, value)
    return stub_nvml_here


class StubTime(VirtualTime):
    """A virtual time shared with the stub's GPUs."""

    def __init__(self, stub: StubNvml) -> None:
        self._stub = stub
        super().__init__()

    @property
    def seconds(self) -> float:
        return self._stub.virtual_s

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._stub.virtual_s = seconds


@pytest.fixture
def stub_time(stub_nvml_here: StubNvml) -> StubTime:
    """Makes the GPUs of ``stub_nvml_here`` use a virtual time."""
    return StubTime(stub_nvml_here)
