"""Training under Perseus has the same bits as without it, and the clocks of the plan."""

import json
from pathlib import Path

import pytest
import run_log
from frontiers import save_random_plan, save_true_frontier
from job import QUICK_PROFILE, assert_same_without_perseus, block_in, run, run_script, start

from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.pipeline.instruction import Instruction, Kind

pytestmark = pytest.mark.integration
PASSES = ("forward", "backward")


def job_of(schedule):
    return {"ranks": 2, "work": [4, 2, 1, 3], "dualpipev": schedule == "dualpipev", "evaluate_after": 2}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("dualpipev", marks=pytest.mark.extended)])
def test_losses_and_weights_are_bit_identical_under_a_plan(tmp_path, schedule):
    job = job_of(schedule)
    plan = save_random_plan(tmp_path / "frontier", schedule)
    block = {"mode": "run", "frontier": str(tmp_path / "frontier")}
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    planned = {"perseus": block, "deepspeed": monitor, "steps": 1000, "until": ["run", 5]}
    under_plan = run(tmp_path / "run", **job, **planned)
    assert_same_without_perseus(under_plan, **job)
    base = "DualPipeVEngine" if schedule == "dualpipev" else "PipelineEngine"
    assert {rank["engine"] for rank in under_plan.ranks} == {base}  # some versions of DeepSpeed test it
    assert {r["plan"] for r in under_plan.iterations("run")} == {0}
    assert sum(r["clock_changes"] for r in under_plan.iterations("run")) > 0
    assert_kept(under_plan, plan)
    # The last iterations are recorded at the end of the job, when DeepSpeed's monitor may have ended.
    written = (tmp_path / "csv" / "job" / "Perseus_simulated_average_power_w.csv").read_text().splitlines()[1:]
    measured_w = [r["energy_j"] / r["time_s"] for r in under_plan.iterations()[: len(written)]]
    assert [float(line.split(",")[1]) for line in written] == pytest.approx(measured_w, rel=1e-3)
    assert written


def assert_kept(finished, plan):
    """Assert that timeline.json has one iteration with the clocks of the plan and all transfers."""
    (iteration,) = TimelineFile.load(finished.folder / "perseus" / "timeline.json").iterations
    assert (iteration.phase, iteration.plan) == ("run", 0)
    assert [r["plan"] for r in finished.iterations() if r["iteration"] == iteration.iteration] == [0]
    sides = []
    for rank, operations in enumerate(iteration.ranks):
        starts = [operation.start_s for operation in operations]
        assert starts == sorted(starts)
        done = {Instruction(o.stage, Kind(o.kind), o.micro_batch): o.clock_mhz for o in operations if o.kind in PASSES}
        assert done == dict(zip(plan.instructions[rank], plan.clocks_mhz[rank], strict=True))
        sides += [(o.kind, o.stage, o.target, o.micro_batch) for o in operations if o.target is not None]
    assert sides
    assert all(sides.count(side) == 2 for side in sides)


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])  # the oldest DeepSpeed has only the first
def test_losses_and_weights_are_bit_identical_after_profiling(tmp_path, schedule):
    job = job_of(schedule)
    block = {"mode": "profile", "profile": QUICK_PROFILE}
    finished = run(tmp_path / "profile", perseus=block, **{**job, "steps": 200, "until": ["observe", 2]})
    assert_same_without_perseus(finished, **job)
    folder = finished.folder / "perseus"
    profile = (folder / "profile.csv").read_text().splitlines()
    kinds_and_stages = {tuple(line.split(",")[:2]) for line in profile[1:] if ",tail," not in line}
    assert len(kinds_and_stages) == (8 if schedule == "dualpipev" else 4)
    metadata = json.loads((folder / "profile.json").read_text())
    assert metadata["simulated"] is True
    assert metadata["gpu"] == "simulated A100-SXM"


@pytest.mark.extended
def test_an_error_of_the_start_is_printed_once_and_again_in_the_launchers_summary(tmp_path):
    process = start(tmp_path / "job", ranks=2, perseus={"mode": "run", "frontier": "nowhere"})
    output, _ = process.communicate(timeout=run_log.JOB_GIVE_UP_S)
    assert process.returncode != 0
    message = 'perseus_ds.errors.ConfigError: "frontier": nowhere does not exist on rank 0\'s node.'
    of_ranks, _, of_launcher = output.partition("ChildFailedError")
    assert of_ranks.count(message) == of_launcher.count(message) == 1
    assert 'pipeline_job.py", line' not in output  # no traceback of a rank


BY_HAND = Path(__file__).with_name("handwritten_loop.py")


def run_by_hand(folder, **block):
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"steps": 20, "perseus": block}))
    return run_script(folder, 2, BY_HAND, folder).ranks


@pytest.mark.extended
def test_a_loop_on_plain_torch_distributed_runs_under_a_plan(tmp_path):
    save_true_frontier(tmp_path / "frontier")
    observed = run_by_hand(tmp_path / "observed", **block_in(tmp_path, "observe"))
    planned = run_by_hand(tmp_path / "planned", **block_in(tmp_path, "run", frontier=str(tmp_path / "frontier")))
    assert [rank["losses"] for rank in planned] == [rank["losses"] for rank in observed]
    iterations = run_log.iterations(run_log.records(tmp_path / "run"), "run")
    assert sum(r["clock_changes"] for r in iterations) > 0
