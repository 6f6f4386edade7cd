"""The job whose output folder the pages and pictures of these tests show."""

import pytest
from run_folders import make_job


@pytest.fixture(scope="session")
def job():
    return make_job()
