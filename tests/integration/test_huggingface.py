"""Hugging Face models cut into stages train on real ranks like the whole model."""

import json
from pathlib import Path

import pytest
from forked import run_ranks
from job import ENVIRONMENT

pytestmark = [pytest.mark.integration, pytest.mark.extended]
SCRIPT = Path(__file__).parents[1] / "support" / "huggingface_job.py"
TIED = {"gemma2", "qwen3"}


def differences(tmp_path, families):
    """How far training in stages is from training the whole model, by engine and family, on both ranks."""
    tied = [{"family": family, "settings": {"tie_word_embeddings": family in TIED}} for family in families]
    models = [{"engine": "deepspeed", **model} for model in tied]
    models += [{"engine": "torch", "family": f, "settings": {"tie_word_embeddings": False}} for f in families]
    environment = {**ENVIRONMENT, "MODELS": json.dumps(models)}
    code, output = run_ranks(tmp_path, 2, environment, [str(SCRIPT), str(tmp_path)])
    assert code == 0, output[-4000:]
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_trained_alike(tmp_path, families):
    for rank, jobs in enumerate(differences(tmp_path, families)):
        copies = jobs.pop("copies")
        assert copies["same"] == (rank == 0)
        assert "rank 1 could not write" in copies["error"]
        for name, difference in jobs.items():
            for what in ("losses", "parameters", "saved"):
                assert difference[what] <= 1e-5, (rank, name, what)
            # The copy of a tied embedding, and nothing else, is left out of norms of gradients.
            tied = name.startswith("deepspeed") and name.split()[1] in TIED and rank == 1
            assert difference["replicated"] == (96 * 32 if tied else 0), (rank, name)


@pytest.mark.parametrize("families", [["mixtral", "qwen3"], ["gemma2", "gpt_neox", "llama", "olmo2"]])
def test_stages_train_like_the_whole_model(families, tmp_path):
    assert_trained_alike(tmp_path, families)
