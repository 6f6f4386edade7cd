"""A running job takes orders, and its figures reach DeepSpeed's monitor."""

import pytest
from frontiers import save_true_frontier
from job import run_while
from run_log import iterations

from perseus_ds.cli.main import main
from perseus_ds.errors import ConfigError
from perseus_ds.server.control_socket import send_order

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def test_a_running_job_takes_orders_and_its_power_is_in_the_monitor_of_deepspeed(tmp_path):
    last = len(save_true_frontier(tmp_path / "frontier").plans) - 1
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    block = {"mode": "run", "frontier": str(tmp_path / "frontier"), "simulated": {"longest_instruction_s": 0.02}}
    job = {"perseus": block, "deepspeed": {"csv_monitor": monitor}}
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

    finished = run_while(during, tmp_path / "job", 2, **job)
    assert not (output / "control.json").exists()
    records = finished.iterations()
    # The last iterations are recorded at the end of the job, when DeepSpeed's monitor may have ended.
    written = (tmp_path / "csv" / "job" / "Perseus_simulated_average_power_w.csv").read_text().splitlines()[1:]
    power_w = [float(line.split(",")[1]) for line in written]
    assert power_w
    assert power_w == pytest.approx([r["energy_j"] / r["time_s"] for r in records[: len(power_w)]], rel=1e-3)
