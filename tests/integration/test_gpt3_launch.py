"""The GPT-3 example on real ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import free_port, run_ranks
from job import ENVIRONMENT
from run_log import GIVE_UP_S

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "examples" / "gpt3" / "train.py")
DEEPSPEED = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--master_port"]
PLAIN = ["model=tiny", "perseus.enabled=false", "log_every=1"]

pytestmark = pytest.mark.integration


def losses_in(output):
    return [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", output)]


def losses(ranks, folder, *overrides):
    """Train without Perseus and return the losses by step."""
    folder.mkdir()
    returncode, output = run_ranks(folder, ranks, ENVIRONMENT, [TRAIN, *PLAIN, *overrides])
    assert returncode == 0, output[-3000:]
    return losses_in(output)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_loss_falls_on_stages_started_by_deepspeed(ranks, tmp_path):
    command = [*DEEPSPEED, str(free_port()), "--num_gpus", str(ranks), TRAIN, *PLAIN, "steps=12"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not any(tmp_path.iterdir()), "the example left files behind"
    history = losses_in(done.stdout + done.stderr)
    assert len(history) == 12
    assert history[-1] < history[0] - 1


@pytest.mark.extended
def test_two_pipelines_of_two_stages_train_as_one_rank_does(tmp_path):
    overrides = ("steps=5", "model.global_batch=16")
    together = losses(4, tmp_path / "together", "stages=2", *overrides)
    alone = losses(1, tmp_path / "alone", *overrides)
    assert together == pytest.approx(alone, abs=2e-3)
    assert len(set(alone)) == 5


@pytest.mark.extended
def test_an_untied_head_with_activation_checkpointing_trains_the_same(tmp_path):
    overrides = ("steps=3", "model.global_batch=8", "model.tie_head=false")
    plain = losses(2, tmp_path / "plain", *overrides)
    checkpointed = losses(2, tmp_path / "checkpointed", "model.activation_checkpointing=true", *overrides)
    assert checkpointed == pytest.approx(plain, abs=1e-3)
