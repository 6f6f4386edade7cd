"""Plans for one iteration with given lengths of the micro-batches."""

import itertools
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import dual_pipe_v, one_f_one_b, synthetic_profile
from run_log import wait_until

from perseus_ds.artifacts.profile import ByLength, PassByLength, StageProfile
from perseus_ds.optimizer.lengths import LengthsPlanner, LengthsWorker, PlannedJob
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.solver import solve_exact
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.planning import PlanningSettings

PARTS = {"constant": 0.1, "linear": 0.8, "quadratic": 0.1}


def profile_of(stages):
    """Return a profile at length 100 with passes that depend on lengths."""
    profile = synthetic_profile(stages, blocking_power_w=80.0)
    passes = [PassByLength(stage=s, kind=k, **PARTS) for s, k in profile.keys if k is not Kind.TAIL]
    info = profile.info.model_copy(update={"by_length": ByLength(length=100, passes=passes)})
    return StageProfile(profile.measurements, info)


def planner_of(schedule):
    return LengthsPlanner(schedule, profile_of(schedule.num_stages), PlanningSettings(plans=2))


@given(
    lengths=st.lists(st.integers(10, 300), min_size=4, max_size=4),
    slowdown=st.sampled_from([0.0, 0.1, 10.0]),
    schedule=st.sampled_from([one_f_one_b(3, 4), dual_pipe_v(2, 4)]),
)
@settings(max_examples=15, deadline=None)
def test_plans_are_in_time_and_nearly_as_good_as_the_exact_solver(lengths, slowdown, schedule):
    planner = planner_of(schedule)
    found = planner.plan([tuple(lengths)], slowdown)
    problem = planner.problem(lengths)
    plan = problem.evaluate(found.pipelines[0].clocks_mhz)
    assert plan.time_s <= problem.no_slower_s * (1 + slowdown) * (1 + 1e-9)
    assert (found.pipelines[0].time_s, found.pipelines[0].energy_j) == pytest.approx((plan.time_s, plan.energy_j))
    assert found.saved == pytest.approx(1 - plan.energy_j / problem.baseline.energy_j)
    for clocks, spans in zip(plan.clocks_mhz, found.pipelines[0].spans_s, strict=True):
        assert len(clocks) == len(spans)
        assert all(begin < end for begin, end in spans)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
    if slowdown == 0.0:
        exact, _ = solve_exact(problem, lambda what, done: None)
        assert plan.energy_j <= 1.005 * min(one.energy_j for one in exact if one.time_s <= plan.time_s * (1 + 1e-9))


def test_equal_lengths_are_planned_as_a_profile_of_that_length_says():
    planner = planner_of(one_f_one_b(2, 4))
    usual, long = (planner.problem((length,) * 4) for length in (100, 200))
    assert usual.t_min_s == pytest.approx(problem_for(one_f_one_b(2, 4), profile_of(2)).t_min_s)
    assert long.t_min_s / usual.t_min_s == pytest.approx(0.1 + 1.6 + 0.4, rel=0.05), "tails do not depend on lengths"
    found = planner.plan([(200,) * 4])
    assert found.relative_time == pytest.approx(long.baseline.time_s / usual.baseline.time_s)
    assert found.relative_energy == pytest.approx(long.baseline.energy_j / usual.baseline.energy_j)


def test_pipelines_with_little_to_do_end_together_with_the_slowest_and_use_less_for_that():
    planner = planner_of(one_f_one_b(3, 4))
    short, long = (50,) * 4, (150,) * 4
    together = planner.plan([short, long]).pipelines
    alone = [planner.plan([lengths]).pipelines[0] for lengths in (short, long)]
    assert together[1] == alone[1]
    assert 1.2 * alone[0].time_s < together[0].time_s <= together[1].time_s * (1 + 1e-9)
    assert together[0].energy_j < alone[0].energy_j + 3 * 80.0 * (together[0].time_s - alone[0].time_s)


@pytest.fixture
def job(tmp_path):
    profile_of(2).save(tmp_path / "profile.csv")
    return PlannedJob(profile=tmp_path / "profile.csv", schedule=one_f_one_b(2, 4), settings=PlanningSettings())


def received(worker):
    return wait_until(lambda: worker.error or worker.received(0.1), "a plan")


def test_a_process_plans_one_iteration_after_the_other(job, tmp_path):
    worker = LengthsWorker(job, tmp_path / "lengths.log")
    try:
        planner = LengthsPlanner(job.schedule, profile_of(2), job.settings)
        for lengths, slowdown in (((50, 60, 70, 80), 0.0), ((100,) * 4, 0.1)):
            worker.request([lengths], slowdown)
            assert received(worker) == planner.plan([lengths], slowdown)
    finally:
        worker.stop()
    assert worker.received(0.0) is None
    assert worker.error


def test_why_it_cannot_plan_is_reported(job, tmp_path):
    worker = LengthsWorker(replace(job, profile=tmp_path / "other.csv"), tmp_path / "lengths.log")
    try:
        assert "other.csv" in received(worker)
    finally:
        worker.stop()


def test_the_process_ends_with_its_parent(job, tmp_path):
    code = f"""
import os, pickle
from pathlib import Path
from perseus_ds.optimizer.lengths import LengthsWorker
worker = LengthsWorker(pickle.loads({pickle.dumps(job)!r}), Path({str(tmp_path / "lengths.log")!r}))
print(worker._process.pid, flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    pid = int(ended.stdout.splitlines()[-1])
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")
