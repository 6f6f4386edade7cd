"""The example for Hugging Face models on real ranks: checkpoints, what it saves, and its errors."""

import asyncio.base_events
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_ranks
from job import ENVIRONMENT
from run_log import GIVE_UP_S
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAIN = str(Path(__file__).parents[2] / "examples" / "huggingface" / "train.py")
TEXTS = asyncio.base_events.__file__
SIMULATED = ["perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.01"]
SIZES = ["log_every=1", "global_batch=8", "model.config.num_hidden_layers=4"]

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def train(ranks, folder, *overrides):
    """Return the losses of the steps, and those of evaluations."""
    folder.mkdir(exist_ok=True)
    environment = {**ENVIRONMENT, "HF_HOME": str(folder / "cache")}
    command = [TRAIN, f"data.path={TEXTS}", *SIZES, *overrides]
    returncode, output = run_ranks(folder, ranks, environment, command)
    assert returncode == 0, output[-4000:]
    return re.findall(r"steps: \d+ loss: ([\d.]+)", output), re.findall(r"evaluation loss: ([\d.]+)", output)


def test_a_run_that_continues_from_a_checkpoint_under_perseus_ends_as_one_without_either(tmp_path):
    steps = ["steps=4", "evaluation.every=2", "checkpoint.path=checkpoints", "checkpoint.every=2"]
    losses, evaluations = train(2, tmp_path, *steps, "perseus.enabled=false", "output_dir=whole")
    assert len(set(losses)) == 4
    assert len(set(evaluations)) == 2
    shutil.rmtree(tmp_path / "checkpoints" / "global_step4")
    (tmp_path / "checkpoints" / "latest").write_text("global_step2")
    continued = train(2, tmp_path, *steps, "perseus.mode=observe", *SIMULATED, "output_dir=continued")
    assert continued == (losses[2:], evaluations[1:])
    whole, again = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "continued"))
    weights = dict(again.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "continued")
    assert tokenizer.decode(tokenizer.encode("the clock", add_special_tokens=False)) == "the clock"


def test_two_pipelines_of_two_stages_train_as_one_rank_does_and_are_trained_on(tmp_path):
    steps = ["steps=12", "perseus.enabled=false"]
    together, _ = train(4, tmp_path, *steps, "stages=2", "micro_batch_size=2")
    alone, _ = train(1, tmp_path / "alone", *steps, "micro_batch_size=2")
    assert [float(loss) for loss in together] == pytest.approx([float(loss) for loss in alone], abs=2e-3)
    trained = tmp_path / "trained_model"
    (first,), _ = train(2, tmp_path / "more", "steps=1", "perseus.enabled=false", f"model.name={trained}")
    assert float(first) < float(together[0]) - 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=someone/model", 'run "hf download someone/model --local-dir FOLDER"'),
        ("model.config.vocab_size=200", "the tokenizer has 259 tokens, the model 200"),
    ],
)
def test_what_does_not_fit_is_an_error_without_traceback_before_training(override, message, tmp_path):
    environment = {
        **ENVIRONMENT,
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", TRAIN, override]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("perseus_ds.errors.ConfigError"))
    assert message in line
    assert TRAIN + '", line' not in done.stderr
