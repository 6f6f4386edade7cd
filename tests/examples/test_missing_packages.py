"""The examples report missing packages and show warnings of Perseus."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import runpy, sys
sys.modules["transformers"] = None  # as if it were not installed
runpy.run_path(sys.argv[1])
"""


@pytest.mark.parametrize(
    "name", ["gpt3", *(pytest.param(name, marks=pytest.mark.extended) for name in ("bert", "huggingface"))]
)
def test_without_transformers_it_says_what_to_install(name):
    train = EXAMPLES / name / "train.py"
    finished = subprocess.run([sys.executable, "-c", SCRIPT, train], capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert 'pip install ".[examples]"' in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("example", ["bert", "gpt3", "wide_resnet"])
def test_the_examples_leave_loggers_as_they_are(example):
    with initialize_config_dir(str(CONFIGS / example), version_base=None):
        hydra = compose("config", return_hydra_config=True).hydra
    for logging in (hydra.job_logging, hydra.hydra_logging):
        assert logging.root is None
        assert not logging.disable_existing_loggers
