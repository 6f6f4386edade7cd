"""Separate plans for input shapes with different proportions of instructions, and predicted profiles of new lengths."""

import math
import os
import random
import subprocess
import sys

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed, PlanJudged, ProfileWritten, ShapePlanned
from perseus_ds.client.runtime import length_of_inputs, number_of_inputs
from perseus_ds.pipeline.instruction import Kind

SHORT = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2, Kind.TAIL: 0.01}
LONG = {Kind.FORWARD: 0.3, Kind.BACKWARD: 0.3, Kind.TAIL: 0.01}
LENGTHS = (1.0, 2.0, 3.0)


def work_of_shape(shape):
    return SHORT if shape == 1.0 else LONG


def work_of_length(length):
    """Return times of passes, with attention in backwards and a constant launch time in forwards."""
    return {Kind.FORWARD: 0.05 + 0.05 * length, Kind.BACKWARD: 0.12 * length + 0.02 * length**2, Kind.TAIL: 0.01}


def train(job, shapes, work_s=work_of_shape):
    """Run an iteration of each shape and return the phases."""
    phases = []
    for shape in shapes:
        job.shapes, job.work_s = shape, [work_s(shape)]
        phases += job.train()
    return phases


def train_until(is_so, job, shapes, work_s=work_of_shape):
    """Run iterations of these shapes in turn until a condition on their phases holds, and return all phases."""
    phases = []
    while not is_so(phases[-len(shapes) :]):
        assert len(phases) < 600, phases
        phases += train(job, shapes, work_s)
    return phases


def all_run(phases):
    return set(phases) == {"run"}


@pytest.fixture
def job(start):
    return start(mode="auto", **SLOWER)


def test_shapes_that_alternate_each_get_a_profile_and_a_plan_that_wins_and_then_come_in_any_order(job):
    train_until(lambda phases: len(job.events(PlanJudged)) == 2 and all_run(phases), job, (1.0, 2.0))
    assert [event.kept for event in job.events(PlanJudged)] == [True, True]
    assert len(job.events(ProfileWritten)) == 3, "one for both shapes, and one for each"
    draw = random.Random(1)
    shapes = [draw.choice([1.0, 2.0]) for _ in range(40)]  # cannot be predicted from previous ones
    assert set(train(job, shapes)) == {"run"}
    assert train(job, [3.0, 1.0, 2.0, 4.0]) == ["observe", "run", "run", "observe"]
    records = job.close()[-44:-4]
    assert max(record.late for record in records) < 0.02
    shape_of = {record.shape: shape for record, shape in zip(records, shapes, strict=True)}
    assert sorted(shape_of.values()) == [1.0, 2.0]
    for number, shape in shape_of.items():
        profile = StageProfile.load(job.folder / "shapes" / str(number))
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            row = profile.at_highest_clock(0, kind)
            assert row.time_s == pytest.approx(
                work_of_shape(shape)[kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.03
            )
        mine = [record for record in records if record.shape == number]
        assert mine[-1].time_s / mine[-1].default_time_s == pytest.approx(1.2, abs=0.03)
        assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)


def test_a_new_shape_in_every_iteration_is_said_once_and_leaves_no_files(job, capsys):
    """Sequences are not padded."""

    def train_lengths(numbers):
        return train(job, [1.0 + 0.618034 * number % 1.0 for number in numbers], work_of_length)

    assert train_lengths(range(100))[-1] == "observe"
    before = sorted(path.name for path in job.folder.iterdir())
    phases = train_lengths(range(100, 150))
    assert set(phases) == {"observe"}
    assert sorted(path.name for path in job.folder.iterdir()) == before
    job.close()
    assert not (job.folder / "shapes").exists()
    assert capsys.readouterr().out.count("iterations differ in the shapes of their inputs") == 1
    assert job.events(Failed) == []


def test_iterations_that_begin_alike_and_go_on_differently_are_not_planned_by_shape(job):
    phases = []

    def shapes_of(iteration):
        return [1.0, 1.0, 1.0] if iteration % 2 else [1.0, 2.0, 2.0]

    for iteration in range(100):
        job.shapes = shapes_of(iteration)
        phases += job.train()
    job.close()
    assert phases[-1] == "observe"
    assert [event.given_up for event in job.events(ShapePlanned) if event.given_up is None] == []


def test_shapes_of_inputs_have_the_same_number_in_every_process():
    program = "from perseus_ds.client.runtime import number_of_inputs; print(number_of_inputs((8, None, 'a')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(found.stdout) == number_of_inputs((8, None, "a")) != number_of_inputs((8, None, "b"))


@pytest.mark.parametrize(
    ("lengths", "profiled"),
    [((*LENGTHS, 2.5), 3), pytest.param((*LENGTHS, 30.0), 4, marks=pytest.mark.extended)],
    ids=["near", "far"],
)
def test_a_new_length_near_those_profiled_is_planned_without_a_profile_and_its_promise_is_kept(job, lengths, profiled):
    train_until(all_run, job, LENGTHS, work_of_length)
    train_until(lambda phases: len(job.events(PlanJudged)) == 4 and all_run(phases), job, lengths, work_of_length)
    train(job, lengths * 5, work_of_length)
    records = job.close()
    assert len(job.events(ProfileWritten)) == 1 + profiled, "the first profile is for all lengths"
    assert all(event.kept for event in job.events(PlanJudged))
    new = job.events(ShapePlanned)[-1]
    mine = [record for record in records if record.shape == new.shape and record.phase == "run"][-10:]
    assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
    assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)
    if profiled == 4:
        assert new.profile_error is None
        return
    assert 0 < new.profile_error < 0.02
    predicted = StageProfile.load(job.folder / "shapes" / str(new.shape))
    assert {row.samples for row in predicted.info.rows if row.kind is not Kind.TAIL} == {0}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        row = predicted.at_highest_clock(0, kind)
        assert row.time_s == pytest.approx(work_of_length(2.5)[kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.02)


def test_of_many_lengths_three_are_profiled_and_the_others_wait_for_them(job):
    lengths = (2.0, 3.0, 2.5, 2.2, 2.8)
    train_until(all_run, job, lengths, work_of_length)
    job.close()
    profiled = [event.profile_error is None for event in job.events(ShapePlanned)]
    assert profiled[:4] == [True, True, True, False]
    assert len(profiled) == 5
    # The fifth length may be too far from the profiled ones for a prediction.
    assert len(job.events(ProfileWritten)) == 1 + sum(profiled), "the first profile is for all lengths"


def test_the_length_of_inputs_is_the_elements_of_the_first():
    known = {3.0: 3.0, (2, 4): 8.0, ((8, 128), (8, 128, 128)): 1024.0, ((512, 4), None): 2048.0}
    assert {inputs: length_of_inputs(inputs) for inputs in known} == known
    assert all(math.isnan(length_of_inputs(inputs)) for inputs in ((), "a"))
