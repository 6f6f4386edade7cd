"""Separate plans for input shapes with different proportions of instructions, and predicted profiles of new lengths."""

import math
import os
import random
import subprocess
import sys

import pytest
from virtual.job import SLOWER, WorkerAtOnce, in_order

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed, PlanJudged, ProfileWritten, ShapePlanned
from perseus_ds.client.inputs import length_of_inputs, number_of_inputs
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


def alternate(job, iterations):
    """Run iterations of two alternating shapes and return the phases of each shape."""
    phases = train(job, [1.0, 2.0] * (iterations // 2))
    return {1.0: phases[::2], 2.0: phases[1::2]}


@pytest.fixture
def job(start):
    return start(mode="auto", **SLOWER)


def test_shapes_that_alternate_from_the_start_each_get_a_profile_and_a_plan_that_wins(job):
    phases = alternate(job, 420)
    records = job.close()
    assert {shape: in_order(of_shape)[-1] for shape, of_shape in phases.items()} == {1.0: "run", 2.0: "run"}
    judged = job.events(PlanJudged)
    assert [event.kept for event in judged] == [True, True]
    number_of = {record.shape: shape for record, shape in zip(records, [1.0, 2.0] * 210, strict=True)}
    for number in (1, 2):
        work_s = work_of_shape(number_of[number])
        profile = StageProfile.load(job.folder / "shapes" / str(number))
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            row = profile.at_highest_clock(0, kind)
            assert row.time_s == pytest.approx(work_s[kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.03)
        mine = [record for record in records if record.shape == number and record.phase == "run"]
        assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
        assert mine[-1].time_s / mine[-1].default_time_s == pytest.approx(1.2, abs=0.03)
        energy_j = sum(record.energy_j for record in mine[-20:]) / len(mine[-20:])
        assert energy_j < 0.95 * mine[-1].default_energy_j
    assert len(job.events(ProfileWritten)) == 3, "one for both shapes, and one for each"


@pytest.mark.extended
def test_shapes_run_under_their_own_plans_in_any_order_and_one_that_is_seldom_at_default_clocks(job):
    """The next shape cannot be predicted from previous ones."""
    alternate(job, 420)
    draw = random.Random(1)
    shapes = [draw.choice([1.0, 2.0]) for _ in range(60)]
    assert set(train(job, shapes)) == {"run"}
    assert train(job, [3.0, 1.0, 2.0, 4.0]) == ["observe", "run", "run", "observe"]
    records = job.close()
    without_order = records[-64:-4]
    assert len({(record.shape, shape) for record, shape in zip(without_order, shapes, strict=True)}) == 2
    assert max(record.late for record in without_order) < 0.02
    assert [record.plan for record in records[-4:]].count(None) == 2
    assert {event.shape for event in job.events(ShapePlanned)} == {1, 2}


def test_a_new_shape_in_every_iteration_is_said_once_and_leaves_no_files(job, capsys):
    """Sequences are not padded."""

    def train_lengths(numbers):
        return train(job, [1.0 + 0.618034 * number % 1.0 for number in numbers], work_of_length)

    assert train_lengths(range(260))[-1] == "observe"
    before = sorted(path.name for path in job.folder.iterdir())
    phases = train_lengths(range(260, 400))
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

    for iteration in range(300):
        job.shapes = shapes_of(iteration)
        phases += job.train()
    job.close()
    assert phases[-1] == "observe"
    assert [event.given_up for event in job.events(ShapePlanned) if event.given_up is None] == []


@pytest.mark.extended
def test_a_shape_that_cannot_be_profiled_runs_at_default_clocks_and_the_others_go_on(start, monkeypatch):
    job = start(mode="auto", **SLOWER)
    fails = WorkerAtOnce.__init__

    def fail_for_one_shape(worker, request, log_path):
        fails(worker, request, log_path)
        worker.error = "no such profile" if request.out.name == "2" else ""

    monkeypatch.setattr(WorkerAtOnce, "__init__", fail_for_one_shape)
    phases = alternate(job, 420)
    job.close()
    given_up = [event for event in job.events(ShapePlanned) if event.given_up]
    assert len(given_up) == 1
    assert "no such profile" in given_up[0].given_up
    assert {of_shape[-1] for of_shape in phases.values()} == {"run", "observe"}
    assert job.events(Failed) == []


def test_shapes_of_inputs_have_the_same_number_in_every_process():
    program = "from perseus_ds.client.inputs import number_of_inputs; print(number_of_inputs((8, None, 'a')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(found.stdout) == number_of_inputs((8, None, "a")) != number_of_inputs((8, None, "b"))


@pytest.fixture
def planned_by_length(job):
    """Return a job in which each of three lengths runs under its own plan."""
    phases = train(job, LENGTHS * 170, work_of_length)
    assert set(phases[-3:]) == {"run"}
    return job


def test_a_new_length_is_planned_without_a_profile_of_its_own_and_its_promise_is_kept(planned_by_length):
    job = planned_by_length
    profiled = len(job.events(ProfileWritten))
    phases = train(job, [*LENGTHS, 2.5] * 90, work_of_length)
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
        assert row.time_s == pytest.approx(work_of_length(2.5)[kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.02)
    assert all(event.kept for event in job.events(PlanJudged))
    mine = [record for record in records if record.shape == 4 and record.phase == "run"][-10:]
    assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
    assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)


def test_of_many_lengths_three_are_profiled_and_the_others_wait_for_them(job):
    phases = train(job, (2.0, 3.0, 2.5, 2.2, 2.8) * 200, work_of_length)
    job.close()
    assert set(phases[-5:]) == {"run"}
    profiled = [event.profile_error is None for event in job.events(ShapePlanned)]
    assert profiled[:4] == [True, True, True, False]
    assert len(profiled) == 5
    # The fifth length may be too far from the profiled ones for a prediction.
    assert len(job.events(ProfileWritten)) == 1 + sum(profiled), "the first profile is for all lengths"


@pytest.mark.extended
def test_a_length_far_from_those_profiled_is_profiled_itself(planned_by_length):
    job = planned_by_length
    profiled = len(job.events(ProfileWritten))
    train(job, [*LENGTHS, 30.0] * 30, work_of_length)
    job.close()
    assert len(job.events(ProfileWritten)) == profiled + 1
    assert job.events(ShapePlanned)[-1].profile_error is None


def test_the_length_of_inputs_is_the_elements_of_the_first():
    known = {3.0: 3.0, (2, 4): 8.0, ((8, 128), (8, 128, 128)): 1024.0, ((512, 4), None): 2048.0}
    assert {inputs: length_of_inputs(inputs) for inputs in known} == known
    assert all(math.isnan(length_of_inputs(inputs)) for inputs in ((), "a"))
