"""Plans under changing input shapes: only changed proportions of instruction times are drift."""

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.run_records import Drifted, PlanJudged, ProfileWritten
from perseus_ds.pipeline.instruction import Kind


@pytest.fixture
def job(start):
    """Return a job that runs under a plan."""
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(12)
    return job


def lengthen(job, factors, shapes=2.0):
    """Make the inputs of the next iterations longer."""
    job.shapes = shapes
    for kind, factor in zip((Kind.FORWARD, Kind.BACKWARD, Kind.TAIL), factors, strict=True):
        job.work_s[0][kind] *= factor


def test_a_factor_common_to_all_instructions_is_not_drift_and_scales_the_promise(job):
    lengthen(job, (1.5, 1.5, 1.0))
    assert set(job.train(100)) == {"run"}, "must not be compared with default clocks of other shapes"
    last = job.close()[-1]
    assert job.events(Drifted) == []
    assert len(job.events(ProfileWritten)) == len(job.events(PlanJudged)) == 1
    assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03)
    assert last.default_time_s < last.predicted_time_s


def test_instructions_that_change_in_proportion_are_drift(job):
    lengthen(job, (1.0, 1.6, 1.0))
    job.train_until("profile", most=60)
    job.close()
    (drifted,) = job.events(Drifted)
    assert drifted.drift > 0.05


def test_without_other_shapes_a_plan_that_still_saves_energy_stays_when_all_instructions_take_longer(job):
    lengthen(job, (1.5, 1.5, 1.0), shapes=job.shapes)
    assert set(job.train(100)) == {"run", "default"}
    _, compared = job.train_until_compared(times=2)
    job.train(3)
    last = job.close()[-1]
    assert compared.kept
    assert ["profiling" in event.then for event in job.events(Drifted)] == [False]
    assert len(job.events(ProfileWritten)) == 1
    assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03), "default clocks must be measured again"


def test_going_back_to_the_shapes_of_the_profile_takes_the_promise_back(job):
    lengthen(job, (1.5, 1.5, 1.0))
    job.train(40)
    lengthen(job, (1 / 1.5, 1 / 1.5, 1.0), shapes=1.0)
    job.train(40)
    last = job.close()[-1]
    assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03)
    assert job.events(Drifted) == []
