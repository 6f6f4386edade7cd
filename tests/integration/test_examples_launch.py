"""The examples on real ranks with simulated GPUs, in every mode."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_log
from forked import run_ranks
from job import ENVIRONMENT

from perseus_ds.artifacts.frontier import Frontier

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
QUICK = ["log_every=1", "perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.02"]
QUICK_PROFILE = [
    "perseus.profile.sampling=stride",
    "perseus.profile.clock_stride=8",
    "perseus.profile.min_clock_mhz=900",
]

pytestmark = pytest.mark.integration


def never():
    return False


def train(example, ranks, folder, *overrides, until=never):
    """Train, and return the losses by step and the records of the iterations."""
    folder.mkdir()
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    script = str(ROOT / "examples" / example / "train.py")
    returncode, output = run_ranks(folder, ranks, environment, [script, *QUICK, *overrides], until=until)
    assert returncode == 0, output[-4000:]
    losses = [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", output)]
    return losses, run_log.iterations(run_log.records(folder / "perseus"))


@pytest.mark.extended
@pytest.mark.parametrize(("example", "fall"), [("bert", 1.0), ("huggingface", 1.0), ("wide_resnet", 0.5)])
def test_loss_falls_on_four_stages(example, fall, tmp_path):
    losses, records = train(example, 4, tmp_path / "run", "perseus.mode=observe", "steps=16", "micro_batches=4")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - fall
    assert all(record["simulated"] and record["energy_j"] > 0 for record in records)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        ("bert", ["model.activation_checkpointing=true"]),
        ("gpt3", ["model.activation_checkpointing=true"]),
        ("huggingface", ["model.gradient_checkpointing=true", "evaluation.every=7"]),
        ("wide_resnet", ["model.partition=[0,2,9]"]),
    ],
)
def test_a_plan_from_the_examples_own_profile_changes_no_loss(example, overrides, tmp_path):
    common = [*overrides, "steps=20", "micro_batches=4"]
    profile, frontier = tmp_path / "profile", tmp_path / "frontier"
    train(example, 2, profile, "--profile", *QUICK_PROFILE, *overrides, "steps=100000", "micro_batches=4")
    optimize = [str(BIN / "perseus-ds"), "optimize", f"profile={profile}/perseus", f"out={frontier}"]
    optimized = subprocess.run(optimize, check=False, capture_output=True, text=True)
    assert optimized.returncode == 0, optimized.stderr + (profile / "output.log").read_text()[-4000:]
    default_losses, _ = train(example, 2, tmp_path / "default", "perseus.mode=observe", *common)
    plan = ["perseus.mode=run", f"perseus.frontier={frontier}", "perseus.policy={name: energy_optimal}"]
    losses, planned = train(example, 2, tmp_path / "plan", *plan, *common)
    assert losses == default_losses
    assert {r["plan"] for r in planned if r["phase"] == "run"} == {len(Frontier.load(frontier).plans) - 1}
    assert sum(r["clock_changes"] + r["clock_skips"] for r in planned) > 0


@pytest.mark.extended
@pytest.mark.parametrize("example", ["bert", "huggingface", "wide_resnet"])
def test_auto_mode_trains_under_a_plan(example, tmp_path):
    folder = tmp_path / "run"

    def planned():
        return run_log.iterations(run_log.records(folder / "perseus"), "run")

    auto = ["perseus.mode=auto", "perseus.cache=false", "steps=100000", "micro_batches=4"]
    train(example, 2, folder, *auto, until=lambda: len(planned()) > 3)
    assert all(record["plan"] is not None for record in planned())
