"""Records of locked clocks: which process is dead is told by the kernel; the folder is this user's alone."""

import os
import subprocess
import sys

import pytest

from perseus_ds.clocks import lock_records
from perseus_ds.clocks.lock_records import HeldLock, is_held, left_locks

HOLD = """
import signal, sys
from perseus_ds.clocks import lock_records
from perseus_ds.clocks.lock_records import HeldLock
held = HeldLock(sys.argv[1])
if sys.argv[2] == "release":
    held.release()
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


def test_a_released_lock_leaves_nothing(hold, tmp_path):
    end(hold("nvml:GPU-1", "release"))
    assert addresses() == []
    assert not list(tmp_path.glob("*/*"))


def test_a_gpu_that_a_living_process_holds_is_not_left(hold):
    dead, _ = hold("nvml:GPU-1"), hold("nvml:GPU-1")
    end(dead)
    assert addresses() == []


def test_ones_own_lock_is_not_left_and_stays_held(hold):
    held = HeldLock("nvml:GPU-1")
    assert addresses() == []
    held.release()
    held.release()


def test_a_lock_of_another_container_is_left_though_its_process_had_the_same_number(hold, tmp_path):
    end(hold("nvml:GPU-1"))
    (record,) = tmp_path.glob("*/*")
    record.rename(record.with_name(f"{os.getpid()}.1.0123456789abcdef"))
    assert addresses() == [("nvml:GPU-1", os.getpid())]


def test_whether_another_living_process_holds_a_gpu_is_known(hold):
    mine, process = HeldLock("nvml:GPU-2"), hold("nvml:GPU-1")
    assert is_held("nvml:GPU-1")
    assert not is_held("nvml:GPU-2")
    end(process)
    assert not is_held("nvml:GPU-1")
    mine.release()


def test_a_folder_that_others_can_write_is_not_used(hold, tmp_path):
    folder = tmp_path / f"perseus-ds-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        HeldLock("nvml:GPU-1")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        HeldLock("nvml:GPU-1")
    assert addresses() == []


def test_a_runtime_folder_that_is_not_on_this_node_is_not_used(tmp_path, monkeypatch):
    """Slurm hands on the variables of the login node."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run" / "user" / "1000"))
    monkeypatch.setattr(lock_records, "IN_MEMORY", tmp_path)
    held = HeldLock("nvml:GPU-1")
    assert len(list(tmp_path.glob("perseus-ds-*/*"))) == 1
    held.release()


def test_files_that_are_no_records_are_left_alone(hold, tmp_path):
    end(hold("nvml:GPU-1"))
    folder = next(tmp_path.iterdir())
    (folder / "notes.txt").write_text("mine")
    (folder / "12.x").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "13.x")
    assert [address for address, _ in addresses() if address] == ["nvml:GPU-1"]
