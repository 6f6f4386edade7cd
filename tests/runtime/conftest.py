"""Jobs of one rank in virtual time."""

import pytest
from virtual_job import SLOWER, VirtualJob, WorkerAtOnce


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a job; its optimiser runs at once, in this process."""
    monkeypatch.setattr("perseus_ds.runtime.optimising.OptimizeWorker", WorkerAtOnce)
    jobs = []

    def start(folder="perseus", **block):
        jobs.append(VirtualJob(tmp_path / folder, **block))
        return jobs[-1]

    yield start
    for job in jobs:
        job.runtime.close()


@pytest.fixture
def frontier(start):
    """The frontier that another job made."""
    job = start("other", mode="auto", **SLOWER)
    job.train_until("run")
    return str(job.folder / "frontier.json")
