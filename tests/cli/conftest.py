"""Fixtures for tests of commands."""

import pytest

from perseus_ds.cli.main import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder, and return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        code = main(words)
        return code, *capsys.readouterr()

    return run
