import csv
from pathlib import Path

import pytest
from live_records import auto_job, write
from pipelines import synthetic_profile

from perseus_ds.artifacts.frontier import Frontier


@pytest.fixture
def profile(tmp_path):
    synthetic_profile(2, simulated=True, blocking_power_w=80.0, micro_batches=3).save(tmp_path / "p" / "profile.csv")
    return "p/profile.csv"


def test_what_profile_json_holds_is_optional(run, profile, tmp_path):
    code, out, _ = run("optimize", "--profile", f"{profile}", "--out", "f")
    assert code == 0
    assert "for 2 stages and 3 micro-batches" in out
    assert "SIMULATED" in out
    frontier = Frontier.load(tmp_path / "f")
    assert frontier.provenance.blocking_power_w == 80.0
    assert frontier.provenance.simulated is True
    assert frontier.provenance.profile == profile
    with (tmp_path / "f" / "frontier.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(frontier.plans)


def test_arguments_override_profile_json(run, profile, tmp_path):
    words = ["--micro-batches", "5", "--blocking-power-w", "70", "--solver", "lowtime", "--schedule", "1f1b"]
    assert run("optimize", "--profile", f"{profile}", "--out", "f", *words)[0] == 0
    provenance = Frontier.load(tmp_path / "f").provenance
    assert (provenance.micro_batches, provenance.blocking_power_w, provenance.solver) == (5, 70.0, "lowtime")


def test_what_profile_json_does_not_hold_must_be_given(run, tmp_path):
    synthetic_profile(2).save(tmp_path / "profile.csv")
    code, _, err = run("optimize", "profile.csv", "--out", "f")
    assert (code, "--micro-batches is missing" in err) == (2, True)
    code, _, err = run("optimize", "--profile", "profile.csv", "--out", "f", "--micro-batches", "2")
    assert (code, "blocking_power_w is missing" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "3"], "p/profile.csv: The schedule has 3 stages, the profile 2"),
        (["--blocking-power-w", "400"], "p/profile.csv: stage 0, forward, 900 MHz"),
        (["--schedule", "dualpipev", "--stages", "1"], "--stages 1: dualpipev puts 2 stages on every rank"),
        (["--schedule", "dualpipev", "--micro-batches", "1"], "cannot schedule 1 micro-batches"),
        (["--schedule", "nonsense"], "schedule nonsense: not found"),
    ],
)
def test_a_profile_that_does_not_fit_is_named(run, profile, words, message):
    code, _, err = run("optimize", "--profile", f"{profile}", "--out", "f", *words)
    assert code == 2
    assert message in err
    assert not Path("f").exists()


def test_plot_finds_what_belongs_to_a_folder(run, profile, tmp_path):
    assert run("optimize", "p", "--out", "p/f", "--plans", "10")[0] == 0
    assert run("plot", "p/f")[0] == 0
    assert (tmp_path / "p/f/timeline.png").is_file()
    code, _, err = run("plot", "p", "--profile", f"{profile}", "--out", "pictures")
    assert (code, (tmp_path / "pictures/frontier.png").is_file()) == (0, True), err
    (tmp_path / "empty").mkdir()
    code, _, err = run("plot", "empty")
    assert (code, "no run.jsonl, profile.csv or frontier.json" in err) == (2, True), err


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_folder_of_different_jobs_asks_for_one_of_them(run, tmp_path, command):
    for name in ("gpt3", "bert"):
        write(tmp_path / "runs" / name, auto_job(job=name))
    code, _, err = run(command, "runs")
    assert code == 2
    assert "runs: its runs are of 2 different jobs. Give the folder of one: runs/" in err
    assert all(f"runs/{name}" in err for name in ("gpt3", "bert"))
    assert not (tmp_path / "runs" / "report.html").exists()


def test_runs_of_one_job_make_one_report(run, tmp_path):
    for name in ("gpt3", "bert"):
        write(tmp_path / "runs" / name, auto_job())
    assert run("report", "runs")[0] == 0
    write(tmp_path / "runs" / "bert", auto_job(job="bert"))
    assert run("report", "runs", "--runs", "runs/gpt3", "runs/bert")[0] == 0
    assert run("report", "runs/bert")[0] == 0
