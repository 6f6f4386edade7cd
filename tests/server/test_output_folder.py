"""Exclusive use of output folders. Other jobs are separate processes, which own the locks."""

import errno
import subprocess
import sys

import pytest
from job_descriptions import request

from perseus_ds.config import parse_block
from perseus_ds.errors import ConfigError
from perseus_ds.protocol.job_messages import Say
from perseus_ds.server.output_folder import FolderLock, own_folder
from perseus_ds.server.server import ServerProcess

OTHER = """
import sys
from pathlib import Path
from perseus_ds.server.output_folder import FolderLock
lock = FolderLock()
print(lock.acquire(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_job():
    """Return a function that locks a folder in another process and returns the process."""
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


def test_a_job_whose_folder_another_one_has_writes_beside_it_and_says_so(other_job, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # restores the folder, because a server changes to that of rank 0
    other = other_job(tmp_path / "perseus")
    process = ServerProcess(request(tmp_path / "perseus", mode="observe"))
    process.server.start()
    process.server.recorder.close()
    process.close()
    assert (tmp_path / "perseus-2" / "run.jsonl").exists()
    assert not (tmp_path / "perseus" / "run.jsonl").exists()
    warnings = " ".join(message.text for _, message in process._outbox if isinstance(message, Say) and message.warns)
    assert f"process {other.pid} on " in warnings
    assert f"This job writes to {tmp_path / 'perseus-2'}" in warnings


@pytest.mark.parametrize("block", [{"mode": "profile"}, {"mode": "auto", "required": True}])
def test_it_is_an_error_at_the_start_of_a_job_that_needs_its_folder(other_job, tmp_path, block):
    other = other_job(tmp_path / "perseus")
    config = parse_block({"output_dir": str(tmp_path / "perseus"), **block})
    with pytest.raises(ConfigError, match=f"a job that is running \\(process {other.pid} on .*another one"):
        own_folder(config, FolderLock())


def test_a_folder_is_another_jobs_if_its_file_system_answers_eacces(tmp_path, monkeypatch):
    (tmp_path / "job.lock").write_text("process 7 on another node\n")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert FolderLock().acquire(tmp_path) == "process 7 on another node"


def test_a_folder_that_cannot_be_made_belongs_to_nobody(tmp_path):
    (tmp_path / "file").touch()
    assert FolderLock().acquire(tmp_path / "file" / "folder") is None
