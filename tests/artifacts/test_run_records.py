"""Writing run.jsonl, and reading it, even while it grows or if it is damaged."""

import json
import os

import pytest
from live_records import auto_job, default_iteration, started, write

from perseus_ds.artifacts.run_events import Event, Failed, PlanChosen, Started
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import RecordFollower, from_line, read_records, to_line
from perseus_ds.errors import ConfigError

ITERATION = IterationRecord(iteration=3, phase="run", plan=1, time_s=2.0, energy_j=30.0, default_energy_j=40.0)


RECORDS = [
    ITERATION,
    Started(mode="auto", gpu="A100", job="f00", goal={"max_slowdown": 0.05}, time=5.0),
    PlanChosen(plan=3, plans=(3, 7), straggler=1, slowdown=1.25),
    Failed(event="cache", error="no space"),
]


def test_a_record_is_read_as_it_was_written_and_an_event_of_a_later_version_as_an_event():
    assert [from_line(to_line(record)) for record in RECORDS] == RECORDS
    event = from_line('{"event": "eclipse", "time": 3.0, "by": "the moon"}')
    assert (type(event), event.event, event.time) == (Event, "eclipse", 3.0)


def test_savings_and_lateness_follow_from_what_is_stored_and_are_not_stored():
    record = ITERATION.model_copy(update={"predicted_time_s": 1.6})
    assert (record.saved, record.power_w, record.late) == (0.25, 15.0, pytest.approx(0.25))
    assert {"saved", "power_w", "late"}.isdisjoint(json.loads(to_line(record)))


def test_lines_that_are_no_records_are_skipped_and_named_except_a_last_one(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(ITERATION) + '{"iteration": 5, "ti')
    assert [*read_records(tmp_path)] == [*read_records(path)] == [ITERATION]
    assert not caplog.text
    path.write_text(to_line(ITERATION) + '{"iteration": 5, "ti\n' + to_line(ITERATION))
    assert [*read_records(tmp_path)] == [ITERATION, ITERATION]
    assert "run.jsonl: 1 lines are not records and are skipped, such as line 2" in caplog.text


def test_a_file_without_records_or_no_file_is_an_error(tmp_path):
    (tmp_path / "run.jsonl").write_text("[]\n{}\n")
    with pytest.raises(ConfigError, match=r"run\.jsonl, line 1: not a record"):
        list(read_records(tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        list(read_records(tmp_path / "none" / "run.jsonl"))


def append(folder, text):
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def read(follower):
    """Return whether the file was replaced, and all new records."""
    batches = [*follower.read()]
    return any(is_another for is_another, _ in batches), [record for _, records in batches for record in records]


def test_a_record_is_returned_once_and_once_its_line_is_complete(tmp_path):
    write(tmp_path, auto_job())
    follower = RecordFollower(tmp_path)
    assert read(follower) == (False, auto_job())
    line = to_line(default_iteration(90))
    for part, found in ((line[:40], []), (line[40:-1], []), ("\n", [default_iteration(90)]), ("", [])):
        append(tmp_path, part)
        assert read(follower) == (False, found)
    assert follower.unreadable == 0


def test_a_file_that_was_replaced_or_written_anew_in_place_is_read_from_its_begin(tmp_path):
    write(tmp_path, auto_job())
    follower = RecordFollower(tmp_path)
    read(follower)
    other = [started(job="b"), default_iteration(1)]
    write(tmp_path / "new", other)
    os.replace(tmp_path / "new" / "run.jsonl", tmp_path / "run.jsonl")
    assert read(follower) == (True, other)
    assert read(follower) == (False, [])
    longer = [started(job="another"), *auto_job()]
    write(tmp_path, longer)
    assert read(follower) == (True, longer)
    write(tmp_path, [])
    assert read(follower) == (True, [])


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path, monkeypatch):
    """One is longer than any record, and must not use more memory than the longest."""
    monkeypatch.setattr("perseus_ds.artifacts.run_records.MOST_RECORD_LINE_BYTES", 1000)
    write(tmp_path, [started()])
    append(tmp_path, f'rubbish\n{{"iteration": "x"}}\n{"x" * 2500}\n{to_line(default_iteration(1))}')
    follower = RecordFollower(tmp_path)
    assert read(follower)[1] == [started(), default_iteration(1)]
    assert follower.unreadable > 2
