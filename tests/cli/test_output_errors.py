"""Outputs that cannot be written are reported before anything is computed."""

import shutil

import pytest
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.artifacts.frontier import export_zeus
from perseus_ds.optimizer import optimize

COMMANDS = {
    "optimize": ["optimize", "run", "--plans", "4"],
    "export": ["export", "run"],
    "import": ["import", "plans", "--profile", "run"],
    "schedules": ["schedules", "run", "--schedules", "1f1b", "--micro-batches", "3", "--plans", "4"],
    "profile merge": ["profile", "merge", "run", "run"],
    "profile convert": ["profile", "convert", "run"],
    "plot": ["plot", "run"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A profile, a frontier and its plans for Zeus."""
    folder = tmp_path_factory.mktemp("made")
    profile = synthetic_profile(2, blocking_power_w=80.0, micro_batches=3)
    frontier = optimize(one_f_one_b(2, 3), profile, plans=4)
    profile.save(folder / "run" / "profile.csv")
    frontier.save(folder / "run")
    export_zeus(frontier, folder / "plans")
    return folder


@pytest.fixture(autouse=True)
def files(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_folder_that_cannot_be_one_is_named(run, command):
    for out in ("run/profile.csv", "run/profile.csv/below"):
        code, _, err = run(*COMMANDS[command], "--out", f"{out}")
        assert code == 2
        assert f"{out}: cannot be a folder (run/profile.csv is a file)" in err


@pytest.mark.parametrize(
    ("command", "planning"), [("optimize", "optimize"), ("schedules", "schedule_comparison.compare_schedules")]
)
def test_an_output_folder_that_cannot_be_one_is_an_error_before_planning(run, monkeypatch, command, planning):
    monkeypatch.setattr(f"perseus_ds.optimizer.{planning}", None)
    assert run(*COMMANDS[command], "--out", "run/profile.csv")[0] == 2


def test_a_folder_without_permission_to_write_is_an_error_before_planning(run, monkeypatch):
    monkeypatch.setattr("perseus_ds.cli.output.os.access", lambda path, how: str(path) != "run")
    code, _, err = run(*COMMANDS["optimize"], "--out", "run/out")
    assert code == 2
    assert "run/out: cannot write to run. Give another folder" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_an_error_that_names_the_file(run, tmp_path, disk_with, command):
    with disk_with(0):
        code, _, err = run(*COMMANDS[command], "--out", "out")
    assert code == 2
    assert f"perseus-ds {command}: out/" in err
    assert "File too large" in err
    assert not list((tmp_path / "out").iterdir())
