"""Training by torch's schedules under Perseus is, bit for bit, training without it; plans are kept."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
from forked import run_ranks
from frontiers import save_random_plan
from run_log import iterations, records
from schedule_runs import STAGES_PER_RANK, run
from torch.distributed.pipelining.schedules import get_schedule_class

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.engines.torch_pipelining.order import read_class
from perseus_ds.pipeline.instruction import Instruction, Kind

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_pipelining" / "train.py"
MICRO_BATCHES = 4
SIMULATED = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8}
# Where two stages of a rank follow each other, eval() of torch 2.13 itself fails.
WITHOUT_EVAL = ("ZBVZeroBubble", "DualPipeV")


def order_of(name):
    return read_class(
        get_schedule_class(name), ranks=2, stages_per_rank=STAGES_PER_RANK[name], micro_batches=MICRO_BATCHES
    )


def jobs_of(tmp_path, name, modes):
    """A job for each mode, and last the one without Perseus."""
    base = {"schedule": name, "micro_batches": MICRO_BATCHES}
    if name not in WITHOUT_EVAL:
        base["evaluate_after"] = 2

    def block(mode, **keys):
        common = {"device": "simulated", "simulated": SIMULATED, "profile": PROFILE, "cache": False}
        return {"mode": mode, "output_dir": str(tmp_path / mode), **common, **keys}

    jobs = {
        "observe": {"steps": 5, "perseus": block("observe")},
        "run": {"steps": 7, "perseus": block("run", frontier=str(tmp_path / "frontier"))},
        "profile": {"until": ["observe", 2], "perseus": block("profile")},
        "auto": {"until": ["run", 2], "perseus": block("auto", policy={"name": "energy_optimal"})},
        "disabled": {"steps": 5, "perseus": {"enabled": False}},
        "without": {},
    }
    return {mode: {**base, **jobs[mode]} for mode in (*modes, "without")}


def assert_untouched(tmp_path, name, modes):
    """Train in each mode and without Perseus; everything is the same bits, and the plan of run mode was kept."""
    plan = save_random_plan(tmp_path / "frontier", order_of(name))
    jobs = jobs_of(tmp_path, name, modes)
    for ranks in run(tmp_path / "jobs", list(jobs.values())).ranks:
        done = dict(zip(jobs, ranks, strict=True))
        for mode, job in done.items():
            steps = len(job["weights"])
            assert steps > 2, mode
            assert job["losses"] == done["without"]["losses"][: len(job["losses"])], mode
            assert job["weights"] == done["without"]["weights"][:steps], mode
            assert job["random"] == done["without"]["random_after"][steps - 1], mode
            assert job["left"] == [[], []], mode
    assert_kept(tmp_path / "run", plan)


def test_plans_leave_losses_weights_and_random_numbers_as_they_are(tmp_path):
    assert_untouched(tmp_path, "ZBVZeroBubble", ["observe", "run"])


@pytest.mark.extended
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_every_mode_leaves_losses_weights_and_random_numbers_as_they_are(tmp_path, name):
    assert_untouched(tmp_path, name, ["observe", "run", "profile", "auto", "disabled"])
    order = order_of(name)
    kinds = {(i.stage, i.kind) for stream in order.instructions for i in stream if i.kind is not Kind.TAIL}
    assert kinds <= set(StageProfile.load(tmp_path / "profile").keys)
    phases = [phase for phase, _ in groupby(r["phase"] for r in iterations(records(tmp_path / "auto")))]
    assert phases[:4] == ["calibrate", "warm-up", "profile", "optimizing"]


def assert_kept(folder, plan):
    """One iteration under the plan lies in timeline.json: every pass in its place, at its clock."""
    (iteration,) = [i for i in TimelineFile.load(folder / "timeline.json").iterations if i.phase == "run"]
    for rank, operations in enumerate(iteration.ranks):
        passes = [o for o in operations if o.kind not in ("tail", "other")]
        assert tuple(Instruction(o.stage, Kind(o.kind), o.micro_batch) for o in passes) == plan.instructions[rank]
        assert tuple(o.clock_mhz for o in passes) == plan.clocks_mhz[rank]
        assert [o.kind for o in operations].count("tail") == 1
    assert sum(r["clock_changes"] for r in iterations(records(folder), "run")) > 0


@pytest.mark.extended
def test_two_pipelines_of_data_parallel_stages_are_planned_together(tmp_path):
    job = {"schedule": "1F1B", "micro_batches": MICRO_BATCHES, "pipelines": 2, "steps": 5}
    block = {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path / "perseus"), "simulated": SIMULATED}
    ran = run(tmp_path / "jobs", [{**job, "perseus": block}, job], ranks=4)
    for done, without in ran.ranks:
        assert done["losses"] == without["losses"]
        assert done["weights"] == without["weights"]
    (*_, last) = iterations(records(tmp_path / "perseus"))
    assert len(last["energy_by_pipeline_j"]) == 2
    assert len(last["energy_by_rank_j"]) == 4


@pytest.mark.extended
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_the_example_trains_by_every_schedule_and_prints_its_table(tmp_path, name):
    block = json.dumps({"device": "simulated", "simulated": SIMULATED})
    options = ["--schedule", name, "--mode", "observe", "--steps", "4", "--log-every", "1", "--perseus", block]
    small = ["--width", "16", "--length", "16", "--rows", "1", "--micro-batches", "4", "--out", str(tmp_path / "out")]
    code, output = run_ranks(tmp_path, 2, {"OMP_NUM_THREADS": "1"}, [str(EXAMPLE), *options, *small])
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert re.search(r"phase +iterations +time \[s\] +energy \[J\] +SIMULATED GPUs", output)
    assert re.search(r"observe +3 ", output)
