"""Checks on a real GPU, none of whose clocks are changed; `make test-gpu` runs them and writes the evidence."""

from pathlib import Path

import pytest
from gpu_checks.checks import CHECKS, collected, made_in_a_process
from gpu_checks.machine import why_no_gpu

from perseus_ds.cli.main import main

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "gpu"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _evidence():
    """Written at the end, whatever failed; checks made there before are in it as well."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    yield
    evidence = collected(FOLDER / "checks")
    if evidence is not None:
        evidence.save(FOLDER)
        main(["report", str(FOLDER)])


@pytest.mark.parametrize("name", CHECKS)
def test_on_this_gpu(name):
    result = made_in_a_process(name, FOLDER / "checks")
    assert result.outcome == "passed", result.reason
