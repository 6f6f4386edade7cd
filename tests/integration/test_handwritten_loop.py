"""Perseus is not tied to DeepSpeed's engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_policies_in_training import SIMULATED, frontier

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("handwritten_loop.py")


def run(folder, **block):
    folder.mkdir()
    perseus = {"device": "simulated", "output_dir": str(folder / "perseus"), "simulated": SIMULATED, **block}
    (folder / "job.json").write_text(json.dumps({"steps": 12, "perseus": perseus}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "perseus" / "run.jsonl").read_text().splitlines()]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)], records


def test_a_loop_on_plain_torch_distributed_runs_under_a_plan(tmp_path):
    frontier(tmp_path / "frontier")
    observed, _ = run(tmp_path / "observe", mode="observe")
    planned, records = run(tmp_path / "run", mode="run", frontier=str(tmp_path / "frontier"))
    assert [rank["losses"] for rank in planned] == [rank["losses"] for rank in observed]
    assert [rank["plan"] for rank in planned] == [True, True]
    iterations = [r for r in records if r.get("phase") == "run"]
    assert len(iterations) == 11
    assert all(r["clock_changes"] > 2 for r in iterations)
    predicted = iterations[-1]["predicted_time_s"]
    assert iterations[-1]["time_s"] == pytest.approx(predicted, rel=0.25)
