"""Faults while training under a plan, on the real pynvml and a stub driver: training goes on as without Perseus."""

import time

import psutil
import pytest
from job import Finished, run, start
from test_training_is_untouched import save_frontier

pytestmark = [pytest.mark.integration, pytest.mark.extended]
STEPS = 260


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What the job's losses are without Perseus."""
    return [rank["losses"] for rank in run(tmp_path_factory.mktemp("without"), 2, steps=STEPS).ranks]


def lost(stub, process):
    for function in ("set_locked", "reset_locked", "energy"):
        stub.gpus[1].fail(function, "gpu_is_lost")


def hung(stub, process):
    stub.gpus[1].hang("set_locked")


def without_guardian(stub, process):
    guardians = [p for p in psutil.process_iter(["cmdline"]) if "guardian_process" in " ".join(p.info["cmdline"] or [])]
    mine = [p for p in guardians if p.environ().get("PERSEUS_STUB_NVML") == stub.environment["PERSEUS_STUB_NVML"]]
    assert mine
    for guardian in mine:
        guardian.kill()


@pytest.mark.parametrize(
    ("fault", "said"),
    [(lost, "GPU is lost"), (hung, "has not answered"), (without_guardian, "the guardian")],
)
def test_training_goes_on_at_default_clocks(tmp_path, make_stub_nvml, losses, fault, said):
    stub = make_stub_nvml(2)
    frontier = save_frontier(tmp_path / "frontier", "1f1b", simulated=False)
    block = {"mode": "run", "frontier": frontier, "device": "nvml"}
    process = start(tmp_path / "job", 2, stub.environment, perseus=block, steps=STEPS)
    deadline = time.monotonic() + 90
    while len(stub.gpus[1].changes_mhz()) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    fault(stub, process)
    if fault is hung:
        time.sleep(4.0)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    finished = Finished(tmp_path / "job", 0, output)
    assert [rank["losses"] for rank in finished.ranks] == losses
    assert "Training goes on at default clocks" in output
    events = [r for r in finished.records() if r.get("event") == "failure"]
    failed = [r["failed_ranks"] for r in finished.records() if "iteration" in r]
    assert failed[0] == []
    assert failed[-1] != []
    assert said in output or any(said in e["error"] for e in events)
    if fault is not lost:
        stub.gpus[1].hang("set_locked", False)
        deadline = time.monotonic() + 3.0
        while any(stub.locked_clocks_mhz()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stub.locked_clocks_mhz() == [0, 0]
