"""Hydra configures the logging of a program; the examples keep it from hiding what Perseus warns of."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("example", ["bert", "gpt3", "wide_resnet"])
def test_the_examples_leave_loggers_as_they_are(example):
    with initialize_config_dir(str(CONFIGS / example), version_base=None):
        hydra = compose("config", return_hydra_config=True).hydra
    for logging in (hydra.job_logging, hydra.hydra_logging):
        assert logging.root is None
        assert not logging.disable_existing_loggers
