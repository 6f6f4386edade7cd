"""Stages on real ranks give every trained token of a batch the same weight."""

from pathlib import Path

import pytest
from job import run_script

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("token_weights_job.py")


def test_losses_and_gradients_are_the_whole_models_however_tokens_are_spread_over_micro_batches_and_ranks(tmp_path):
    for rank, engines in enumerate(run_script(tmp_path, 4, SCRIPT, tmp_path).ranks):
        for engine, difference in engines.items():
            assert difference["gradients"] <= 1e-5, (rank, engine)
            if engine == "deepspeed" or difference["is_last"]:
                assert difference["losses"] <= 1e-5, (rank, engine)
