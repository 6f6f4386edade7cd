"""A job with an output folder, for tests of pages and pictures."""

import pytest
from run_folders import make_job


@pytest.fixture(scope="session")
def job():
    return make_job()
