"""Pytest fixtures of the stub CUDA driver, available to all tests through tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stub_cuda.controller import StubCuda, compiled


@pytest.fixture(scope="session")
def stub_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> StubCuda:
    """The library, loaded into this process."""
    return StubCuda(compiled(tmp_path_factory.mktemp("stub_cuda")))


@pytest.fixture
def stub_cuda(stub_cuda_library: StubCuda) -> Iterator[StubCuda]:
    """Two devices, of which the first is current."""
    stub_cuda_library.set_device(0)
    yield stub_cuda_library
    stub_cuda_library.fail()
    stub_cuda_library.synchronize()
