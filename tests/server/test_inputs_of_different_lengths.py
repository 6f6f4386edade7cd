"""Inputs of iterations differ in length, which nobody knows in advance."""

import random

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Drifted, OrderPlanned, PlanChosen, ProfileWritten
from perseus_ds.pipeline.instruction import Kind

LENGTHS = (1.0, 1.25)


def train_until(job, phase, most=200, *, knows_tokens=False):
    """Train iterations of random lengths, drawn for each pipeline, until the next one has this phase."""
    draw = random.Random(1)

    def is_before():
        job.slowdowns = [draw.choice(LENGTHS) for _ in job.slowdowns]
        job.tokens = [1000 * length if knows_tokens else 0 for length in job.slowdowns]
        return job.phase != phase

    job.train_while(is_before, most)


def test_the_profile_has_mean_times_and_each_clock_has_seen_several_iterations(start):
    job = start(mode="profile")
    train_until(job, "observe")
    profile = StageProfile.load(job.folder)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        options = profile.options(0, kind)
        top_s = profile.at_highest_clock(0, kind).time_s
        for clock_mhz, time_s in zip(options.clock_mhz.tolist(), options.time_s.tolist(), strict=True):
            expected_s = sum(LENGTHS) / 2 * job.work_s[0][kind] * job.gpu.model.slowdown(clock_mhz)
            assert time_s == pytest.approx(expected_s, rel=0.07)
            assert time_s >= 0.97 * top_s, "no lower clock seems to be faster"


def test_the_profile_is_that_of_the_usual_size_if_the_engine_knows_the_tokens(start):
    job = start(mode="profile")
    train_until(job, "observe", knows_tokens=True)
    profile = StageProfile.load(job.folder)
    usual = profile.info.tokens_per_micro_batch
    assert 1000 < usual < 1250
    options = profile.options(0, Kind.FORWARD)
    for clock_mhz, time_s in zip(options.clock_mhz.tolist(), options.time_s.tolist(), strict=True):
        expected_s = usual / 1000 * job.work_s[0][Kind.FORWARD] * job.gpu.model.slowdown(clock_mhz)
        assert time_s == pytest.approx(expected_s, rel=0.02)


def test_inputs_of_another_length_than_profiled_are_no_drift(start):
    job = start(mode="auto", **SLOWER)
    train_until(job, "run", knows_tokens=True)
    job.slowdowns, job.tokens = [1.25], [1250]
    job.train(60)
    assert job.events(Drifted) == []


def test_a_job_of_two_pipelines_whose_inputs_differ_runs_plans_of_one_profile(start):
    job = start(mode="auto", pipelines=2, **SLOWER)
    train_until(job, "run")
    assert len(job.events(ProfileWritten)) == 1
    assert job.events(OrderPlanned) == []


@pytest.mark.parametrize(("tokens", "is_straggler"), [([1250, 1000], False), ([1000, 1000], True)])
def test_a_pipeline_with_longer_inputs_in_many_iterations_in_a_row_is_no_straggler(start, tokens, is_straggler):
    job = start(mode="auto", pipelines=2, **SLOWER)
    train_until(job, "run", knows_tokens=True)
    job.slowdowns, job.tokens = [1.25, 1.0], tokens
    job.train(30)
    assert any(event.straggler == 0 for event in job.events(PlanChosen)) == is_straggler
