"""A folder is written by one job at a time. The other job is a process of its own, as locks tell processes apart."""

import subprocess
import sys

import pytest

from perseus_ds.errors import ConfigError
from perseus_ds.runtime.output_folder import FolderLock

OTHER = """
import sys
from pathlib import Path
from perseus_ds.runtime.output_folder import FolderLock
lock = FolderLock()
print(lock.acquire(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_job():
    """A function that has another process take a folder, and returns it."""
    processes = []

    def take(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "None\n"
        return process

    yield take
    for process in processes:
        process.kill()
        process.communicate()


def test_a_job_whose_folder_another_one_has_writes_beside_it_and_says_so(start, other_job, tmp_path, caplog):
    other = other_job(tmp_path / "perseus")
    job = start(mode="observe")
    job.train(3)
    assert len(job.close()) == 3
    assert job.folder == tmp_path / "perseus-2"
    assert not (tmp_path / "perseus" / "run.jsonl").exists()
    assert f"process {other.pid} on " in caplog.text
    assert f"This job writes to {tmp_path / 'perseus-2'}" in caplog.text


@pytest.mark.parametrize("block", [{"mode": "profile"}, {"mode": "auto", "required": True}])
def test_it_is_an_error_at_the_start_of_a_job_that_needs_its_folder(start, other_job, tmp_path, block):
    other = other_job(tmp_path / "perseus")
    with pytest.raises(ConfigError, match=f"a job that is running \\(process {other.pid} on .*another one"):
        start(**block)


def test_a_job_that_was_killed_leaves_its_folder_to_the_next_start(start, other_job, tmp_path):
    other = other_job(tmp_path / "perseus")
    other.kill()
    other.wait()
    job = start(mode="observe")
    job.train(2)
    job.close()
    assert (tmp_path / "perseus" / "run.jsonl").exists()
    assert FolderLock().acquire(tmp_path / "perseus") is None


def test_a_folder_that_cannot_be_made_belongs_to_nobody(tmp_path):
    (tmp_path / "file").touch()
    assert FolderLock().acquire(tmp_path / "file" / "folder") is None
