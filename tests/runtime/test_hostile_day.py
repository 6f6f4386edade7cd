"""Random faults of a few minutes, in virtual time; ``benchmarks/soak.py`` does so for hours."""

import pytest
from virtual.hostile_day import GPU_FAULTS, JOB_FAULTS, HostileDay


def test_every_promise_is_kept_under_faults_of_drivers(tmp_path):
    day = HostileDay(tmp_path, seed=1, causes=GPU_FAULTS)
    assert day.run(minutes=1) == []
    assert sum(outcome.times for outcome in day.outcomes.values()) >= 1


@pytest.mark.extended
def test_every_promise_is_kept_under_faults_of_drivers_and_jobs(tmp_path):
    day = HostileDay(tmp_path, seed=2, causes=GPU_FAULTS + JOB_FAULTS)
    assert day.run(minutes=30) == []
