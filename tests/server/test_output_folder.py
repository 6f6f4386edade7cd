"""Exclusive use of output folders. Other jobs are separate processes, which own the locks."""

import errno
import subprocess
import sys

import msgspec
import pytest
from job_descriptions import described, request
from pipelines import GPipe, one_f_one_b

from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.commands import read_schedule
from perseus_ds.protocol.job_messages import Say, encode
from perseus_ds.server.job import Job
from perseus_ds.server.output_folder import FolderLock, own_folder
from perseus_ds.server.process import ServerProcess

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
    job = Job.of(described(output_dir=str(tmp_path / "perseus"), **block))
    with pytest.raises(ConfigError, match=f"a job that is running \\(process {other.pid} on .*another one"):
        own_folder(job, FolderLock())


OURS, THEIRS = [{"fingerprint": "ours", "models": ("GPT",)}] * 2, [{"fingerprint": "theirs", "models": ("BERT",)}] * 2


def start_and_end(folder, description):
    """Run the server of a job without iterations, and return its output folder and its warnings."""
    made = request(folder)
    process = ServerProcess(msgspec.structs.replace(made, description=encode(description)))
    process.server.start()
    process._state.save_last(process._kept())
    process.server.recorder.close()
    process.close()
    said = [message.text for _, message in process._outbox if isinstance(message, Say) and message.warns]
    return process.server.job.output_dir, " ".join(said)


def test_a_folder_belongs_to_one_job_also_after_its_end(monkeypatch, tmp_path):
    """Later starts of each job find their own folders, also with other numbers of pipelines and micro-batches."""
    monkeypatch.chdir(tmp_path)  # restores the folder, because a server changes to that of rank 0
    folder = tmp_path / "perseus"
    block = {"mode": "observe", "output_dir": str(folder)}
    more = described(one_f_one_b(ranks=2, micro_batches=8), pipelines=2, of_ranks=2 * OURS, **block)
    for description, number in (
        (described(of_ranks=OURS, **block), ""),
        (described(of_ranks=THEIRS, **block), "-2"),
        (more, ""),
        (described(of_ranks=THEIRS, **block), "-2"),
        (described(read_schedule(GPipe, ranks=2, micro_batches=2), of_ranks=OURS, **block), "-3"),
    ):
        used, warnings = start_and_end(folder, description)
        assert str(used) == f"{folder}{number}"
        assert ("is the folder of another job (GPT, " in warnings) == bool(number)
        assert (f"This job writes to {used}." in warnings) == bool(number)


@pytest.mark.parametrize("block", [{"mode": "profile"}, {"mode": "auto", "required": True}])
def test_a_job_that_needs_its_folder_does_not_replace_the_files_of_another_job(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "perseus")
    start_and_end(folder, described(of_ranks=OURS, mode="observe", output_dir=folder))
    job = Job.of(described(of_ranks=THEIRS, output_dir=folder, **block))
    with pytest.raises(ConfigError, match=r"is the folder of another job \(GPT, Train.*another one"):
        own_folder(job, FolderLock())


def test_a_folder_is_another_jobs_if_its_file_system_answers_eacces(tmp_path, monkeypatch):
    (tmp_path / "job.lock").write_text("process 7 on another node\n")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert FolderLock().acquire(tmp_path) == "process 7 on another node"


@pytest.mark.parametrize("mode", ["auto", "observe"])
def test_a_folder_that_cannot_be_made_is_one_error_at_the_start(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)  # restores the folder, because a server changes to that of rank 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/folder\" cannot be written on .* \(Not a directory\)\. Give this job"):
        ServerProcess(request(tmp_path / "file" / "folder", mode=mode))


def test_a_folder_in_which_no_file_can_be_created_is_an_error_at_the_start(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    job = Job.of(described(output_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"cannot be written on .* \(Read-only file system\)"):
        own_folder(job, FolderLock())


def test_a_server_that_replaces_another_one_continues_without_a_folder_that_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    assert own_folder(Job.of(described(output_dir=folder)), FolderLock(), folder) == (folder, "")


def test_a_folder_on_a_file_system_without_locks_is_free(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    job = Job.of(described(output_dir=str(tmp_path)))
    assert own_folder(job, FolderLock()) == (str(tmp_path), "")
