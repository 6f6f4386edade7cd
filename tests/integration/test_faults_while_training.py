"""Faults while training under a plan, on the real pynvml and a stub driver: training goes on as without Perseus."""

import time

import psutil
import pytest
from job import QUICK_PROFILE, Finished, run, start
from test_training_is_untouched import save_frontier

pytestmark = [pytest.mark.integration, pytest.mark.extended]
STEPS = 260


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """What the job's losses are without Perseus."""
    return [rank["losses"] for rank in run(tmp_path_factory.mktemp("without"), 2, steps=STEPS).ranks]


def comes(condition, within_s=3.0):
    """Wait until something is so; returns whether it came to be in time."""
    deadline = time.monotonic() + within_s
    while not (so := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return so


def lost(stub):
    for function in ("set_locked", "reset_locked", "energy"):
        stub.gpus[1].fail(function, "gpu_is_lost")


def forbidden(stub):
    for function in ("set_locked", "reset_locked"):
        stub.gpus[1].fail(function, "no_permission")


def timed_out(stub):
    stub.gpus[1].fail("set_locked", "timeout")
    assert comes(lambda: stub.gpus[1].locked_clock_mhz == 0, 5.0), (
        "the default clock is restored while training goes on"
    )


def hung(stub):
    stub.gpus[1].hang("set_locked")
    time.sleep(4.0)


def hung_reading(stub):
    stub.gpus[1].hang("energy")


def without_guardian(stub):
    guardians = [p for p in psutil.process_iter(["cmdline"]) if "guardian_process" in " ".join(p.info["cmdline"] or [])]
    mine = [p for p in guardians if p.environ().get("PERSEUS_STUB_NVML") == stub.environment["PERSEUS_STUB_NVML"]]
    assert mine
    for guardian in mine:
        guardian.kill()
    assert comes(lambda: not any(stub.locked_clocks_mhz())), "the ranks themselves restore the default clock"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lost, ([1], "GPU is lost")),
        (forbidden, ([1], "CAP_SYS_ADMIN")),
        (timed_out, ([1], "did not answer in time")),
        (hung, ([1], "has not answered")),
        (hung_reading, ([1], "has not answered")),
        (without_guardian, ([0, 1], "the guardian, which restores")),
    ],
)
def test_training_goes_on_at_default_clocks(tmp_path, make_stub_nvml, losses, fault, expected):
    failed, said = expected
    stub = make_stub_nvml(2)
    frontier = save_frontier(tmp_path / "frontier", "1f1b", simulated=False)
    block = {"mode": "run", "frontier": frontier, "device": "nvml"}
    process = start(tmp_path / "job", 2, stub.environment, perseus=block, steps=STEPS)
    assert comes(lambda: len(stub.gpus[1].changes_mhz()) >= 20, 90)
    fault(stub)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    finished = Finished(tmp_path / "job", 0, output)
    assert [rank["losses"] for rank in finished.ranks] == losses
    events = [r for r in finished.records() if r.get("event") == "failure"]
    assert sorted(event["rank"] for event in events) == failed, "one recorded event for every rank that failed"
    assert all(said in event["error"] for event in events)
    assert output.count("Training goes on at default clocks") == len(failed), "and one warning"
    by_iteration = [r["failed_ranks"] for r in finished.records() if "iteration" in r]
    assert by_iteration[0] == []
    assert by_iteration[-1] == failed
    for function in ("set_locked", "energy"):  # The driver is well again: nothing stays locked.
        stub.gpus[1].hang(function, False)
    if fault not in (lost, forbidden):
        assert comes(lambda: not any(stub.locked_clocks_mhz()))


@pytest.mark.parametrize("mode", ["profile", "auto"])
def test_training_goes_on_when_the_driver_hangs_while_profiling(tmp_path, make_stub_nvml, losses, mode):
    stub = make_stub_nvml(2)
    block = {"mode": mode, "device": "nvml", "profile": {**QUICK_PROFILE, "warm_up": 2}}
    process = start(tmp_path / "job", 2, stub.environment, perseus=block, steps=STEPS)
    assert comes(lambda: stub.gpus[1].locked_clock_mhz, 90)
    stub.gpus[1].hang("energy")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    finished = Finished(tmp_path / "job", 0, output)
    assert [rank["losses"] for rank in finished.ranks] == losses
    assert {r["rank"] for r in finished.records() if r.get("event") == "failure"} == {0, 1}
    assert not (tmp_path / "job" / "perseus" / "profile.csv").exists()
    stub.gpus[1].hang("energy", False)
    assert comes(lambda: not any(stub.locked_clocks_mhz()))
