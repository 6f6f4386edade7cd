"""Limits of readers, files that writers must keep, and texts without control characters."""

import errno
import json
import os
import stat
import tracemalloc

import pytest
from pipelines import one_f_one_b, synthetic_profile
from pydantic import ValidationError

from perseus_ds.artifacts import io as artifact_io
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import (
    MOST_JSON_PARTS,
    open_bounded,
    open_without_links,
    read_json,
    read_text,
    write_atomically,
)
from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_records import RecordFollower, read_records
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.artifacts.validation import MOST_INSTRUCTIONS, explain
from perseus_ds.cli.main import main
from perseus_ds.cli.schedules import choose_schedules
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer import optimize


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / path.name).mkdir(parents=True)
    else:
        path.symlink_to("/dev/zero")
    for read in (Frontier.load, read_records, lambda path: RecordFollower(path.parent).read()):
        with pytest.raises((PerseusError, OSError), match=r"regular file|Is a directory|no such file"):
            list(read(path))


def streams(ranks):
    return {"name": "1f1b", "micro_batches": 4, "ranks": ranks}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"schema_version": 2}, r"schema_version: expected 1, got 2\. Measure the profile again"),
        ({"rows": "x" * 10_000}, r"rows: .{,100} Measure .{,60}$"),
        (dict.fromkeys(map(str, range(20_000))), "20000 keys or values are wrong"),
        # Regression tests: messages about a million invalid values took gigabytes.
        ({"streams": streams([[["fly", 0]] * 1000])}, "streams.{,200}$"),
        ({"streams": streams([[["wait", [0] * 1000]]])}, "streams.{,200}$"),
        ({"rows": [0] * 1000}, "rows.{,200}$"),
    ],
)
def test_a_bad_profile_json_names_file_and_key_in_few_words(tmp_path, block, message):
    synthetic_profile(2).save(tmp_path / "profile.csv")
    (tmp_path / "profile.json").write_text(json.dumps({"schema_version": 1} | block))
    with pytest.raises(PerseusError, match=rf"^.{{,200}}profile\.json: {message}"):
        StageProfile.load(tmp_path)


@pytest.mark.parametrize(
    "line", ['{"event": "x", "y": [[1e300]]}', '{"iteration": 1, "phase": "run", "time_s": 1.0, "ended": 1e12}']
)
def test_a_record_beyond_the_limits_is_skipped_and_named(tmp_path, line, caplog):
    (tmp_path / "run.jsonl").write_text(line + '\n{"event": "end"}\n')
    assert len([*read_records(tmp_path)]) == 1
    assert "such as line 1" in caplog.text


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="large: 1099511627776 bytes, at most 67108864 are read of a thing"):
        read_json(tmp_path / "large", ConfigError, "thing")
    (tmp_path / "many").write_text("[" + "{}," * 2_999_999 + "{}]")
    with pytest.raises(ConfigError, match="with 3000001 objects, lists and keys; at most 67108864 with 3000000"):
        read_json(tmp_path / "many", ConfigError, "thing")
    with pytest.raises(ConfigError, match="File name too long"):
        read_text(tmp_path / ("x" * 5000), ConfigError, "thing", 10)


def test_lines_that_are_no_records_are_not_kept(tmp_path):
    """Otherwise, a damaged file could fill the memory of the process that reads it."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "x"}\n' + 100_000 * "\n")
    tracemalloc.start()
    try:
        assert len([*read_records(tmp_path)]) == 1
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_a_file_replaces_a_link_and_does_not_follow_it(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "out", "new")
    assert ((tmp_path / "mine").read_text(), (tmp_path / "out").read_text()) == ("mine", "new")


def test_a_file_of_which_reading_fails_is_named(tmp_path):
    (tmp_path / "a").write_text("{}")
    with (
        pytest.raises(ConfigError, match=r"a: cannot be read \(Input/output error\)"),
        open_bounded(tmp_path / "a", ConfigError, "file", 10),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_files_that_grow_are_not_written_through_links_or_into_pipes(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"Too many levels of symbolic links|No such device"):
            open_without_links(tmp_path / name, append=True)
    assert (tmp_path / "mine").read_text() == "mine"
    for append, expected in ((False, b"a"), (True, b"aa"), (False, b"a")):
        with open_without_links(tmp_path / "new", append=append) as file:
            file.write(b"a")
        assert (tmp_path / "new").read_bytes() == expected


def test_files_have_the_permissions_that_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "out", "x")
        open_without_links(tmp_path / "log", append=True).close()
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out", "log")} == {0o640}


def test_names_from_files_are_printed_without_control_characters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "\x1b[2J\u202erun"
    synthetic_profile(2, blocking_power_w=80.0, micro_batches=3).save(folder / "profile.csv")
    (folder / "run.jsonl").write_text('{"iteration": 1, "phase": "observe", "time_s": 1.0}\n')
    assert main(["optimize", "--profile", "*.csv", "--out", "f"]) == 2
    monkeypatch.chdir(folder)
    assert main(["report", "."]) == 0
    (folder / "x\x1b[2J").mkdir()
    assert main(["compare", "."]) == 2
    out, err = capsys.readouterr()
    assert not set("\x1b\x07\u202e") & set(out + err)


def test_arguments_that_are_no_text_are_named(capsys):
    for word in ("--profile=\udcff", "--out=\x1b[2J"):
        assert main(["optimize", word]) == 2
        assert "expected text without control characters, in UTF-8" in capsys.readouterr().err


def test_a_frontier_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    frontier = optimize(one_f_one_b(2, 3), synthetic_profile(2), blocking_power_w=80.0, plans=4)
    monkeypatch.setattr(artifact_io, "MOST_JSON_PARTS", 100)
    with pytest.raises(PerseusError, match=r"frontier\.json: it would have .* keys; at most .* fewer plans\.$"):
        frontier.save(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_longest_schedule_that_is_planned_for_can_be_read_again():
    """The number of its JSON parts grows with stages times micro-batches. No other schedule has as many."""
    ((_, schedule),) = choose_schedules(["interleaved_zero_bubble"], micro_batches=[64], ranks=8, chunks=2)
    text = ScheduleStreams.of(schedule).model_dump_json()
    assert text.count("[") * MOST_INSTRUCTIONS / (schedule.num_stages * 64) <= MOST_JSON_PARTS


def problems(block):
    with pytest.raises(ValidationError) as caught:
        ProfileInfo.model_validate(block)
    return explain(caught.value, ProfileInfo, "profile.json: ").splitlines()


def test_keys_deep_within_a_file_are_named_with_what_was_meant():
    row = {"stage": 0, "kind": "forward", "clock_mhz": 900, "samples": 1}
    of_kind, of_stage = problems({"rows": [row, {**row, "kind": "fordward", "stge": 1}]})
    assert of_kind.startswith("profile.json: rows.1.kind: expected 'forward', 'backward', ")
    assert of_kind.endswith(" or 'tail', got 'fordward'; did you mean 'forward'?")
    assert of_stage == "profile.json: rows.1.stge: unknown key; did you mean 'stage'?"


def test_of_many_problems_the_first_are_named_and_the_others_are_counted():
    lines = problems(dict.fromkeys("abcdefghijklmnopqrstuvwxyz"))
    assert len(lines) == 6
    assert lines[-1] == "profile.json: 21 more problems like these."
