"""``perseus-ds optimize``, ``export``, ``import``, ``schedules``, ``plot`` and ``report`` on files."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from live_records import auto_job, write
from pipelines import GPipe, one_f_one_b, synthetic_profile

from perseus_ds.artifacts.frontier import Frontier, export_zeus
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.artifacts.schedule_table import ScheduleTable
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.commands import read_schedule


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a profile and a frontier in "p", and plans for Zeus in "plans"."""
    folder = tmp_path_factory.mktemp("made")
    profile = synthetic_profile(2, simulated=True, gpu="A100 (simulated)", blocking_power_w=80.0, micro_batches=4)
    profile.save(folder / "p" / "profile.csv")
    frontier = optimize(one_f_one_b(2, 4), profile, plans=8)
    frontier.save(folder / "p")
    export_zeus(frontier, folder / "plans")
    return folder


@pytest.fixture(autouse=True)
def files(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def test_profile_json_has_the_defaults(run):
    code, out, _ = run("optimize", "--profile", "p/profile.csv", "--out", "f", "--plans", "6")
    assert code == 0
    assert "for 2 stages and 4 micro-batches" in out
    assert "SIMULATED" in out
    frontier = Frontier.load("f")
    assert (frontier.provenance.blocking_power_w, frontier.provenance.simulated) == (80.0, True)
    assert frontier.provenance.profile == "p/profile.csv"
    with Path("f/frontier.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(frontier.plans)
    words = ["--micro-batches", "5", "--blocking-power-w", "70", "--solver", "lowtime", "--schedule", "1f1b"]
    assert run("optimize", "p", "--out", "g", *words)[0] == 0
    provenance = Frontier.load("g").provenance
    assert (provenance.micro_batches, provenance.blocking_power_w, provenance.solver) == (5, 70.0, "lowtime")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bare.csv"], "--micro-batches is missing"),
        (["p", "--stages", "3"], "p: The schedule has 3 stages, the profile 2"),
        (["p", "--schedule", "dualpipev", "--stages", "1"], "--stages 1: dualpipev puts 2 stages on every rank"),
        (["p", "--schedule", "os:path.join"], "schedule os:path.join: not found"),
    ],
)
def test_inputs_that_do_not_fit_are_an_error_and_nothing_is_written(run, words, message):
    shutil.copy("p/profile.csv", "bare.csv")
    code, _, err = run("optimize", *words, "--out", "f")
    assert code == 2
    assert message in err
    assert not Path("f").exists()


def test_results_are_written_next_to_the_input_by_default(run):
    shutil.rmtree("plans")
    Path("p/frontier.json").unlink()
    assert run("optimize", "p", "--plans", "6")[0] == 0
    plans = Frontier.load("p").plans
    assert run("export", "p")[0] == 0
    Path("z").mkdir()
    for path in Path("p").glob("freqs_pipeline_*.py"):
        path.rename(Path("z") / path.name)
    assert run("import", "z", "--profile", "p")[0] == 0
    assert len(Frontier.load("z").plans) == len(plans)


def test_plot_finds_the_files_of_a_folder(run):
    assert run("plot", "p", "--out", "pictures")[0] == 0
    assert Path("pictures/timeline.png").is_file()
    assert Path("pictures/frontier.png").is_file()


def test_runs_of_different_jobs_are_not_reported_together_unless_chosen(run):
    for job in ("gpt3", "bert"):
        write(Path("runs", job), auto_job(job=job))
    code, _, err = run("report", "runs")
    assert code == 2
    assert "runs: its runs are of 2 different jobs. Give the folder of one: runs/" in err
    assert run("report", "runs", "--runs", "runs/gpt3", "runs/bert")[0] == 0
    write(Path("runs/bert"), auto_job(job="gpt3"))
    assert run("report", "runs")[0] == 0


