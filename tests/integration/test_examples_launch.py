"""The examples on real ranks with simulated GPUs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import free_port
from job import ENVIRONMENT, run_script
from run_log import JOB_GIVE_UP_S

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.cli.main import main

pytestmark = [pytest.mark.integration, pytest.mark.extended]
ROOT = Path(__file__).parents[2]
QUICK = ["log_every=1", "perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.02"]
QUICK_PROFILE = [
    "perseus.profile.sampling=stride",
    "perseus.profile.clock_stride=8",
    "perseus.profile.min_clock_mhz=900",
]


def script_of(example):
    return str(ROOT / "examples" / example / "train.py")


def train(example, ranks, folder, *overrides):
    """Train, and return the losses by step and the records of the iterations."""
    finished = run_script(folder, ranks, script_of(example), *QUICK, *overrides)
    return losses_in(finished.printed), finished.iterations()


def losses_in(output):
    return [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", output)]


@pytest.mark.parametrize(
    ("example", "fall", "overrides"),
    [
        ("bert", 1.0, ["model.activation_checkpointing=true"]),
        ("gpt3", 1.0, ["model.activation_checkpointing=true"]),
        ("huggingface", 1.0, ["model.gradient_checkpointing=true", "evaluation.every=7"]),
        ("wide_resnet", 0.5, ["model.partition=[0,2,9]"]),
    ],
)
def test_losses_fall_and_a_plan_from_the_examples_own_profile_changes_none(example, fall, overrides, tmp_path):
    common = [*overrides, "steps=20", "micro_batches=4"]
    profile, frontier = tmp_path / "profile", tmp_path / "frontier"
    train(example, 2, profile, "--profile", *QUICK_PROFILE, *overrides, "steps=100000", "micro_batches=4")
    assert main(["optimize", f"{profile}/perseus", "--out", str(frontier)]) == 0
    default_losses, _ = train(example, 2, tmp_path / "default", "perseus.mode=observe", *common)
    plan = ["perseus.mode=run", f"perseus.frontier={frontier}", "perseus.goal={max_slowdown: null}"]
    losses, planned = train(example, 2, tmp_path / "plan", *plan, *common)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - fall
    assert losses == default_losses
    assert {r["plan"] for r in planned if r["phase"] == "run"} == {len(Frontier.load(frontier).plans) - 1}
    assert sum(r["clock_changes"] + r["clock_skips"] for r in planned) > 0


@pytest.mark.parametrize(
    ("example", "override", "message"),
    [
        ("gpt3", "perseus.goal.max_slowdown=nonsense", "perseus.goal.max_slowdown: expected a valid number"),
        ("bert", "perseus.mod=run", "Could not override 'perseus.mod'."),
    ],
)
def test_a_wrong_option_is_a_message_and_no_traceback(tmp_path, example, override, message):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**ENVIRONMENT, **rank, "MASTER_PORT": str(free_port()), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, script_of(example), override]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=JOB_GIVE_UP_S, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
