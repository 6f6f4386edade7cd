"""Names of schedules in files are never imported."""

import json
import sys

import pytest
from pipelines import GPipe, synthetic_profile

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.pipeline.commands import read_schedule

GPIPE = read_schedule(GPipe, ranks=2, micro_batches=3)


@pytest.fixture
def run(run, tmp_path, monkeypatch):
    """Run a command, and return its exit code and output."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_a_file.py").write_text("raise SystemExit('imported by the name in a file')")

    def run_and_join(*words):
        code, out, err = run(*words)
        return code, out + err

    yield run_and_join
    assert "of_a_file" not in sys.modules


def save(folder, name="of_a_file:Schedule", *, streams=True, **info):
    streams = ScheduleStreams.of(GPIPE).model_copy(update={"name": name}) if streams else None
    profile = synthetic_profile(2, blocking_power_w=80.0, micro_batches=3, schedule=name, streams=streams, **info)
    profile.save(folder / "p" / "profile.csv")


def test_every_command_uses_the_streams_of_the_files(run, tmp_path):
    save(tmp_path)
    assert run("optimize", "p", "--out", "p/f", "--plans", "6", "--certificates")[0] == 0
    frontier = Frontier.load(tmp_path / "p/f")
    assert frontier.schedule.ranks == GPIPE.ranks
    assert frontier.provenance.schedule == "of_a_file:Schedule"
    for words in (["verify", "p/f"], ["plot", "p/f"], ["trace", "p"], ["report", "p"], ["profile", "validate", "p"]):
        code, text = run(*words)
        assert code == 0, text
        assert "Timelines of the plans" not in text
    assert run("export", "p/f", "--out", "plans")[0] == 0
    assert run("import", "plans", "--profile", "p", "--out", "back")[0] == 0


@pytest.mark.parametrize("words", [["streams"], ["--micro-batches", "5"], ["--stages", "1"]])
def test_a_name_without_fitting_streams_is_an_error_that_says_what_to_write(run, tmp_path, words):
    save(tmp_path, streams=words != ["streams"])
    code, text = run("optimize", "p", "--out", "p/f", *(words if words != ["streams"] else []))
    assert code == 2
    assert "Classes named in files are not imported" in text
    assert "--schedule of_a_file:Schedule" in text


def test_a_frontier_without_its_schedule_is_shown_without_timelines(run, tmp_path):
    save(tmp_path)
    run("optimize", "p", "--out", "p/f", "--plans", "6")
    raw = json.loads((tmp_path / "p/f/frontier.json").read_text())
    (tmp_path / "p/f/frontier.json").write_text(json.dumps({**raw, "streams": None}))
    code, text = run("report", "p")
    assert (code, "Timelines of the plans: " in text) == (0, True)
    assert run("plot", "p/f")[0] == 2


def test_known_names_need_no_streams(run, tmp_path):
    save(tmp_path, "deepspeed.runtime.pipe.schedule:TrainSchedule", streams=False)
    assert run("optimize", "p", "--out", "p/f", "--plans", "6", "--micro-batches", "5")[0] == 0
    assert run("plot", "p/f")[0] == 0


@pytest.mark.parametrize("name", [":x", "1f1b:", "os:path.join"])
def test_a_name_that_is_no_class_is_an_error(run, tmp_path, name):
    save(tmp_path)
    code, text = run("optimize", "p", "--out", "p/f", "--schedule", name)
    assert (code, "not found" in text) == (2, True), text
