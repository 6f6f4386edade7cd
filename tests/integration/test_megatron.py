"""Training a GPT with Megatron-Core under Perseus is bitwise identical to training without it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from job import ENVIRONMENT, assert_untouched, block_in, in_modes, run_jobs
from megatron_job import __file__ as script
from run_log import iterations, records
from virtual.job import predicted_over_used

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.pipeline.instruction import Kind

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("job", "ranks", "in_step"),
    [
        ({"stages": 2, "evaluate_every": 20}, 2, 1),
        ({"stages": 2, "chunks": 2, "evaluate_every": 20}, 2, 1),
        ({"stages": 2, "chunks": 2, "experts": 4, "expert": 2, "combined": True, "evaluate_every": 20}, 4, 2),
        ({"stages": 4, "first_layers": 1, "micro_batches": 8, "per_token": True}, 4, 1),
        ({"stages": 2, "tensor": 2}, 4, 2),
        ({"stages": 2, "context": 2}, 4, 2),
        ({"stages": 2, "distributed": True}, 4, 1),
    ],
    ids=[
        *("1F1B", "interleaved", "combined 1F1B", "4 uneven stages, loss per token"),
        *("tensor", "context", "data, distributed optimizer"),
    ],
)
def test_losses_gradients_and_parameters_are_the_same_while_profiled_and_under_a_plan(tmp_path, job, ranks, in_step):
    modes = in_modes(tmp_path, ["auto", "run"], tmp_path / "auto", **job)
    for of_rank in run_jobs(tmp_path, ranks, script, modes):  # in both modes, and without Perseus at the end
        assert_untouched(of_rank)
        assert of_rank["auto"]["phases"][-1] == of_rank["run"]["phases"][-1] == "run"
    profile = StageProfile.load(tmp_path / "auto")
    parts = [part.kind.split()[0] for part in profile.info.layout.parts]
    layers = ["moe" if "experts" in job else "dense"] * job.get("layers", 4)
    assert parts == ["embedding", *layers, "head"]
    assert TimelineFile.load(tmp_path / "auto" / "timeline.json").job.layout == profile.info.layout
    assert (profile.info.tensor_parallel, profile.info.data_parallel) == (in_step, ranks // job["stages"] // in_step)
    combined = {(stage, Kind.FORWARD_BACKWARD) for stage in range(4)} if "combined" in job else set()
    assert {key for key in profile.keys if key[1] is Kind.FORWARD_BACKWARD} == combined
    planned = iterations(records(tmp_path / "run"), "run")
    assert sum(record["clock_changes"] for record in planned) > 0
    promised = planned[0]
    plan = Frontier.load(tmp_path / "auto").plans[promised["plan"]]
    assert promised["predicted_energy_j"] == pytest.approx(ranks / job["stages"] * plan.energy_j)
    if combined:  # time and energy of this order, on GPUs in virtual time
        schedule = profile.info.streams.to_schedule()
        assert max(map(abs, predicted_over_used(tmp_path / "virtual", schedule, (0.02, 0.025, 0.02, 0.03)))) < 0.005


@pytest.mark.extended
def test_the_example_trains_under_the_launcher_as_without_it(tmp_path):
    block = block_in(tmp_path / "launched", "observe")
    outputs = {}
    for name, environment in (("plain", {}), ("launched", {"PERSEUS": json.dumps(block)})):
        folder = tmp_path / name
        folder.mkdir()
        launcher = ["-m", "perseus_ds.launch"] if name == "launched" else []
        arguments = ["--steps", "4", "--log-every", "1", "--micro-batches", "4", "--layers", "4"]
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
    assert len(iterations(records(tmp_path / "launched" / "observe"))) == 3


def test_ranks_that_differ_are_an_error_on_all_of_them_before_training(tmp_path):
    version, other = megatron.core.__version__, "0.14.0"
    observed = {"stages": 2, "steps": 0, "perseus": block_in(tmp_path, "observe")}
    jobs = {
        "modes": {**observed, "differing": [{}, {"mode": "profile"}]},
        "versions": {**observed, "versions": [version, other]},
        "enabled": {**observed, "differing": [{}, {"enabled": False}]},
    }
    first, second = (
        {
            name: re.findall(r"perseus: ranks differ: (\S+) is", found.get("error", ""))
            for name, found in of_rank.items()
        }
        for of_rank in run_jobs(tmp_path, 2, script, jobs)
    )
    assert first == {"modes": ["mode"], "versions": ["megatron-core"], "enabled": ["enabled"]}
    # A rank without Perseus does not wait, so it may have ended before the others report that they use Perseus.
    assert second in (first, {**first, "enabled": []})
