"""An example says which packages to install where they are missing."""

import subprocess
import sys
from pathlib import Path

import pytest

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
