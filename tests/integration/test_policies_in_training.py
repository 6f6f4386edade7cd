"""Policies, stragglers, external commands and checkpoints on real ranks."""

import pytest
from frontiers import save_true_frontier
from job import run, run_while
from run_log import events, iterations

from perseus_ds.cli.main import main
from perseus_ds.errors import ConfigError
from perseus_ds.server.control_socket import send_order

pytestmark = pytest.mark.integration
SIMULATED = {"longest_instruction_s": 0.02}
STAGES = {"work": [3] * 4}


def block(folder, **more):
    return {"mode": "run", "frontier": str(folder), "simulated": SIMULATED, **more}


def straggles(records):
    """Return the plan events that name pipeline 1 as the straggler."""
    return [r for r in events(records, "plan") if r["straggler"] == 1]


@pytest.mark.extended
def test_other_pipelines_follow_a_straggler_that_was_announced_or_noticed_and_come_back(tmp_path):
    plans = save_true_frontier(tmp_path / "frontier").plans
    output = tmp_path / "job" / "perseus"

    def announced(records):
        return [r for r in straggles(records) if r["slowdown"] == pytest.approx(1.2, abs=0.001)]

    def noticed(records):
        return [r for r in straggles(records) if r["slowdown"] > 2]

    def control(slowdown):
        assert main(["control", "straggler", "--run", f"{output}", "--pipeline", "1", "--slowdown", f"{slowdown}"]) == 0

    def during(job):
        job.wait_for(lambda records: len(iterations(records, "run")) >= 3)
        control(1.2)
        job.wait_for(announced)
        control(1.0)
        job.wait_for(lambda records: straggles(records) and events(records, "plan")[-1]["straggler"] is None)
        job.order("slow")
        slow = job.wait_for(noticed)[0]
        job.order("slow", False)
        job.wait_for(lambda records: [r for r in events(records, "plan") if r["time"] > slow["time"] and r != slow])

    slow = {"pipeline": 1, "factor": 4.0}
    job = {"stages": 2, "slow_pipeline": slow, "perseus": block(tmp_path / "frontier"), **STAGES}
    finished = run_while(during, tmp_path / "job", 4, **job)
    assert len(finished.ranks) == 4
    of_order, *_ = announced(finished.records())  # repeated if this machine slows a pipeline down
    assert of_order["plan"] == of_order["plans"][1] == 0
    follows = plans[of_order["plans"][0]]
    assert plans[0].time_s < follows.time_s < 1.2 * plans[0].time_s
    assert of_order["plans"][0] in {r["plan"] for r in finished.iterations("run")}
    assert all(r["plans"][0] > r["plans"][1] for r in noticed(finished.records()))


@pytest.mark.extended
def test_a_running_job_takes_orders_and_a_later_start_in_its_folder_keeps_them(tmp_path):
    last = len(save_true_frontier(tmp_path / "frontier").plans) - 1
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    job = {"perseus": block(tmp_path / "frontier"), "deepspeed": {"csv_monitor": monitor}, **STAGES}
    output = tmp_path / "job" / "perseus"

    def during(running):
        running.wait_for(lambda records: len(records) >= 5)
        assert send_order(output, {"command": "status"})["status"]["last"]["simulated"] is True
        with pytest.raises(ConfigError, match="no pipeline 7"):
            send_order(output, {"command": "straggler", "pipeline": 7, "slowdown": 1.2})
        assert main(["control", "pause", "--run", f"{output}"]) == 0
        running.wait_for(lambda records: records[-1].get("phase") == "pause")
        assert main(["control", "resume", "--run", f"{output}"]) == 0
        assert main(["control", "policy", "--run", f"{output}", "--name", "energy_optimal"]) == 0
        running.wait_for(lambda records: [r for r in iterations(records, "run") if r["plan"] == last])

    first = run_while(during, tmp_path / "job", 2, save_at_end=True, **job)
    assert not (output / "control.json").exists()
    records = first.iterations()
    # The last iteration is recorded at the end of the job, when DeepSpeed's monitor may have ended.
    written = (tmp_path / "csv" / "job" / "Perseus_simulated_average_power_w.csv").read_text().splitlines()[1:]
    power_w = [float(line.split(",")[1]) for line in written]
    assert len(power_w) >= len(records) - 1
    assert power_w == pytest.approx([r["energy_j"] / r["time_s"] for r in records[: len(power_w)]], rel=1e-3)

    losses = first.ranks[0]["losses"]
    (tmp_path / "job" / "stop").unlink()
    more = {"resume_from": str(tmp_path / "job" / "checkpoint"), "steps": 4}
    resumed = run(tmp_path / "job", 2, **job, **more)
    whole = run(tmp_path / "whole", 2, **{**STAGES, "steps": len(losses) + 4, "save_at_end": True})
    assert losses + resumed.ranks[0]["losses"] == whole.ranks[0]["losses"]
    # The first one or two iterations calibrate the simulated GPUs.
    again = [(r["iteration"], r["plan"]) for r in resumed.iterations("run") if r["iteration"] > len(losses) + 2]
    assert again == [(number, last) for number in range(len(losses) + 3, len(losses) + 5)]
