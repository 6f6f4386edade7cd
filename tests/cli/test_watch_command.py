"""`perseus-ds watch` on small screens, in pipes, and for programs, and its keys."""

import contextlib
import errno
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from live_records import BEGIN, auto_job, default_iteration, facts_at, planned_iteration, started, write
from rich.console import Console
from run_log import GIVE_UP_S, wait_until

from perseus_ds.artifacts.run_events import Ended, Failed, GoalChanged, PlanChosen
from perseus_ds.artifacts.timeline import MeasuredIteration, MeasuredOperation, TimelineFile
from perseus_ds.cli.jobs import answer_to
from perseus_ds.policy.goal import Goal
from perseus_ds.report.live import JobScreen, Keys, jobs_table, with_footer
from perseus_ds.server.control_socket import ControlServer
from perseus_ds.server.job_control import JobControl

ENDED = [*auto_job(), Ended(time=BEGIN + 30)]


def many_ranks(ranks):
    """Return records of all kinds of a job on many ranks and pipelines."""
    asked = tuple(1410 - 15 * (rank % 20) for rank in range(ranks))
    reached = tuple(clock - 300 * (rank == 5) for rank, clock in enumerate(asked))
    fields = {"clocks_asked_mhz": asked, "clocks_reached_mhz": reached, "failed_ranks": (3,), "next_phase": "verdict"}
    events = [Failed(rank=rank, error="the driver does not answer, as it should", time=BEGIN) for rank in range(9)]
    choice = PlanChosen(time=BEGIN, plan=3, straggler=1, slowdown=1.3)
    goal = GoalChanged(time=BEGIN, goal={"finish_by": "2026-11-22", "total_steps": 10**6})
    parts = (10.0,) * 16
    return [*auto_job(), choice, goal, *events, planned_iteration(39, energy_by_pipeline_j=parts, **fields)]


def facts_of(records):
    return facts_at(records, BEGIN + 40)


def rendered(view, *, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None, **options)
    console.print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


ONE_ITERATION = [started(), default_iteration(1, "warm-up")]


@pytest.mark.parametrize("records", [[], [started()], ONE_ITERATION, ENDED, many_ranks(512)])
def test_it_fits_80_columns_and_24_lines(records):
    lines = rendered(with_footer(JobScreen(facts_of(records), is_cut=True), "[q] leave", 80))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[-1].rstrip() == "[q] leave"


def test_all_facts_are_words_in_ascii_without_colour():
    text = "\n".join(rendered(JobScreen(facts_of(many_ranks(8))), encoding="ascii"))
    assert text.isascii()
    for expected in (
        "gpt3: simulated A100-SXM, auto mode",
        "step 39 of 1000000",
        "running under plan 3; then: comparing plan and default clocks",
        "promised 0.0 % time, -25.0 % energy",
        "(-20.0 +/- 0.3 %)",
        "rank 5 at 1035 of 1335 MHz",
        "pipeline 1 takes 1.30 times as long as the others",
        "fallen back to default clocks: rank 3",
        "the driver does not answer",
    ):
        assert expected in text


def test_several_jobs_take_a_line_each():
    long = facts_of(ENDED).model_copy(update={"name": "a-job-with-a-name-that-is-much-too-long"})
    lines = rendered(jobs_table([facts_of(auto_job()), long, facts_of([])]))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[0].split()) == "job step iter. power energy saved end in phase, *SIMULATED"
    assert " ".join(lines[1].split()) == "gpt3 26 1.020 s 83.46 W -20.0 +/- 0.3 % 400.0 J - *plan 3, certain"
    assert lines[2].startswith("a-job-wi")
    assert lines[2].rstrip().endswith("*ended, certain")
    killed = facts_of([*auto_job(), Ended(time=BEGIN, killed=True)])
    assert rendered(jobs_table([killed]))[1].rstrip().endswith("*killed, certain")
    assert len(rendered(with_footer(jobs_table([facts_of(auto_job())] * 50), "[q] leave", 80))) == 24


