"""Stages of Hugging Face models train like the whole model, also in the example."""

import asyncio.base_events
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job import ENVIRONMENT, run_script
from run_log import JOB_GIVE_UP_S
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.integration, pytest.mark.extended]

SCRIPT = Path(__file__).with_name("huggingface_job.py")


def test_stages_train_like_the_whole_model_however_its_tokens_are_spread_over_micro_batches_and_ranks(tmp_path):
    for rank, models in enumerate(run_script(tmp_path, 4, SCRIPT, tmp_path).ranks):
        assert "rank 1 could not write" in models.pop("error")
        assert models.pop("fsdp") <= 1e-5
        for name, difference in models.items():
            for what in ("losses", "parameters", "saved"):
                assert difference[what] <= 1e-5, (rank, name, what)
            # Only the copy of a tied embedding is excluded from gradient norms.
            tied = name == "deepspeed qwen3" and difference["is_last"]
            assert difference["replicated"] == (96 * 32 if tied else 0), (rank, name)


TRAIN = str(Path(__file__).parents[2] / "examples" / "huggingface" / "train.py")
TEXTS = asyncio.base_events.__file__
SIMULATED = ["perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.01"]
SIZES = ["log_every=1", "global_batch=8", "model.config.num_hidden_layers=4"]


def train(ranks, folder, *overrides):
    """Return the losses of the steps and those of evaluations."""
    home = {"HF_HOME": str(folder / "cache")}
    output = run_script(folder, ranks, TRAIN, f"data.path={TEXTS}", *SIZES, *overrides, environment=home).printed
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


def test_data_that_do_not_fit_are_an_error_without_traceback_before_training(tmp_path):
    environment = {
        **ENVIRONMENT,
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", TRAIN]
    command += ["model.config.vocab_size=200"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=JOB_GIVE_UP_S, check=False
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("perseus_ds.errors.ConfigError"))
    assert "the tokenizer has 259 tokens, the model 200" in line
    assert TRAIN + '", line' not in done.stderr
