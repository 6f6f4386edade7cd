"""Unusual names of files and folders cause readable errors or notes."""

import dataclasses
import json
import os

import pytest
from run_folders import make_job, write_auto_run

from perseus_ds.cli.main import main

LONG = "x" * 300


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a run."""
    monkeypatch.chdir(tmp_path)
    job = make_job()
    write_auto_run(tmp_path / "run", job)
    provenance = job.frontier.provenance.model_copy(update={"profile": LONG})
    dataclasses.replace(job.frontier, provenance=provenance).save(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_frontier_whose_name_is_too_long_is_missing(folder, capsys, command):
    (folder / "frontier.json").unlink()
    start = {"event": "start", "time": 1.0, "mode": "run", "frontier": LONG}
    records = (folder / "run.jsonl").read_text().splitlines()[1:]
    (folder / "run.jsonl").write_text("\n".join([json.dumps(start), *records]) + "\n")
    assert main([command, "run"]) == 0
    assert "The frontier of plans, and their savings: there is no frontier.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["report", LONG],
        ["report", "run", "--out", f"{LONG}"],
        ["verify", "run", "--certificates", f"{LONG}"],
        ["watch", LONG],
    ],
)
def test_an_argument_whose_name_is_too_long_is_an_error(folder, capsys, words):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f": {LONG}" in err
    assert "File name too long" in err


@pytest.mark.parametrize("command", ["report", "compare", "trace", "plot", "watch"])
def test_a_folder_whose_name_is_not_utf_8_is_shown(folder, monkeypatch, command):
    renamed = folder.rename(folder.with_name(os.fsdecode(b"run\xff")))
    monkeypatch.chdir(renamed)
    assert main([command, "."]) == 0
    page = {"report": "report.html", "compare": "comparison.html"}.get(command)
    assert page is None or r"run\udcff" in (renamed / page).read_text(encoding="utf-8")


def test_a_run_that_is_no_folder_is_named(folder, capsys):
    assert main(["report", "run", "--runs", "run/run.jsonl"]) == 2
    assert "run/run.jsonl: no such folder; expected the output_dir of a training run." in capsys.readouterr().err