@pytest.fixture
def save(monkeypatch, tmp_path):
    """A function that saves a profile in "p" with a schedule of a class that must not be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    Path("of_a_file.py").write_text("raise SystemExit('imported by the name in a file')")

    def save(name="of_a_file:Schedule", *, has_streams=True):
        streams = ScheduleStreams.of(read_schedule(GPipe, ranks=2, micro_batches=3)) if has_streams else None
        streams = streams and streams.model_copy(update={"name": name})
        profile = synthetic_profile(2, blocking_power_w=80.0, micro_batches=3, schedule=name, streams=streams)
        profile.save(Path("p/profile.csv"))

    yield save
    assert "of_a_file" not in sys.modules


def test_commands_use_the_schedule_in_the_files_and_import_no_class_named_there(run, save):
    save()
    assert run("optimize", "p", "--out", "p/f", "--plans", "6")[0] == 0
    frontier = Frontier.load("p/f")
    assert frontier.schedule.ranks == read_schedule(GPipe, ranks=2, micro_batches=3).ranks
    assert frontier.provenance.schedule == "of_a_file:Schedule"
    for path in Path("p").glob("*.json"):
        if path.name != "profile.json":
            path.unlink()
    for words in (["plot", "p/f"], ["trace", "p"], ["report", "p"], ["profile", "validate", "p"]):
        code, out, err = run(*words)
        assert code == 0, err
        assert "Timelines of the plans" not in out
    assert run("export", "p/f", "--out", "q")[0] == 0
    assert run("import", "q", "--profile", "p", "--out", "back")[0] == 0
    raw = json.loads(Path("p/f/frontier.json").read_text())
    Path("p/f/frontier.json").write_text(json.dumps({**raw, "streams": None}))
    code, out, _ = run("report", "p")
    assert (code, "Timelines of the plans: " in out) == (0, True)
    assert run("plot", "p/f")[0] == 2


def test_a_name_without_a_fitting_schedule_is_an_error_that_states_the_remedy(run, save):
    for words in ([], ["--micro-batches", "5"], ["--stages", "1"]):
        save(has_streams=bool(words))
        code, _, err = run("optimize", "p", "--out", "f", *words)
        assert code == 2
        assert "Classes named in files are not imported" in err
        assert "--schedule of_a_file:Schedule" in err


def test_known_names_need_no_schedule_in_the_files(run, save):
    save("deepspeed.runtime.pipe.schedule:TrainSchedule", has_streams=False)
    assert run("optimize", "p", "--out", "f", "--plans", "6", "--micro-batches", "5")[0] == 0


def test_schedules_are_compared_with_their_assumptions(run):
    names = ["1f1b", "interleaved_zero_bubble", "zbv", "deepspeed_dualpipev"]
    words = ["--schedules", *names, "--micro-batches", "4", "8", "--plans", "4", "--weight-share", "0.4", "--out", "x"]
    code, out, _ = run("schedules", "p", *words)
    assert code == 0
    table = ScheduleTable.model_validate_json(Path("x/schedules.json").read_text())
    assert [(one.name, one.stages, one.micro_batches) for one in table.schedules] == [
        (name, stages, count) for name, stages in zip(names, (2, 4, 4, 4), strict=True) for count in (4, 8)
    ]
    assert Path("x/schedules.png").read_bytes().startswith(b"\x89PNG")
    assert all(any(line.startswith(f"{name} ") for line in out.splitlines()) for name in names)
    assert "zbv: each stage is cut into 2 equal chunks" in out
    assert "40% of a backward's time and energy" in out
    assert "SIMULATED: no GPU was measured" in out


def test_schedules_that_cannot_be_compared_are_an_error(run):
    for words, message in (
        (["--schedules", "1f1b", "zvb"], "no schedule is called 'zvb'; did you mean 'zbv'?"),
        (["--weight-share", "1"], "--weight-share: expected a number above 0 and below 1, got 1."),
    ):
        code, _, err = run("schedules", "p", *words)
        assert (code, message in err) == (2, True), err


WRITERS = {
    "optimize": ["optimize", "p", "--plans", "4"],
    "export": ["export", "p"],
    "import": ["import", "plans", "--profile", "p"],
    "schedules": ["schedules", "p", "--schedules", "1f1b", "--plans", "4"],
    "profile merge": ["profile", "merge", "p", "p"],
    "profile convert": ["profile", "convert", "p"],
    "plot": ["plot", "p"],
}


@pytest.mark.parametrize("command", WRITERS)
def test_an_output_that_cannot_be_written_is_named(run, disk_with, monkeypatch, command):
    with disk_with(0):
        code, _, err = run(*WRITERS[command], "--out", "out")
    assert code == 2
    assert f"perseus-ds {command}: out/" in err
    assert "File too large" in err
    assert not list(Path("out").iterdir())
    # What can be known before is an error before plans are computed.
    monkeypatch.setattr("perseus_ds.optimizer.optimize", None)
    monkeypatch.setattr("perseus_ds.layouts.schedule_comparison.compare_schedules", None)
    code, _, err = run(*WRITERS[command], "--out", "p/profile.csv/below")
    assert (code, "p/profile.csv/below: cannot be a folder (p/profile.csv is a file)" in err) == (2, True), err
    monkeypatch.setattr("perseus_ds.cli.inputs.os.access", lambda path, how: str(path) != "p")
    code, _, err = run(*WRITERS[command], "--out", "p/out")
    assert (code, "p/out: cannot write to p. Give another folder" in err) == (2, True), err
