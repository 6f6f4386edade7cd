"""``perseus-ds share``: its arguments, and that it goes on until it is interrupted."""

import time

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "limit and jobs are missing"),
        (["limit=40kWh", "jobs=[a]"], "limit=40kWh: expected a power such as 40kW, 40000W or 40000."),
        (["limit=abc1", "jobs=[a]"], "limit=abc1: expected a power"),
        (["limit=0W", "jobs=[a]"], "limit=0W: expected a power"),
        (["limit=-4kW", "jobs=[a]"], "limit=-4kW: expected a power"),
        (["limit=4kW", "jobs=[]"], "jobs: expected"),
        (["limit=4kW", "jobs=[a,b]", "weights=[1]"], "weights: expected a number above 0 for each of the 2 jobs"),
        (["limit=4kW", "jobs=[a]", "weights=[0]"], "weights: expected a number above 0 for each of the 1 jobs"),
        (["limit=4kW", "jobs=[a,./a]"], "jobs: a folder is named twice"),
        (["limit=4kW", "jobs=[file]"], "jobs: file is a file; expected the output_dir of a training run"),
    ],
)
def test_wrong_arguments_are_named(run, tmp_path, words, message):
    (tmp_path / "file").touch()
    code, _, error = run("share", *words)
    assert code == 2
    assert message in error


@pytest.mark.parametrize("limit", ["3kW", "3000W", "3000", "0.003MW", "3 kW"])
def test_jobs_that_have_not_begun_find_their_caps(run, tmp_path, monkeypatch, limit):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    code, out, _ = run("share", f"limit={limit}", "jobs=[a,b/c]")
    assert code == 130
    assert "no job runs" in out
    assert [(tmp_path / folder / "power_cap").read_text() for folder in ("a", "b/c")] == ["1500.0\n"] * 2
