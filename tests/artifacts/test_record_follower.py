"""Reading records while they are written: what is new, what is not yet complete, and another file instead."""

import os

import pytest
from live_records import auto_job, default_iteration, started, write

from perseus_ds.artifacts import run_records as record_follower
from perseus_ds.artifacts.run_records import RecordFollower, read_records, to_line


def append(folder, text):
    with (folder / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def read(follower):
    """Return whether it is another file, and all new records."""
    batches = [*follower.read()]
    return any(is_another for is_another, _ in batches), [record for _, records in batches for record in records]


def test_each_record_is_returned_once(tmp_path):
    write(tmp_path, auto_job())
    follower = RecordFollower(tmp_path)
    assert read(follower) == (False, read_records(tmp_path))
    assert read(follower) == (False, [])
    append(tmp_path, to_line(default_iteration(90)))
    assert read(follower) == (False, [default_iteration(90)])


def test_a_line_is_read_once_it_is_complete(tmp_path):
    write(tmp_path, [started()])
    follower = RecordFollower(tmp_path)
    read(follower)
    line = to_line(default_iteration(1))
    append(tmp_path, line[:40])
    assert read(follower) == (False, [])
    append(tmp_path, line[40:-1])
    assert read(follower) == (False, [])
    append(tmp_path, "\n")
    assert read(follower) == (False, [default_iteration(1)])
    assert follower.unreadable == 0


def test_another_file_is_read_from_its_begin(tmp_path):
    write(tmp_path, auto_job())
    follower = RecordFollower(tmp_path)
    read(follower)
    other = [started(job="b"), default_iteration(1)]
    write(tmp_path / "new", other)
    os.replace(tmp_path / "new" / "run.jsonl", tmp_path / "run.jsonl")
    assert read(follower) == (True, other)
    assert read(follower) == (False, [])


def test_a_file_that_was_written_anew_in_place_is_read_from_its_begin(tmp_path):
    write(tmp_path, [started()])
    follower = RecordFollower(tmp_path)
    read(follower)
    longer = [started(job="another"), *auto_job()]
    write(tmp_path, longer)
    assert read(follower) == (True, longer)


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path):
    write(tmp_path, [started()])
    append(tmp_path, 'rubbish\n{"iteration": "x"}\n' + "\x00" * 50 + "\n" + to_line(default_iteration(1)))
    follower = RecordFollower(tmp_path)
    assert read(follower)[1] == [started(), default_iteration(1)]
    assert follower.unreadable == 3


def test_a_line_without_end_uses_no_more_memory_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.artifacts.run_records._MOST_BYTES", 1000)
    write(tmp_path, [started()])
    append(tmp_path, "x" * 2500 + "\n" + to_line(default_iteration(1)))
    follower = RecordFollower(tmp_path)
    assert read(follower)[1] == [started(), default_iteration(1)]
    assert follower.unreadable > 0


@pytest.mark.parametrize("kind", ["device", "fifo"])
def test_what_is_no_regular_file_is_not_read(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=r"run.jsonl: expected a regular file"):
        next(RecordFollower(tmp_path).read())


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    write(tmp_path, auto_job())
    monkeypatch.setattr(record_follower, "MOST_RECORD_BYTES", 100)
    with pytest.raises(OSError, match=r"run.jsonl: expected a regular file of at most 100 bytes"):
        next(RecordFollower(tmp_path).read())
