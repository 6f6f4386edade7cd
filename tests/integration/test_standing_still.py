"""Training that stands still for a dear hour, on real ranks: it answers orders, goes on, and ends when told to."""

import signal
from datetime import datetime, timedelta, timezone

import pytest
from frontiers import save_true_frontier
from job import finish, run_while, start
from run_log import events, iterations, wait_for

from perseus_ds.policy.control_socket import send_order

pytestmark = [pytest.mark.integration, pytest.mark.extended]
STEPS = 4000


def block(folder):
    """A job for which it is cheaper to wait for some minutes than to train on."""
    frontier = save_true_frontier(folder / "frontier")
    now = datetime.now(timezone.utc).replace(microsecond=0)
    rows = [f"{(now + timedelta(seconds=600 * n - 10)).isoformat()},{900 if n == 0 else 10}" for n in range(12)]
    (folder / "prices.csv").write_text("\n".join(["time,value", *rows]))
    longest_s = max(frontier.instruction_times_s.values())
    policy = {
        "name": "cheapest",
        "finish_by": (now + timedelta(seconds=6000)).isoformat(),
        "total_steps": STEPS,
        "signal": str(folder / "prices.csv"),
        "may_pause": True,
    }
    return {
        "mode": "run",
        "frontier": str(folder / "frontier"),
        "simulated": {"longest_instruction_s": longest_s},
        "policy": policy,
    }


def stands_still(records):
    return [record for record in events(records, "plan") if record["halts"]]


def test_ranks_that_stand_still_answer_orders_and_go_on_together(tmp_path):
    output = tmp_path / "job" / "perseus"

    def during(job):
        job.wait_for(stands_still)
        status = send_order(output, {"command": "status"})["status"]
        assert status["next"]["halts"] is True
        send_order(output, {"command": "policy", "policy": {"name": "slowdown"}})
        job.wait_for(lambda records: len(iterations(records, "run")) >= 4)

    job = {"work": [3] * 4, "perseus": block(tmp_path), "save_at_end": True}
    finished = run_while(during, tmp_path / "job", 2, **job)
    assert len(finished.ranks) == 2
    (halt,) = finished.events("halt")
    assert halt["time_s"] > 0
    assert halt["energy_j"] > 0
    assert [record["halts"] for record in finished.events("plan")] == [True, False]
    assert (tmp_path / "job" / "checkpoint").is_dir()


def test_ranks_that_stand_still_end_upon_sigterm(tmp_path):
    process = start(tmp_path / "job", 2, work=[3] * 4, steps=STEPS, perseus=block(tmp_path))
    try:
        wait_for(tmp_path / "job" / "perseus", stands_still)
        process.send_signal(signal.SIGTERM)
        finished = finish(process, tmp_path / "job")
    finally:
        process.kill()
    assert not finished.iterations("run")
    assert not (tmp_path / "job" / "perseus" / "control.json").exists()