@pytest.mark.parametrize("records", [auto_job(), auto_job(40), ENDED], ids=["running", "longer", "ended"])
def test_whether_a_saving_is_certain_fits_into_80_columns(records):
    rows = {line[:10].strip(): line[10:] for line in rendered(JobScreen(facts_of(records), is_cut=True))}
    for row in ("real", "saved"):
        assert re.search(r"-\S+ \w+ energy \(-20\.0 \+/- \S+ %\), \+2\.0 \+/- \S+ % time: certain;", rows[row]), rows[
            row
        ]
    assert ("end" in rows, "phase" in rows) == ((records is not ENDED,) * 2)


def test_a_job_that_only_observes_has_no_goal_and_no_saving(run, tmp_path):
    write(tmp_path, [started(mode="observe"), default_iteration(1, "observe")])
    out = run("watch", ".")[1]
    assert "observe mode" in out
    assert not re.search("^(goal|saved)", out, re.MULTILINE)


def test_the_state_of_a_job_is_printed_once_into_a_pipe(run, tmp_path):
    code, _, err = run("watch", ".")
    assert (code, "no run.jsonl in this folder" in err) == (2, True), err
    for records, words in (
        (ENDED, "state ended at step 26 plan 3 promised"),
        ([*ONE_ITERATION, Ended(time=BEGIN)], "state ended at step 1 phase training ended before a plan ran"),
        ([*ONE_ITERATION, Ended(time=BEGIN, killed=True)], "state killed at step 1 phase training ended before"),
    ):
        write(tmp_path, records)
        code, out, _ = run("watch", ".")
        assert code == 0
        assert words in " ".join(out.split())
        assert "\x1b" not in out


def timed(*ranks):
    """Return a timeline of one iteration, given the times that ranks compute [s]."""
    operations = []
    for stage, (forward_s, backward_s) in enumerate(ranks):
        kept = [("forward", 0.0, forward_s), ("backward", 1.0 - backward_s, 1.0)]
        own = [
            MeasuredOperation(kind=kind, stage=stage, micro_batch=0, start_s=start_s, end_s=end_s)
            for kind, start_s, end_s in kept
        ]
        between = {"kind": "grad", "stage": stage, "target": stage, "micro_batch": 0}
        own.insert(1, MeasuredOperation(**between, start_s=forward_s, end_s=1.0 - backward_s))
        operations.append(own)
    iteration = MeasuredIteration(iteration=3, phase="observe", ranks=operations)
    return TimelineFile(simulated=True, gpu="A100", iterations=[iteration])


def test_it_shows_who_waits_the_slowest_rank_and_the_power_of_each_gpu(run, tmp_path):
    write(tmp_path, [started(), default_iteration(1, "observe", energy_by_rank_j=(300.0, 500.0))])
    (tmp_path / "timeline.json").write_text(timed((0.2, 0.3), (0.3, 0.6)).model_dump_json(exclude_none=True))
    code, out, _ = run("watch", ".", "--once")
    rows = {line[:10].strip(): " ".join(line[10:].split()) for line in out.splitlines()}
    assert code == 0
    assert rows["waiting"].endswith("50%, 10%")
    assert rows["slowest"] == "rank 1: 900.0 ms without waiting, +28.6 % vs. the mean"
    (facts,) = map(json.loads, run("watch", ".", "--once", "--json")[1].splitlines())
    assert facts["waits"] == pytest.approx([0.5, 0.1])
    time_s = facts["iteration_s"]
    assert facts["powers_w"] == pytest.approx([300 / time_s, 500 / time_s])
    (tmp_path / "timeline.json").write_text("{")
    assert "waiting" not in run("watch", ".", "--once")[1]


def test_json_is_one_object_per_job_and_change_until_the_jobs_end(run, tmp_path, monkeypatch):
    write(tmp_path / "a", auto_job(2))
    write(tmp_path / "b", ENDED)
    longer = [auto_job(3), [*auto_job(3), Ended(time=BEGIN + 30)]]
    monkeypatch.setattr("perseus_ds.report.live.time.sleep", lambda s: write(tmp_path / "a", longer.pop(0)))
    for once, expected in ((["--once"], [(2, False)]), ([], [(2, False), (3, False), (3, True)])):
        code, out, _ = run("watch", ".", "--json", *once)
        assert code == 0
        jobs = list(map(json.loads, out.splitlines()))
        assert [(job["under_plans"]["iterations"], job["ended"]) for job in jobs if job["name"] == "a"] == expected
        (other,) = (job for job in jobs if job["name"] == "b")
        assert (other["under_plans"]["saved_j"], other["ended"]) == (pytest.approx(400.0), True)


