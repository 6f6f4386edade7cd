"""The GPT-3 example on real ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_log import GIVE_UP_S

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "examples" / "gpt3" / "train.py")
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
DEEPSPEED = [sys.executable, str(BIN / "deepspeed"), "--num_gpus"]

pytestmark = pytest.mark.integration


def losses(launcher, ranks, folder, *overrides):
    """Train without Perseus and return the losses by step."""
    command = [*launcher, str(ranks), TRAIN, "model=tiny", "perseus.enabled=false", "log_every=1", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not any(folder.iterdir()), "the example left files behind"
    return [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", done.stdout + done.stderr)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_loss_falls_on_stages_started_by_deepspeed(ranks, tmp_path):
    history = losses(DEEPSPEED, ranks, tmp_path, "steps=20")
    assert len(history) == 20
    assert history[-1] < history[0] - 1.5


def test_two_pipelines_of_two_stages_train_as_one_rank_does(tmp_path):
    overrides = ("steps=5", "model.global_batch=16")
    together = losses(TORCHRUN, 4, tmp_path, "stages=2", *overrides)
    alone = losses(TORCHRUN, 1, tmp_path, *overrides)
    assert together == pytest.approx(alone, abs=2e-3)
    assert len(set(alone)) == 5


@pytest.mark.extended
def test_an_untied_head_with_activation_checkpointing_trains_the_same(tmp_path):
    overrides = ("steps=3", "model.global_batch=8", "model.tie_head=false")
    plain = losses(TORCHRUN, 2, tmp_path, *overrides)
    checkpointed = losses(TORCHRUN, 2, tmp_path, "model.activation_checkpointing=true", *overrides)
    assert checkpointed == pytest.approx(plain, abs=1e-3)
