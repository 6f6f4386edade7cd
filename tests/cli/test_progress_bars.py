"""Progress bars of commands."""

import io

import pytest
from run_folders import make_job, write_auto_run
from run_log import wait_until

from perseus_ds.cli import inputs


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_bar_is_shown_while_no_step_reports_progress(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(inputs, "_SHOWN_AFTER_S", 0.01)
    monkeypatch.setattr(inputs, "_REFRESHED_EVERY_S", 0.01)
    with inputs.progress_bar("reading"):
        wait_until(lambda: "reading:   0%" in terminal.getvalue(), "the bar")


def test_a_progress_bar_shows_the_present_step(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(inputs, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(inputs, "_REFRESHED_EVERY_S", 0.01)
    with inputs.progress_bar("reading") as progress:
        progress("clocks", 0.42)
        wait_until(lambda: "clocks:  42%" in terminal.getvalue(), "the step")


def test_no_progress_bar_is_written_to_a_file(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    with inputs.progress_bar("reading") as progress:
        progress("clocks", 0.42)
    assert written.getvalue() == ""


@pytest.fixture(scope="module")
def job():
    return make_job()


@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("report perseus", "reading"),
        ("compare perseus perseus", "reading"),
        ("trace perseus", "reading"),
        ("plot perseus", "reading"),
        ("profile show perseus --out profile.png", "picture"),
        ("schedules perseus --schedules 1f1b --plans 3", "schedules"),
    ],
)
def test_commands_that_take_seconds_have_a_progress_bar(run, monkeypatch, tmp_path, job, command, step):
    (tmp_path / "perseus").mkdir()
    write_auto_run(tmp_path / "perseus", job)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(inputs, "_SHOWN_AFTER_S", 0.0)
    assert run(*command.split())[0] == 0
    assert f"{step}:   0%" in terminal.getvalue()
