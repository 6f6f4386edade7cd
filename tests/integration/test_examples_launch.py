"""The examples on real ranks with simulated GPUs, in every mode."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_ranks
from job import ENVIRONMENT

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
QUICK = ["model=tiny", "log_every=1", "perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.02"]
QUICK_PROFILE = [
    "perseus.profile.sampling=stride",
    "perseus.profile.clock_stride=16",
    "perseus.profile.max_window_s=0.2",
]

pytestmark = pytest.mark.integration


def train(example, ranks, folder, *overrides):
    """Train and return the losses by step, and what Perseus recorded of each iteration."""
    folder.mkdir()
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    script = str(ROOT / "examples" / example / "train.py")
    returncode, output = run_ranks(folder, ranks, environment, [script, *QUICK, *overrides])
    assert returncode == 0, output[-4000:]
    records = [json.loads(line) for line in (folder / "perseus" / "run.jsonl").read_text().splitlines()]
    losses = [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", output)]
    return losses, [record for record in records if "event" not in record]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("example", "fall"), [("bert", 1.0), ("wide_resnet", 0.5)])
def test_loss_falls(example, fall, ranks, tmp_path):
    losses, records = train(example, ranks, tmp_path / "run", "perseus.mode=observe", "steps=16", "micro_batches=4")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - fall
    assert all(record["simulated"] and record["energy_j"] > 0 for record in records)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        ("bert", ["model.activation_checkpointing=true"]),
        ("gpt3", ["model.activation_checkpointing=true"]),
        ("wide_resnet", ["model.partition=[0,2,9]"]),
    ],
)
def test_a_plan_from_the_examples_own_profile_saves_energy_and_changes_no_loss(example, overrides, tmp_path):
    common = [*overrides, "steps=20", "micro_batches=4"]
    profile, frontier = tmp_path / "profile", tmp_path / "frontier"
    train(example, 2, profile, "--profile", *QUICK_PROFILE, *overrides, "steps=64", "micro_batches=4")
    optimize = [str(BIN / "perseus-ds"), "optimize", f"profile={profile}/perseus", f"out={frontier}"]
    subprocess.run(optimize, check=True, capture_output=True)
    default_losses, default = train(example, 2, tmp_path / "default", "perseus.mode=observe", *common)
    plan = ["perseus.mode=run", f"perseus.frontier={frontier}", "perseus.policy={name: energy_optimal}"]
    losses, planned = train(example, 2, tmp_path / "plan", *plan, *common)
    assert losses == default_losses
    # Sums, since an iteration is shorter than what the energy counter takes to move.
    assert sum(r["energy_j"] for r in planned[4:]) < 0.97 * sum(r["energy_j"] for r in default[4:])


@pytest.mark.extended
@pytest.mark.parametrize("example", ["bert", "wide_resnet"])
def test_auto_mode_trains_under_a_plan(example, tmp_path):
    auto = ["perseus.mode=auto", "perseus.cache=false"]
    _, records = train(example, 2, tmp_path / "run", *auto, "steps=150", "micro_batches=4")
    planned = [record for record in records if record["phase"] == "run"]
    assert len(planned) > 10  # not the last for certain: on a busy machine times drift, and it profiles again
    assert all(record["plan"] is not None for record in planned)
