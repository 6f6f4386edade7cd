"""A CI run fails if it skips a test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
CONFTEST = """
from fail_on_skip import FailOnSkip
def pytest_configure(config):
    config.pluginmanager.register(FailOnSkip())
"""
SKIPS = 'import pytest\n@pytest.mark.skip(reason="why not")\ndef test_other(): ...\ndef test_passes(): ...\n'
MISSING = "import pytest\npytest.importorskip('no_such_package')\ndef test_passes(): ...\n"


@pytest.mark.parametrize("tests", [SKIPS, pytest.param(MISSING, marks=pytest.mark.extended)])
def test_no_test_may_be_skipped(tmp_path, tests):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "test_more.py").write_text("def test_passes(): ...\n")
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fails this run: test_some.py" in done.stdout
