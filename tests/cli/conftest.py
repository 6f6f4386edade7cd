"""What tests of commands share: an empty current folder, and a command run in it."""

import pytest

from perseus_ds.cli.main import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder, on a terminal of 80 columns; return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = main(words)
        return code, *capsys.readouterr()

    return run
