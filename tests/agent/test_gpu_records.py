"""Records of locked clocks: the holder of a GPU, clocks left locked, and superseded agents."""

import os
import shutil
import subprocess
import sys

import pytest

from perseus_ds.agent.gpu_records import GpuRecord, left_locked, note_reset

HOLD = """
import signal, sys
from perseus_ds.agent.gpu_records import GpuRecord
record = GpuRecord(sys.argv[1], "job")
record.set_locked(True)
print(flush=True)
signal.pause()
"""


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """A function that starts a process that serves a GPU, and returns it when it does."""
    monkeypatch.setenv("PERSEUS_RUNTIME_DIR", str(tmp_path))
    processes = []

    def hold(gpu):
        processes.append(subprocess.Popen([sys.executable, "-c", HOLD, gpu], stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def end(process):
    process.kill()
    process.wait()


def left():
    found = []
    for record in left_locked("this"):
        found.append((record.gpu, record.left_by, record.is_of_same_job))
        record.close()
    return found


def test_a_clock_counts_as_left_from_the_death_of_its_agent_until_it_is_recorded_as_reset(hold):
    process = hold("nvml:GPU-1")
    assert left() == []
    end(process)
    assert left() == [("nvml:GPU-1", process.pid, False)]
    record = GpuRecord("nvml:GPU-1", "this")
    record.set_locked(False)
    record.close()
    assert left() == []


def test_a_record_taken_by_another_agent_is_not_current(hold, tmp_path):
    record = GpuRecord("nvml:GPU-1", "this")
    assert record.is_current
    record.close()
    later = GpuRecord("nvml:GPU-1", "this")
    assert later.is_current
    path = next(tmp_path.glob("*/gpu.*"))
    path.write_text("99 1 1 another")
    assert not later.is_current
    later.set_locked(False)
    assert path.read_text() == "99 1 1 another", "the old agent does not change it"


def test_a_record_whose_folder_is_removed_is_written_again(hold, tmp_path):
    """This happens at the end of a login session."""
    record = GpuRecord("nvml:GPU-1", "this")
    record.set_locked(True)
    shutil.rmtree(next(tmp_path.iterdir()))
    record.restore()
    assert record.is_current
    assert next(tmp_path.glob("*/gpu.*")).read_text().split()[2:] == ["1", "this"]


def test_a_record_that_could_not_be_written_leaves_the_gpu_to_its_agent(hold, tmp_path):
    record = GpuRecord("nvml:GPU-1", "this")
    next(tmp_path.glob("*/gpu.*")).write_text("")  # a full disk
    assert record.is_current
    record.restore()
    assert next(tmp_path.glob("*/gpu.*")).read_text()


def test_a_reset_from_outside_ends_what_a_dead_agent_left(hold):
    end(hold("nvml:GPU-1"))
    note_reset("nvml:GPU-1")
    assert left() == []


def test_a_reset_from_outside_leaves_a_gpu_to_the_agent_that_runs(hold, tmp_path):
    process = hold("nvml:GPU-1")
    before = next(tmp_path.glob("*/gpu.*")).read_text()
    note_reset("nvml:GPU-1")
    assert next(tmp_path.glob("*/gpu.*")).read_text() == before
    end(process)
    assert left() != []


def test_files_that_are_no_records_are_left_alone(hold, tmp_path):
    end(hold("nvml:GPU-1"))
    folder = next(tmp_path.iterdir())
    (folder / "notes.txt").write_text("mine")
    (folder / "gpu.x").write_bytes(b"\xff\x00 nonsense")
    (folder / "gpu.nvml:GPU-2").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "gpu.nvml:GPU-3")
    assert [gpu for gpu, _, _ in left()] == ["nvml:GPU-1"]
