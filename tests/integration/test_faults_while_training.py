"""Faults under a plan, on a stub driver, do not change training."""

import os
import signal

import pytest
from frontiers import save_random_plan
from hostile_ranks import HostileRanks
from job import run, run_while
from run_log import iterations, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def test_a_job_that_trains_on_after_sigterm_does_so_at_default_clocks_and_its_records_say_so(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)
    save_random_plan(tmp_path / "frontier", simulated=False)
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "device": "nvml"}
    done = []

    def during(job):
        wait_until(lambda: len(stub.gpus[1].changes_mhz()) >= 20, "20 changes of the clock")
        for rank in range(2):
            os.kill(int((job.folder / f"pid{rank}").read_text()), signal.SIGTERM)
        wait_until(lambda: not any(gpu.locked_clock_mhz for gpu in stub.gpus), "default clocks")
        done.append(len(job.wait_for(iterations)))
        job.wait_for(lambda records: len(iterations(records)) >= done[0] + 8)

    job = {"environment": stub.environment, "perseus": block, "survives_term": True}
    finished = run_while(during, tmp_path / "job", 2, **job)
    without = run(tmp_path / "without", 2, steps=len(finished.ranks[0]["losses"]))
    assert [rank["losses"] for rank in finished.ranks] == [rank["losses"] for rank in without.ranks]
    (reason,) = {event["error"] for event in finished.events("failure")}
    assert "received a termination signal" in reason
    assert finished.iterations()[0]["failed_ranks"] == []
    for record in finished.iterations()[done[0] + 4 :]:
        assert (record["plan"], record["failed_ranks"], record["clock_changes"]) == (None, [0, 1], 0)
        assert record["clocks_asked_mhz"] in (None, [None, None])


def test_losses_stay_and_all_ranks_are_under_a_plan_again_after_faults_and_kills(tmp_path, make_stub_nvml):
    causes = ("no permission", "driver hangs", "full disk", "orders", "kill one rank")
    job = HostileRanks(tmp_path, make_stub_nvml(4), seed=1, causes=causes, longest_s=2.0)
    assert job.run(minutes=0.5) == []
    assert all(outcome.times for outcome in job.outcomes.values())
