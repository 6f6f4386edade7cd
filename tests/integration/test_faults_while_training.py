"""Faults while training under a plan, on the real pynvml and a stub driver: training goes on as without Perseus."""

import psutil
import pytest
from frontiers import save_random_plan
from job import QUICK_PROFILE, run, run_while
from run_log import events, iterations, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def wait_until_restored(*gpus):
    wait_until(lambda: not any(gpu.locked_clock_mhz for gpu in gpus), "default clocks")


def assert_same_losses(finished, folder):
    """Without Perseus the job has the same losses."""
    without = run(folder, 2, steps=len(finished.ranks[0]["losses"]))
    assert [rank["losses"] for rank in finished.ranks] == [rank["losses"] for rank in without.ranks]


def lost(stub):
    for function in ("set_locked", "reset_locked", "energy"):
        stub.gpus[1].fail(function, "gpu_is_lost")


def forbidden(stub):
    for function in ("set_locked", "reset_locked"):
        stub.gpus[1].fail(function, "no_permission")


def timed_out(stub):
    stub.gpus[1].fail("set_locked", "timeout")
    wait_until_restored(stub.gpus[1])  # while training goes on


def hung(stub):
    stub.gpus[1].hang("set_locked")


def hung_reading(stub):
    stub.gpus[1].hang("energy")


def without_guardian(stub):
    guardians = [p for p in psutil.process_iter(["cmdline"]) if "guardian_daemon" in " ".join(p.info["cmdline"] or [])]
    mine = [p for p in guardians if p.environ().get("PERSEUS_STUB_NVML") == stub.environment["PERSEUS_STUB_NVML"]]
    assert mine
    for guardian in mine:
        guardian.kill()
    wait_until_restored(*stub.gpus)  # by the ranks themselves


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lost, ([1], "GPU is lost")),
        (forbidden, ([1], "CAP_SYS_ADMIN")),
        (without_guardian, ([0, 1], "the guardian, which restores")),
    ],
)
def test_training_goes_on_at_default_clocks(tmp_path, make_stub_nvml, fault, expected):
    failed, message = expected
    stub = make_stub_nvml(2)
    save_random_plan(tmp_path / "frontier", simulated=False)
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "device": "nvml"}

    def during(job):
        wait_until(lambda: len(stub.gpus[1].changes_mhz()) >= 20, "20 changes of the clock")
        job.wait_for(lambda records: len(iterations(records)) >= 2)
        fault(stub)
        job.wait_for(lambda records: iterations(records)[-1]["failed_ranks"] == failed)

    finished = run_while(during, tmp_path / "job", 2, environment=stub.environment, perseus=block)
    assert_same_losses(finished, tmp_path / "without")
    failures = finished.events("failure")
    assert sorted(event["rank"] for event in failures) == failed, "one recorded event for every rank that failed"
    assert all(message in event["error"] for event in failures)
    assert finished.output.count("Training goes on at default clocks") == len(failed), "and one warning"
    assert finished.iterations()[0]["failed_ranks"] == []
    if fault is without_guardian:
        wait_until_restored(*stub.gpus)


def answers_again(stub):
    stub.gpus[1].fail("set_locked", "none")
    for function in ("set_locked", "energy"):
        stub.gpus[1].hang(function, False)


@pytest.mark.parametrize("fault", [timed_out, hung, hung_reading])
def test_a_driver_that_answers_again_runs_plans_again(tmp_path, make_stub_nvml, fault):
    stub = make_stub_nvml(2)
    save_random_plan(tmp_path / "frontier", simulated=False)
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "device": "nvml"}

    def during(job):
        wait_until(lambda: len(stub.gpus[1].changes_mhz()) >= 20, "20 changes of the clock")
        fault(stub)
        job.wait_for(lambda records: any(each["failed_ranks"] == [1] for each in iterations(records)))
        answers_again(stub)
        job.wait_for(lambda records: iterations(records)[-1]["failed_ranks"] == [])
        changes = len(stub.gpus[1].changes_mhz())
        wait_until(lambda: len(stub.gpus[1].changes_mhz()) >= changes + 20, "20 more changes of the clock")

    finished = run_while(during, tmp_path / "job", 2, environment=stub.environment, perseus=block)
    assert_same_losses(finished, tmp_path / "without")
    assert finished.events("failure") == []
    assert "This rank runs at default clocks until it does" in finished.output
    assert "the driver answers again" in finished.output
    wait_until_restored(*stub.gpus)


@pytest.mark.parametrize("mode", ["profile", "auto"])
def test_training_goes_on_when_the_driver_hangs_while_profiling(tmp_path, make_stub_nvml, mode):
    stub = make_stub_nvml(2)
    block = {"mode": mode, "device": "nvml", "profile": {**QUICK_PROFILE, "warm_up": 2}}

    def during(job):
        wait_until(lambda: stub.gpus[1].locked_clock_mhz, "a clock to measure at")
        stub.gpus[1].hang("energy")
        job.wait_for(lambda records: {r["rank"] for r in events(records, "failure")} == {0, 1})

    finished = run_while(during, tmp_path / "job", 2, environment=stub.environment, perseus=block)
    assert_same_losses(finished, tmp_path / "without")
    assert not (tmp_path / "job" / "perseus" / "profile.csv").exists()
    stub.gpus[1].hang("energy", False)
    wait_until_restored(*stub.gpus)
