"""Plans for lengths of inputs whose profiles are predicted from those of other lengths."""

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import PlanJudged, ProfileWritten, ShapePlanned
from perseus_ds.client.inputs import length_of_inputs
from perseus_ds.pipeline.instruction import Kind

LENGTHS = (1.0, 2.0, 3.0)


def work_s(length):
    """Return times of passes, with attention in backwards and a constant launch time in forwards."""
    return {
        Kind.FORWARD: 0.05 + 0.05 * length,
        Kind.BACKWARD: 0.12 * length + 0.02 * length**2,
        Kind.TAIL: 0.01,
    }


def train(job, lengths):
    phases = []
    for length in lengths:
        job.shapes, job.work_s = length, [work_s(length)]
        phases += job.train()
    return phases


@pytest.fixture
def job(start):
    """Return a job in which each of three lengths runs under its own plan."""
    job = start(mode="auto", **SLOWER)
    phases = train(job, LENGTHS * 170)
    assert set(phases[-3:]) == {"run"}
    return job


def test_a_new_length_is_planned_without_a_profile_of_its_own_and_its_promise_is_kept(job):
    profiled = len(job.events(ProfileWritten))
    phases = train(job, [*LENGTHS, 2.5] * 90)
    records = job.close()
    assert phases[-1] == "run"
    assert "profile" not in phases
    assert len(job.events(ProfileWritten)) == profiled
    planned = [event for event in job.events(ShapePlanned) if event.profile_error is not None]
    assert [event.shape for event in planned] == [4]
    assert 0 < planned[0].profile_error < 0.02
    predicted = StageProfile.load(job.folder / "shapes" / "4")
    assert {row.samples for row in predicted.info.rows if row.kind is not Kind.TAIL} == {0}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        row = predicted.at_highest_clock(0, kind)
        assert row.time_s == pytest.approx(work_s(2.5)[kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.02)
    assert all(event.kept for event in job.events(PlanJudged))
    mine = [record for record in records if record.shape == 4 and record.phase == "run"][-10:]
    assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
    assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)


def test_of_many_lengths_three_are_profiled_and_the_others_wait_for_them(start):
    job = start(mode="auto", **SLOWER)
    phases = train(job, (2.0, 3.0, 2.5, 2.2, 2.8) * 200)
    job.close()
    assert set(phases[-5:]) == {"run"}
    profiled = [event.profile_error is None for event in job.events(ShapePlanned)]
    assert profiled[:4] == [True, True, True, False]
    assert len(profiled) == 5
    # The fifth length may be too far from the profiled ones for a prediction.
    assert len(job.events(ProfileWritten)) == 1 + sum(profiled), "the first profile is for all lengths"


@pytest.mark.extended
def test_a_length_far_from_those_profiled_is_profiled_itself(job):
    profiled = len(job.events(ProfileWritten))
    train(job, [*LENGTHS, 30.0] * 30)
    job.close()
    assert len(job.events(ProfileWritten)) == profiled + 1
    assert job.events(ShapePlanned)[-1].profile_error is None


@pytest.mark.parametrize(
    ("inputs", "length"),
    [
        (3.0, 3.0),
        (((8, 128), (8, 128, 128)), 1024.0),
        ((2, 4), 8.0),
        (((512, 4), None), 2048.0),
    ],
)
def test_the_length_of_inputs_is_the_elements_of_the_first(inputs, length):
    assert length_of_inputs(inputs) == length


def test_inputs_that_are_no_shapes_have_no_known_length():
    assert length_of_inputs(()) != length_of_inputs(())
    assert length_of_inputs("a") != length_of_inputs("a")
