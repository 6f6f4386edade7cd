"""Perseus is not tied to DeepSpeed's engine."""

import json
from pathlib import Path

import pytest
import run_log
from forked import run_ranks
from frontiers import save_true_frontier
from job import ENVIRONMENT, SIMULATED

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).with_name("handwritten_loop.py")


def run(folder, **block):
    folder.mkdir()
    perseus = {"device": "simulated", "output_dir": str(folder / "perseus"), "simulated": SIMULATED, **block}
    (folder / "job.json").write_text(json.dumps({"steps": 8, "perseus": perseus}))
    returncode, output = run_ranks(folder, 2, ENVIRONMENT, [str(SCRIPT), str(folder)])
    assert returncode == 0, output[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.extended
def test_a_loop_on_plain_torch_distributed_runs_under_a_plan(tmp_path):
    save_true_frontier(tmp_path / "frontier")
    observed = run(tmp_path / "observe", mode="observe")
    planned = run(tmp_path / "run", mode="run", frontier=str(tmp_path / "frontier"))
    assert [rank["losses"] for rank in planned] == [rank["losses"] for rank in observed]
    assert [rank["plan"] for rank in planned] == [True, True]
    iterations = run_log.iterations(run_log.records(tmp_path / "run" / "perseus"), "run")
    assert len(iterations) == 7
    assert all(r["clock_changes"] + r["clock_skips"] > 0 for r in iterations)