@pytest.fixture
def steered(tmp_path):
    """Keys of a job that accepts commands, and the text typed at their prompt."""
    control, typed = JobControl(Goal(), 1), []
    server = ControlServer(tmp_path, control.carry_out)
    keys = Keys(lambda: typed.pop(0), answer_to)
    keys.folder = tmp_path
    yield keys, control, typed
    server.close()


def test_keys_pause_resume_and_ask_for_a_command_as_on_the_command_line(steered):
    keys, control, typed = steered
    assert keys.press("p")
    assert control.paused
    assert "default clocks" in keys.footer
    assert keys.press("r")
    assert (control.paused, keys.footer) == (False, "under plans again")
    typed += ["set --watts 5000", " ", ""]
    keys.press("c")
    assert control.goal == Goal(watts=5000)
    assert keys.footer == "no slower than default clocks, watts 5000.0, once the job runs under plans"
    for _ in range(2):
        keys.press("c")
        assert keys.footer.startswith("[p] pause")
    assert not keys.press("q")
    keys.folder = None  # the job has ended
    assert keys.footer == "[q] leave"
    assert keys.press("p")
    assert not control.paused


def test_what_is_wrong_with_a_typed_command_is_shown(steered):
    keys, control, typed = steered
    typed += ["set --max-slowdown 5", "set --max-slowdown '5"]
    for message in (
        "perseus-ds control set: --max-slowdown: expected a fraction below 1, got 5. Did",
        "set --max-slowdown '5: No closing quotation",
    ):
        keys.press("c")
        assert keys.footer.startswith(message)
    assert control.goal == Goal()


def test_on_a_terminal_it_waits_for_the_job_and_shows_what_is_new_until_it_ends(tmp_path):
    screen, terminal = pty.openpty()
    seen = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the command has ended
            while True:
                seen.extend(os.read(screen, 4096))

    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "perseus_ds", "watch", str(tmp_path / "gpt3")],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
    )  # fmt: skip
    os.close(terminal)
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: b"Waiting for a job to start" in seen, "the words that there is none yet")
    write(tmp_path / "gpt3", auto_job(3))
    wait_until(lambda: b"-60.00 J energy" in seen, "the first screen")
    write(tmp_path / "gpt3", [*auto_job(4), Ended(time=BEGIN + 30)])
    assert process.wait(GIVE_UP_S) == 0
    reader.join()
    os.close(screen)
    text = seen.decode()
    assert "-80.00 J energy" in text
    assert "\x1b[32m" in text or ";32m" in text  # green


def test_records_control_no_terminal():
    hostile = "\x1b[2J\x07\r\u202e"
    records = [started(gpu=hostile, goal={"name": hostile}), Failed(error=hostile), default_iteration(1, hostile)]
    for view in (JobScreen(facts_of(records)), jobs_table([facts_of(records)])):
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set("".join(rendered(view)))


@pytest.mark.parametrize("command", [["watch", "runs", "--once"], ["report", "runs", "--out", "report.html"]])
def test_a_private_folder_does_not_hide_the_jobs_beside_it(run, tmp_path, monkeypatch, command):
    for name in ("mine", "of_another_user"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write(tmp_path / "runs" / name, auto_job())
    stat = os.stat

    def stat_as_this_user(path, *args, **kwargs):  # root may look into every folder
        if "of_another_user/" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat_as_this_user)
    assert run(*command)[::2] == (0, "")


@pytest.mark.parametrize("options", [["--once"], ["--once", "--json"]])
def test_a_reader_that_leaves_is_no_error(tmp_path, options):
    write(tmp_path, auto_job())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "perseus_ds", "watch", str(tmp_path), *options]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
