"""Outputs that cannot be written are errors in words, and are found before anything is computed."""

import subprocess
import sys

import pytest
from full_disk import disk_with
from pipelines import synthetic_profile

from perseus_ds.cli.main import main

COMMANDS = {
    "optimize": ["optimize", "run", "plans=4"],
    "export": ["export", "run"],
    "import": ["import", "plans", "profile=run"],
    "schedules": ["schedules", "run", "schedules=[1f1b]", "micro_batches=[3]", "plans=4"],
    "profile merge": ["profile", "merge", "run", "other=run"],
    "profile convert": ["profile", "convert", "run"],
    "plot": ["plot", "run"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """The current folder, with a profile, a frontier and its plans for Zeus."""
    monkeypatch.chdir(tmp_path)
    synthetic_profile(2, blocking_power_w=80.0, micro_batches=3).save("run/profile.csv")
    assert main(["optimize", "run", "out=run", "plans=4"]) == 0
    assert main(["export", "run", "out=plans"]) == 0
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_folder_that_cannot_be_one_is_named(folder, capsys, command):
    for out in ("run/profile.csv", "run/profile.csv/below"):
        assert main([*COMMANDS[command], f"out={out}"]) == 2
        assert f"{out}: cannot be a folder (run/profile.csv is a file)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "planning"), [("optimize", "optimize"), ("schedules", "schedule_comparison.compare_schedules")]
)
def test_an_output_folder_that_cannot_be_one_is_an_error_before_planning(folder, monkeypatch, command, planning):
    monkeypatch.setattr(f"perseus_ds.optimizer.{planning}", None)
    assert main([*COMMANDS[command], "out=run/profile.csv"]) == 2


def test_a_folder_without_permission_to_write_is_an_error_before_planning(folder, monkeypatch, capsys):
    monkeypatch.setattr("perseus_ds.cli.output.os.access", lambda path, how: str(path) != "run")
    assert main([*COMMANDS["optimize"], "out=run/out"]) == 2
    assert "run/out: nothing can be written to run. Give another folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_an_error_that_names_the_file(folder, capsys, command):
    with disk_with(0):
        code = main([*COMMANDS[command], "out=out"])
    err = capsys.readouterr().err
    assert code == 2
    assert f"perseus-ds {command.split()[0]}: out/" in err
    assert "File too large" in err
    assert not list((folder / "out").iterdir())


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["help", "optimize"], []])
def test_text_that_cannot_be_printed_is_an_error_in_words(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "perseus_ds", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.endswith(": No space left on device.\n")
    assert len(done.stderr.splitlines()) == 1
