"""A job with an output folder, for the pages and pictures of these tests."""

import pytest
from run_folders import make_job


@pytest.fixture(scope="session")
def job():
    return make_job()
