"""Faults under a plan, on a stub driver, do not change training."""

import os
import signal

import pytest
import run_log
from frontiers import save_random_plan
from hostile_ranks import HostileRanks
from job import run, run_while
from run_log import iterations, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def wait_until_restored(*gpus):
    wait_until(lambda: not any(gpu.locked_clock_mhz for gpu in gpus), "default clocks")


def assert_same_losses(finished, folder, ranks):
    """Assert that the job has the same losses without Perseus."""
    without = run(folder, ranks, steps=len(finished.ranks[0]["losses"]))
    assert [rank["losses"] for rank in finished.ranks] == [rank["losses"] for rank in without.ranks]


def run_under_a_plan(folder, stub, during, ranks=2, **job):
    """Run a job, which ``during`` controls after 20 clock changes."""
    save_random_plan(folder / "frontier", ranks=ranks, simulated=False)
    block = {"mode": "run", "frontier": str(folder / "frontier"), "device": "nvml"}

    def later(job):
        wait_until(lambda: len(stub.gpus[1].changes_mhz()) >= 20, "20 changes of the clock")
        job.wait_for(lambda records: len(iterations(records)) >= 2)
        during(job)

    finished = run_while(later, folder / "job", ranks, environment=stub.environment, perseus=block, **job)
    assert_same_losses(finished, folder / "without", ranks)
    assert finished.iterations()[0]["failed_ranks"] == []
    return finished


def test_a_job_that_trains_on_after_sigterm_does_so_at_default_clocks_and_its_records_say_so(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)
    done = []

    def during(job):
        for rank in range(2):
            os.kill(int((job.folder / f"pid{rank}").read_text()), signal.SIGTERM)
        wait_until_restored(*stub.gpus)
        done.append(len(job.wait_for(iterations)))
        job.wait_for(lambda records: len(iterations(records)) >= done[0] + 8)

    finished = run_under_a_plan(tmp_path, stub, during, survives_term=True)
    (reason,) = {event["error"] for event in finished.events("failure")}
    assert "received a termination signal" in reason
    assert len(finished.events("end")) == 1
    for record in finished.iterations()[done[0] + 4 :]:
        assert record["plan"] is None
        assert record["failed_ranks"] == [0, 1]
        assert record["clock_changes"] == 0
        assert record["clocks_asked_mhz"] in (None, [None, None])


def test_a_server_that_dies_is_replaced_and_its_plan_runs_again(tmp_path, make_stub_nvml):
    stub = make_stub_nvml(2)

    def during(job):
        (server,) = stub.servers()
        server.kill()
        wait_until_restored(*stub.gpus)
        wait_until(lambda: stub.servers() and stub.servers() != [server], "another server")
        begun = len(iterations(run_log.records(job.folder / "perseus")))
        job.wait_for(lambda records: any(r["plan"] is not None for r in iterations(records)[begun:]))

    finished = run_under_a_plan(tmp_path, stub, during)
    assert not any(gpu.locked_clock_mhz for gpu in stub.gpus)
    assert "Traceback" not in finished.output


def test_losses_stay_and_all_ranks_are_under_a_plan_again_after_faults_and_kills(tmp_path, make_stub_nvml):
    causes = ("no permission", "driver hangs", "full disk", "orders", "kill one rank")
    job = HostileRanks(tmp_path, make_stub_nvml(4), seed=1, causes=causes, longest_s=2.0)
    assert job.run(minutes=0.5) == []
    assert all(outcome.times for outcome in job.outcomes.values())
