"""When a disk becomes full, existing files stay complete."""

import os

import pytest
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.artifacts.io import write_together
from perseus_ds.optimizer import optimize

PROFILE = synthetic_profile(2, blocking_power_w=80.0, micro_batches=3)


@pytest.fixture(scope="module")
def frontier():
    return optimize(one_f_one_b(2, 3), PROFILE, plans=4)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("free", ["nothing", "for all but the largest file"])
def test_old_results_survive(tmp_path, disk_with, frontier, free):
    frontier.save(tmp_path)
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        path.write_text("old")
    before = contents(tmp_path)
    with disk_with(0 if free == "nothing" else largest - 1), pytest.raises(OSError, match="File too large") as caught:
        frontier.save(tmp_path)
    assert contents(tmp_path) == before
    assert caught.value.filename in {str(tmp_path / name) for name in before}


def test_a_folder_in_the_place_of_a_file_leaves_the_others(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError, match=f"{tmp_path}/b"):
        write_together([(tmp_path / "a", "new"), (tmp_path / "b", "new")])
    assert (tmp_path / "a").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_file_that_cannot_be_replaced_leaves_all_and_no_temporary_one(tmp_path, monkeypatch):
    PROFILE.save(tmp_path / "profile.csv")
    before = contents(tmp_path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match=f"disk full: '{tmp_path}/profile.json'"):
        synthetic_profile(3).save(tmp_path / "profile.csv")
    assert contents(tmp_path) == before


def test_new_and_old_files_are_never_read_together(tmp_path, frontier, monkeypatch):
    """A set of files is consistent even if a process was killed while replacing them."""
    move, seen = os.replace, []

    def move_and_record(temporary, path):
        begins = path.with_name("profile.csv" if path.stem == "profile" else "frontier.json")
        seen.append(begins.exists())
        move(temporary, path)

    for _ in range(2):
        PROFILE.save(tmp_path / "profile.csv")
        frontier.save(tmp_path)
        monkeypatch.setattr("os.replace", move_and_record)
    assert seen == [False] * 4
