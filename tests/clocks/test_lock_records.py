"""Records of locked clocks: which process is dead is told by the kernel; the folder is this user's alone."""

import os
import subprocess
import sys

import psutil
import pytest
from run_log import wait_until

from perseus_ds.clocks import lock_records
from perseus_ds.clocks.lock_records import HeldLock, all_records, left_locks

HOLD = """
import signal, sys
from perseus_ds.clocks import lock_records
from perseus_ds.clocks.lock_records import HeldLock
held = HeldLock(sys.argv[1], "job")
if sys.argv[2] == "end":
    held.end()
print(flush=True)
signal.pause()
"""


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Start a process that holds a lock; returns it once it does."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    processes = []

    def hold(address, how="hold"):
        processes.append(subprocess.Popen([sys.executable, "-c", HOLD, address, how], stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def end(process):
    process.kill()
    process.wait()


def addresses():
    return [(left.address, left.pid) for left in left_locks()]


def test_a_lock_counts_as_left_from_the_death_of_its_process_until_it_is_forgotten(hold):
    process = hold("nvml:GPU-1")
    assert addresses() == []
    end(process)
    assert addresses() == [("nvml:GPU-1", process.pid)]
    for left in left_locks():
        left.forget()
    assert addresses() == []


def test_a_lock_that_its_process_has_ended_counts_as_left(hold):
    process = hold("nvml:GPU-1", "end")
    assert addresses() == [("nvml:GPU-1", process.pid)]


def test_a_gpu_that_a_living_process_holds_is_not_left(hold):
    dead, _ = hold("nvml:GPU-1"), hold("nvml:GPU-1")
    end(dead)
    assert addresses() == []


def test_ones_own_lock_is_not_left_and_stays_held(hold):
    held = HeldLock("nvml:GPU-1", "job")
    assert addresses() == []
    assert all_records() == []
    held.end()


# The first thread ends, which makes the process a zombie for as long as the other one lives.
LEADER_ENDS = """
import ctypes, platform, sys, threading
from perseus_ds.clocks.lock_records import HeldLock
held = HeldLock("nvml:GPU-1", "job")
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread only
"""


def test_a_process_whose_first_thread_has_ended_has_not_ended_while_another_one_lives(hold):
    with subprocess.Popen(
        [sys.executable, "-c", LEADER_ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        started.stdout.readline()
        wait_until(lambda: psutil.Process(started.pid).status() == psutil.STATUS_ZOMBIE, "the first thread's end")
        assert addresses() == []
        started.stdin.close()  # the other thread ends; the process stays a zombie, since nobody waits for it
        wait_until(lambda: addresses() == [("nvml:GPU-1", started.pid)], "a lock that is left")


def test_a_lock_of_another_container_is_left_though_its_process_had_the_same_number(hold, tmp_path):
    end(hold("nvml:GPU-1"))
    (record,) = tmp_path.glob("*/*")
    record.rename(record.with_name(f"{os.getpid()}.1.job.0123456789abcdef.nvml:GPU-1"))
    assert addresses() == [("nvml:GPU-1", os.getpid())]


def test_a_folder_that_others_can_write_or_that_is_a_link_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = tmp_path / f"perseus-ds-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    held = HeldLock("nvml:GPU-1", "job")
    (other,) = (folder for folder in tmp_path.iterdir() if folder != own)
    assert (held.path.parent, list(own.iterdir())) == (other, [])
    held.path.unlink()
    held.end()
    other.rmdir()
    other.symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        HeldLock("nvml:GPU-1", "job")


def test_a_runtime_folder_that_is_not_on_this_node_is_not_used(tmp_path, monkeypatch):
    """Slurm hands on the variables of the login node."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run" / "user" / "1000"))
    monkeypatch.setattr(lock_records, "IN_MEMORY", tmp_path)
    held = HeldLock("nvml:GPU-1", "job")
    assert len(list(tmp_path.glob("perseus-ds-*/*"))) == 1
    held.end()


def test_files_that_are_no_records_are_left_alone(hold, tmp_path):
    end(hold("nvml:GPU-1"))
    folder = next(tmp_path.iterdir())
    (folder / "notes.txt").write_text("mine")
    (folder / "12.x").touch()
    (folder / "13.1.job.x.nvml:GPU-2").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "14.1.job.x.nvml:GPU-3")
    assert [address for address, _ in addresses()] == ["nvml:GPU-1"]
