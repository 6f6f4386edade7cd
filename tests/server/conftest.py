"""Jobs of one rank in virtual time."""

import pytest
from virtual.job import SLOWER, VirtualJob


@pytest.fixture
def start(tmp_path):
    """A function that starts a job of one rank."""
    jobs = []

    def start(folder="perseus", **block):
        jobs.append(VirtualJob(tmp_path / folder, **block))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def frontier(tmp_path_factory):
    """The frontier of another job."""
    job = VirtualJob(tmp_path_factory.mktemp("other"), mode="auto", **SLOWER)
    job.train_until("run")
    job.close()
    return str(job.folder / "frontier.json")
