"""Files that cannot be written while a profile is measured. A folder of the same name stands for a full disk."""

import errno

from pipelines import one_f_one_b
from virtual.job import SLOWER, WorkerAtOnce

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Failed, ProfileWritten


def test_rows_that_cannot_be_saved_are_kept_in_memory_and_this_is_said_once(start, caplog):
    job = start(mode="auto", **SLOWER)
    (job.folder / "measured.csv").mkdir(parents=True)
    assert "observe" not in job.train_until("run")
    assert caplog.text.count("the measured rows cannot be saved") == 1
    assert len(job.events(ProfileWritten)) == 1
    assert job.events(Failed) == []


def test_a_profile_that_cannot_be_saved_is_saved_later_without_measuring_it_again(start, caplog):
    job = start(mode="auto", **SLOWER)
    job.train_until("profile")
    (job.folder / "profile.csv").mkdir()
    job.train_until("observe")
    job.train(30)
    assert job.phase == "observe"
    assert caplog.text.count("the profile cannot be saved") == 1
    (job.folder / "profile.csv").rmdir()
    assert "profile" not in job.train_until("run")[1:]
    assert job.events(ProfileWritten)[0].resumed_clocks == 0
    assert job.events(Failed) == []


def test_a_profile_of_an_earlier_start_that_cannot_be_saved_for_another_order_is_saved_later(
    start, caplog, monkeypatch
):
    job = start(mode="auto", micro_batches=4, **SLOWER)
    job.train_until("run")
    job.schedule = one_f_one_b(ranks=1, micro_batches=2)

    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(StageProfile, "save", save)
        job.restart()
        assert job.train(15) == ["observe"] * 15
        assert caplog.text.count("the profile cannot be saved") == 1
    assert "profile" not in job.train_until("run")
    assert StageProfile.load(job.folder).info.micro_batches == 2
    assert job.events(Failed) == []


def test_plans_that_cannot_be_saved_are_computed_again_after_a_pause(start, monkeypatch):
    job = start(mode="auto", **SLOWER)
    job.train_until("optimizing")
    with monkeypatch.context() as full:
        full.setattr(WorkerAtOnce, "error", "No space left on device")
        assert job.train(5)[-1] == "observe"
    assert set(job.train_until("run")) <= {"observe", "optimizing"}
    assert "No space left" in job.events(Failed)[0].error
