"""Plans for the lengths of micro-batches, which the job provides before each iteration."""

import itertools

import numpy as np
import pytest
from virtual.job import SLOWER, LengthsWorkerAtOnce, VirtualJob

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed, PlanJudged, ShapePlanned
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.server.look_ahead import LookAhead

MICRO_BATCHES = 4


def time_factor(length):
    """Return the time of a pass relative to length 1000."""
    return 0.1 + 0.8 * length / 1000 + 0.1 * (length / 1000) ** 2


class MixedJob(VirtualJob):
    """A job with micro-batches of random lengths, which it provides ``ahead`` iterations in advance."""

    def __init__(self, folder, *, ahead=1, gives=lambda iteration: True, variation=0.3, micro_batches=4, **block):
        draw = np.random.default_rng(3)
        self.lengths = 1000 * (1 + variation * draw.uniform(-1, 1, (1000, 4)))
        self.tells_shapes = False
        self.gives, self.given = gives, [itertools.count() for _ in range(4)]
        super().__init__(folder, mode="auto", micro_batches=micro_batches, **block)
        for rank, _ in itertools.product(range(len(self.gpus)), range(ahead)):
            self.give(rank)

    def give(self, rank):
        pipeline, place = self._place(rank)
        number = next(self.given[rank])
        if place == 0 and self.gives(number):
            self.runtimes[rank].next_lengths(self.lengths_of(number, pipeline).tolist())

    def lengths_of(self, iteration, pipeline):
        return self.lengths[iteration] * (1 + 0.2 * pipeline)

    def _iterate(self, rank):
        self.give(rank)
        self.shapes = 1.0 + self._iterations[rank] * self.tells_shapes
        super()._iterate(rank)

    def work(self, rank, instruction):
        self.slowdowns[rank] = 1.0
        if instruction.kind is not Kind.TAIL:
            lengths = self.lengths_of(self._iterations[rank] - 1, self._place(rank)[0])
            self.slowdowns[rank] = float(time_factor(lengths[instruction.micro_batch % MICRO_BATCHES]))
        super().work(rank, instruction)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(**keys):
        jobs.append(MixedJob(tmp_path / str(len(jobs)), **keys))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_each_iteration_runs_a_plan_for_its_own_lengths_which_saves_energy_in_time(start):
    job = start(stages_s=(0.036, 0.05))
    job.train_until_compared()
    job.train(35)
    records = job.close()
    (judged,) = job.events(PlanJudged)
    assert judged.kept, judged
    assert judged.slowdown == pytest.approx(0, abs=0.01)
    last = records[-30:]
    assert {record.phase for record in last} == {"run"}
    for record in last:
        assert record.time_s == pytest.approx(record.predicted_time_s, rel=0.02)
        assert record.energy_j == pytest.approx(record.predicted_energy_j, rel=0.25), "counters are refreshed rarely"
    assert np.ptp([record.predicted_time_s for record in last]) > 0.05 * last[0].time_s, "predicted times must differ"
    assert sum(record.energy_j for record in last) < 0.92 * sum(record.default_energy_j for record in last)
    assert not job.events(Failed)


def test_the_profile_tells_how_passes_depend_on_lengths_and_its_rows_are_for_the_mean_length(start):
    jobs = [start(**SLOWER, variation=variation) for variation in (0.8, 0.0)]
    for job in jobs:
        job.train_until("run")
    profile, of_one_length = (StageProfile.load(job.folder) for job in jobs)
    assert of_one_length.info.by_length is None, "lengths that do not vary"
    found = profile.info.by_length
    assert found.length == pytest.approx(1000, rel=0.3)
    for length in (500, 1000, 1500):
        factor = found.factors(length)[0, Kind.FORWARD]
        assert factor == pytest.approx(time_factor(length) / time_factor(found.length), rel=0.02)
    for row in profile.measurements:
        if row.kind is not Kind.TAIL:
            expected_s = of_one_length.at(row.stage, row.kind, row.clock_mhz).time_s * time_factor(found.length)
            assert row.time_s == pytest.approx(expected_s, rel=0.02)


@pytest.mark.extended
def test_data_parallel_pipelines_have_lengths_and_plans_of_their_own(start):
    job = start(**SLOWER, pipelines=2)
    (judged, *_) = job.train_until_compared()
    assert judged.kept, judged
    assert judged.saved > judged.promised_saved + 0.01, "the pipeline with less work must slow down"


def test_lengths_may_be_given_several_iterations_ahead(start):
    job = start(**SLOWER, ahead=3)
    job.train_until("run")
    job.train(40)
    records = [record for record in job.close() if record.phase == "run"]
    assert len(records) >= 15
    assert all(record.time_s == pytest.approx(record.predicted_time_s, rel=0.02) for record in records[2:])


def test_lengths_that_come_only_when_their_iteration_begins_are_as_none(start, capsys):
    job = start(**SLOWER, ahead=0)
    job.train_until("run")
    assert StageProfile.load(job.folder).info.by_length is None
    assert capsys.readouterr().out.count("as if all had one length") == 1


def test_lengths_that_are_not_given_any_more_leave_default_clocks(start):
    job = start(**SLOWER, gives=lambda iteration: iteration < 70)
    phases = job.train(90)
    assert "run" in phases[40:70]
    assert "run" not in phases[71:]


@pytest.mark.parametrize("trouble", [{"is_slow": True}, {"problem": "it has failed"}], ids=["slow", "failed"])
def test_plans_that_do_not_come_leave_default_clocks_and_that_is_said_once(start, capsys, trouble):
    job = start(**SLOWER)
    job.lengths_worker = type("Worker", (LengthsWorkerAtOnce,), trouble)
    phases = job.train(90)
    assert "run" not in phases
    assert capsys.readouterr().out.count("no plans for the lengths given") == 1


def test_lengths_of_another_number_of_micro_batches_are_not_planned(start):
    job = start(**SLOWER, micro_batches=3)
    job.train(60)
    assert "run" not in {phase for phase, _, _ in job.taken}


def test_without_lengths_a_plan_for_the_mean_is_compared_with_default_clocks(start):
    job = start(gives=lambda iteration: False, variation=0.1, **SLOWER)
    job.tells_shapes = True
    job.train_until("run")
    assert set(job.train(20)) <= {"run", "default"}
    assert not job.events(ShapePlanned)


def test_what_are_no_lengths_is_an_error(start):
    job = start(**SLOWER)
    for lengths in ([], [100, 0], [float("nan")], [1] * 70_000):
        with pytest.raises(ValueError, match="number for each micro-batch"):
            job.runtime.next_lengths(lengths)


def test_lengths_given_and_never_used_take_no_memory(start):
    job = start(**SLOWER)
    for _ in range(1000):
        job.runtime.next_lengths([1.0])
    assert len([*filter(None, job.runtime._given)]) <= 64
    server = LookAhead(1, print)
    for iteration in range(1000):
        server.give(iteration, 0, (1.0,), begun=0)
    assert server.lengths_of(1, 0) == (1.0,), "the next ones are kept"
    assert len(server._given) <= 129
    for iteration in range(1000):
        server.give(iteration, 0, (1.0,), begun=iteration - 1)
    assert len(server._given) <= 2 * 128
