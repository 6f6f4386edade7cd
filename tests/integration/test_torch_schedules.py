"""Training with torch's schedules under Perseus has the same bits, and executes plans."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
import torch
from frontiers import save_random_plan
from job import assert_untouched, block_in, in_modes, run_jobs, run_script
from packaging.version import Version
from pipelines import STAGES_PER_RANK, of_torch
from run_log import iterations, records
from schedule_job import __file__ as script

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.pipeline.instruction import Instruction, Kind

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_pipelining" / "train.py"
MICRO_BATCHES = 4
# If two stages of a rank follow each other, eval() of torch 2.13 itself fails.
WITHOUT_EVAL = ("ZBVZeroBubble", "DualPipeV")
# Jobs with features of newer versions of torch.
SINCE = {
    "2.13": {
        "FSDP, 1F1B": {"schedule": "1F1B", "fsdp": True},
        "FSDP, interleaved": {"schedule": "Interleaved1F1B", "fsdp": True},
    },
    "2.14.1": {
        "split by the caller, 1F1B": {"schedule": "1F1B", "split": True},
        "split by the caller, interleaved": {"schedule": "Interleaved1F1B", "split": True},
    },
    "2.15": {
        "one send outstanding": {"schedule": "Interleaved1F1B", "runtime": {"max_outstanding_sends": 1}},
        "FSDP, gathered ahead": {
            "schedule": "InterleavedZeroBubble",
            "fsdp": True,
            "runtime": {"unshard_lookahead": "auto", "max_active_stages": 2},
        },
        "FSDP, reduction awaited later": {
            "schedule": "Interleaved1F1B",
            "fsdp": True,
            "runtime": {"defer_reduce_grad_wait": True},
        },
        "FSDP, gradients of two calls": {"schedule": "Interleaved1F1B", "fsdp": True, "calls_per_step": 2},
    },
}
JOBS = {}
"""Those of them that the installed version can train, by name."""
for version, jobs in SINCE.items():
    if Version(version) <= Version(torch.__version__):
        JOBS |= jobs


def train_in(folder, name, modes):
    """Assert that training has the same bits in each mode, and that run mode executes its plan."""
    job = {"schedule": name, "micro_batches": MICRO_BATCHES}
    if name not in WITHOUT_EVAL:
        job["evaluate_after"] = 2
    plan = save_random_plan(folder / "frontier", of_torch(name, 2, MICRO_BATCHES))
    for of_rank in run_jobs(folder, 2, script, in_modes(folder, modes, folder / "frontier", **job)):
        assert_untouched(of_rank)
    assert_kept(folder / "run", plan)


def test_plans_leave_losses_weights_and_random_numbers_as_they_are(tmp_path):
    train_in(tmp_path, "ZBVZeroBubble", ["run"])


@pytest.mark.extended
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_losses_weights_and_random_numbers_are_the_same_while_profiled_and_under_a_plan(tmp_path, name):
    train_in(tmp_path, name, ["run", "auto"])
    order = of_torch(name, 2, MICRO_BATCHES)
    kinds = {(i.stage, i.kind) for stream in order.instructions for i in stream if i.kind is not Kind.TAIL}
    profile = StageProfile.load(tmp_path / "auto")
    assert kinds <= set(profile.keys)
    assert (profile.info.layout.engine, len(profile.info.layout.stages)) == ("torch", profile.info.stages)
    phases = [phase for phase, _ in groupby(r["phase"] for r in iterations(records(tmp_path / "auto")))]
    assert phases[:4] == ["calibrate", "warm-up", "profile", "optimizing"]


@pytest.mark.extended
@pytest.mark.parametrize("name", JOBS)
def test_sharded_stages_and_newer_arguments_leave_training_as_it_is_and_reach_a_plan(tmp_path, name):
    job = {"micro_batches": MICRO_BATCHES, **JOBS[name]}
    jobs = in_modes(tmp_path, ["auto"], tmp_path / "auto", **job)
    for of_rank in run_jobs(tmp_path, 2, script, jobs):
        assert_untouched(of_rank)
        assert of_rank["auto"]["phases"][-1] == "run"


def assert_kept(folder, plan):
    """Assert that timeline.json has one iteration under the plan, with all passes in order."""
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
    jobs = {"observe": {**job, "perseus": block_in(tmp_path, "observe")}, "without": job}
    for of_rank in run_jobs(tmp_path, 4, script, jobs):
        assert_untouched(of_rank)
    (*_, last) = (r for r in iterations(records(tmp_path / "observe")) if r["energy_j"] is not None)
    assert len(last["energy_by_pipeline_j"]) == 2
    assert len(last["energy_by_rank_j"]) == 4


@pytest.mark.extended
def test_the_example_trains_and_prints_its_table(tmp_path):
    block = json.dumps({"device": "simulated", "simulated": {"longest_instruction_s": 0.012}})
    options = [
        "--schedule",
        "ZBVZeroBubble",
        "--mode",
        "observe",
        "--steps",
        "4",
        "--log-every",
        "1",
        "--perseus",
        block,
    ]
    small = ["--width", "16", "--length", "16", "--rows", "1", "--micro-batches", "4", "--out", str(tmp_path / "out")]
    output = run_script(tmp_path, 2, EXAMPLE, *options, "--perseus", block, *small).printed
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert re.search(r"phase +iterations +time \[s\] +energy \[J\] +SIMULATED GPUs", output)
    counts = dict(re.findall(r"^(calibrate|observe) +(\d+) ", output, re.M))
    assert sum(map(int, counts.values())) == 4
