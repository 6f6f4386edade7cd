"""Training a GPT by Megatron-Core under Perseus is, bit for bit, training without it; Megatron itself is untouched."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from forked import run_ranks
from job import ENVIRONMENT
from megatron_job import __file__ as script
from run_log import iterations, records

pytestmark = pytest.mark.integration
SIMULATED = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8}
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ONE_F_ONE_B = {"stages": 2, "evaluate_after": 3}


def block_in(folder, mode, **keys):
    common = {"device": "simulated", "simulated": SIMULATED, "profile": PROFILE, "cache": False}
    return {"mode": mode, "output_dir": str(folder / mode), **common, **keys}


def run(folder, job, modes, ranks):
    """Train in each mode and last without Perseus; return what each rank reported, by mode."""
    block = partial(block_in, folder)
    jobs = {
        "observe": {"steps": 6, "perseus": block("observe")},
        "profile": {"until": ["observe", 2], "perseus": block("profile")},
        "auto": {"until": ["run", 3], "perseus": block("auto", policy={"name": "energy_optimal"})},
        "run": {"steps": 8, "perseus": block("run", frontier=str(folder / "auto"))},
        "disabled": {"steps": 3, "perseus": {"enabled": False}},
        "without": {},
    }
    return run_all(folder, {mode: {**job, **jobs[mode]} for mode in (*modes, "without")}, ranks)


def run_all(folder, jobs, ranks):
    """Train one job after the other; return what each rank reported, by the names of the jobs."""
    (folder / "jobs.json").write_text(json.dumps(list(jobs.values())))
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    returncode, output = run_ranks(folder, ranks, environment, [script, str(folder)])
    assert returncode == 0, output[-4000:]
    of_ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [dict(zip(jobs, done, strict=True)) for done in of_ranks]


def assert_untouched(folder, job, modes, ranks):
    for of_rank in run(folder, job, modes, ranks):
        without = of_rank["without"]
        for mode, done in of_rank.items():
            steps = len(done["weights"])
            assert steps > 2, mode
            assert done["losses"] == without["losses"][: len(done["losses"])], mode
            for what in ("norms", "weights", "random_after"):
                assert done[what] == without[what][:steps], (mode, what)
            assert not any(done["left"]), mode
        if "auto" in modes:
            assert of_rank["auto"]["phases"][-1] == of_rank["run"]["phases"][-1] == "run"


def test_plans_leave_losses_gradients_and_parameters_as_they_are(tmp_path):
    assert_untouched(tmp_path, ONE_F_ONE_B, ["observe", "auto", "run"], ranks=2)
    observed = iterations(records(tmp_path / "observe"))
    # The first iteration shows the order, and evaluations are no iterations.
    assert [record["iteration"] for record in observed] == [1, 2, 3, 4, 5]
    assert sum(record["clock_changes"] for record in iterations(records(tmp_path / "run"), "run")) > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        (ONE_F_ONE_B, 2),
        ({"stages": 2, "chunks": 2, "evaluate_after": 3}, 2),
        ({"stages": 4, "first_layers": 1, "micro_batches": [8]}, 4),
        ({"stages": 2, "tensor": 2}, 4),
        ({"stages": 2}, 4),
    ],
    ids=["1F1B", "interleaved", "4 uneven stages", "tensor parallel", "data parallel"],
)
def test_every_mode_leaves_losses_gradients_and_parameters_as_they_are(tmp_path, job, ranks):
    assert_untouched(tmp_path, job, ["observe", "profile", "auto", "run", "disabled"], ranks)


@pytest.mark.extended
@pytest.mark.parametrize("more", [[], ["--virtual-stages", "2", "--layers", "4"]], ids=["1F1B", "interleaved"])
def test_the_example_trains_under_the_launcher_as_without_it(tmp_path, more):
    block = {"mode": "observe", "device": "simulated", "simulated": SIMULATED}
    outputs = {}
    for name, environment in (("plain", {}), ("launched", {"PERSEUS": json.dumps(block)})):
        folder = tmp_path / name
        folder.mkdir()
        launcher = ["-m", "perseus_ds.launch"] if name == "launched" else []
        arguments = ["--steps", "4", "--log-every", "1", "--micro-batches", "4", "--layers", "4", *more]
        finished = subprocess.run(
            [*TORCHRUN, *launcher, str(EXAMPLE), *arguments],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        outputs[name] = re.findall(r"step +\d+  loss [\d.]+", finished.stdout)
    assert outputs["launched"] == outputs["plain"]
    assert len(outputs["plain"]) == 4
    assert len(iterations(records(tmp_path / "launched" / "perseus"))) == 3


@pytest.mark.extended
def test_a_batch_size_that_changes_is_followed(tmp_path):
    job = {"stages": 2, "micro_batches": [4, 4, 4, 6]}
    assert_untouched(tmp_path, job, ["observe"], ranks=2)
    assert len(iterations(records(tmp_path / "observe"))) == 4


@pytest.mark.extended
def test_checkpoints_go_from_jobs_with_perseus_to_jobs_without_and_back(tmp_path):
    job, folders = {"stages": 2, "steps": 3}, {name: str(tmp_path / name) for name in ("with", "without")}
    jobs = {
        "saved with": {**job, "save": folders["with"], "perseus": block_in(tmp_path, "observe")},
        "saved without": {**job, "save": folders["without"]},
        "loaded without": {**job, "load": folders["with"]},
        "loaded with": {**job, "load": folders["without"], "perseus": block_in(tmp_path / "again", "observe")},
    }
    for of_rank in run_all(tmp_path, jobs, ranks=2):
        for what in ("losses", "weights"):
            assert of_rank["loaded without"][what] == of_rank["loaded with"][what]
            assert of_rank["saved with"][what] == of_rank["saved without"][what]
        assert of_rank["loaded with"]["weights"] != of_rank["saved with"]["weights"]
