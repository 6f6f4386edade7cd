"""Perseus works without DeepSpeed's engine."""

import json
from pathlib import Path

import pytest
import run_log
from frontiers import save_true_frontier
from job import block_in, run_script

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("handwritten_loop.py")


def run(folder, **block):
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"steps": 8, "perseus": block}))
    return run_script(folder, 2, SCRIPT, folder).ranks


@pytest.mark.extended
def test_a_loop_on_plain_torch_distributed_runs_under_a_plan(tmp_path):
    save_true_frontier(tmp_path / "frontier")
    observed = run(tmp_path / "observed", **block_in(tmp_path, "observe"))
    planned = run(tmp_path / "planned", **block_in(tmp_path, "run", frontier=str(tmp_path / "frontier")))
    assert [rank["losses"] for rank in planned] == [rank["losses"] for rank in observed]
    assert [rank["plan"] for rank in planned] == [True, True]
    iterations = run_log.iterations(run_log.records(tmp_path / "run"), "run")
    assert len(iterations) >= 6, "one or two iterations calibrate the simulated GPUs"
    # The agent may not follow the first iteration before its end.
    assert all(r["clock_changes"] + r["clock_skips"] > 0 for r in iterations[1:])
