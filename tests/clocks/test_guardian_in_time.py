"""How long the guardian tries and waits, in virtual time."""

import math
import os
import threading

import pytest
from virtual.time import VirtualTime

from perseus_ds.clocks import guardian, guardian_daemon
from perseus_ds.clocks.guardian import Guardian
from perseus_ds.clocks.guardian_daemon import ClockRestorer
from perseus_ds.clocks.lock_records import all_records
from perseus_ds.errors import GpuError


class LeftGpu:
    """A GPU whose process is dead, and whose driver works from some time on [s], or hangs for some time."""

    def __init__(self, time, works_from_s=0.0, hangs_s=0.0):
        self.time = time
        self.works_from_s = works_from_s
        self.hangs_s = hangs_s
        self.reset_at_s = None

    def reset_clock(self):
        self.time.sleep(self.hangs_s)
        if self.time.seconds < self.works_from_s:
            raise (GpuError if self.time.seconds < 30.0 else RuntimeError)("the driver is not well")
        self.reset_at_s = self.time.seconds


@pytest.fixture
def time():
    return VirtualTime(0.0)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The folder of records, with none."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"perseus-ds-{os.getuid()}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def leave(records, monkeypatch):
    """Leave GPUs locked, by processes of a job that are dead."""

    def leave(**gpus):
        for name in gpus:
            (records / f"1.1.job.x.{name}").touch()
        monkeypatch.setattr(guardian_daemon, "open_gpu", gpus.__getitem__)

    return leave


def test_a_guardian_that_no_rank_reaches_ends(records, time):
    ClockRestorer("job", time).serve()
    assert 10.0 <= time.seconds < 11.0


def test_the_clock_of_a_process_that_dies_after_a_minute_is_reset(leave, time, monkeypatch):
    gpu, look = LeftGpu(time), guardian_daemon.all_records
    leave(a=gpu)
    monkeypatch.setattr(guardian_daemon, "all_records", lambda: [(each, time.seconds < 60.0) for each, _ in look()])
    ClockRestorer("job", time).serve()
    assert gpu.reset_at_s == pytest.approx(60.1, abs=0.2)
    assert all_records() == []


@pytest.mark.parametrize(
    ("works_from_s", "at_s", "until_s"), [(0.0, 0.1, 1.0), (60.0, 60.5, 62.0), (math.inf, None, 132.0)]
)
def test_a_driver_that_refuses_is_asked_for_two_minutes(leave, time, works_from_s, at_s, until_s):
    gpu = LeftGpu(time, works_from_s)
    leave(a=gpu)
    ClockRestorer("job", time).serve()
    assert (gpu.reset_at_s is None) if at_s is None else (gpu.reset_at_s <= at_s)
    assert len(all_records()) == (at_s is None), "the record stays while the clock may be locked"
    assert time.seconds < until_s


def test_a_driver_that_hangs_is_waited_for_ten_seconds_and_keeps_no_other_gpu_locked(leave, records, time):
    hung, other = LeftGpu(time, hangs_s=1000.0), LeftGpu(time)
    leave(a=hung, b=other)
    ClockRestorer("job", time).serve()
    assert other.reset_at_s < 1.0
    assert 10.0 <= time.seconds < 11.0
    assert [path.suffix for path in records.iterdir()] == [".a"]


def test_clocks_of_another_job_are_left_to_its_guardian(leave, records, time):
    gpu = LeftGpu(time)
    leave(a=gpu)
    ClockRestorer("another", time).serve()
    assert gpu.reset_at_s is None
    assert list(records.iterdir())


def test_a_guardian_outlives_a_lack_of_files_and_of_threads(leave, time, monkeypatch):
    gpu = LeftGpu(time)
    leave(a=gpu)
    look, start = guardian_daemon.all_records, threading.Thread.start
    problems = [OSError(24, "too many open files"), RuntimeError("can't start new thread")]

    def look_but_fail_once():
        if len(problems) == 2:
            raise problems.pop(0)
        return look()

    def start_but_fail_once(thread):
        if problems:
            raise problems.pop()
        start(thread)

    monkeypatch.setattr(guardian_daemon, "all_records", look_but_fail_once)
    monkeypatch.setattr(threading.Thread, "start", start_but_fail_once)
    ClockRestorer("job", time).serve()
    assert gpu.reset_at_s is not None


def test_ranks_give_up_when_no_guardian_comes(records, time, monkeypatch):
    monkeypatch.setattr(guardian, "_start", lambda job, addresses: time.sleep(1.0))
    with pytest.raises(GpuError, match=r"No guardian came within 30 s\. Clocks may stay locked"):
        Guardian(["nvml:GPU-0"], "job", time)
    assert 30.0 <= time.seconds < 32.0
    assert not list(records.iterdir()), "nothing was locked"


def test_a_rank_whose_gpu_the_guardian_cannot_open_is_an_error(records, time, monkeypatch):
    """As where each rank of a node has a cgroup of its own, with its own GPU."""
    monkeypatch.setattr(guardian, "holder", lambda path: 1)
    with pytest.raises(GpuError, match=r"The guardian of this node cannot open nvml:GPU-0\. Start all ranks"):
        Guardian(["nvml:GPU-0"], "job", time)
    assert not list(records.iterdir()), "nothing was locked"
