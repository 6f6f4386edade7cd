"""Alternating numbers of micro-batches run under plans, and training has the same bits."""

import pytest
from job import QUICK_PROFILE, assert_same_training, assert_untouched, block_in, run, run_jobs
from megatron_job import __file__ as megatron_script
from run_log import events, iterations, records
from schedule_job import __file__ as torch_script

pytestmark = pytest.mark.integration
COUNTS = [4, 2]
POLICY = {"name": "energy_optimal"}


def assert_each_has_a_plan(folder):
    """Assert that both numbers ran under plans at the end, based on the only measured profile."""
    of_job = records(folder)
    assert {record["order"] for record in iterations(of_job, "run")[-10:]} == {None, 1}
    assert len(events(of_job, "profile")) == 1
    (planned,) = events(of_job, "schedule")
    assert (planned["micro_batches"], planned["shares_profile"]) == (2, True)


def test_deepspeed(tmp_path):
    perseus = {"mode": "auto", "profile": QUICK_PROFILE, "cache": False, "policy": POLICY}
    perseus["simulated"] = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
    job = {"counts": COUNTS, "work": [3, 2]}
    planned = run(tmp_path / "auto", 2, perseus=perseus, until=["run", 50], steps=10_000, **job)
    steps = len(planned.ranks[0]["losses"])
    assert_each_has_a_plan(tmp_path / "auto" / "perseus")
    assert_same_training(planned, run(tmp_path / "without", 2, steps=steps, **job))


@pytest.mark.extended
def test_profile_mode_on_deepspeed(tmp_path):
    perseus = {"mode": "profile", "profile": QUICK_PROFILE}
    perseus["simulated"] = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
    job = {"counts": COUNTS, "work": [3, 2], "steps": 60}
    profiled = run(tmp_path / "profile", 2, perseus=perseus, **job)
    of_job = records(tmp_path / "profile" / "perseus")
    assert len(events(of_job, "profile")) == 1
    assert not events(of_job, "failure")
    assert_same_training(profiled, run(tmp_path / "without", 2, **job))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_torch(tmp_path, name):
    job = {"schedule": name, "micro_batches": max(COUNTS), "counts": COUNTS}
    auto = block_in(tmp_path, "auto", policy=POLICY)
    jobs = {"auto": {**job, "until": ["run", 50], "perseus": auto}, "without": job}
    for of_rank in run_jobs(tmp_path, 2, torch_script, jobs):
        assert_untouched(of_rank)
    assert_each_has_a_plan(tmp_path / "auto")


@pytest.mark.extended
def test_megatron(tmp_path):
    job = {"stages": 2, "orders": [[count] for _ in range(90) for count in COUNTS]}
    jobs = {"auto": {**job, "perseus": block_in(tmp_path, "auto", policy=POLICY)}, "without": job}
    for of_rank in run_jobs(tmp_path, 2, megatron_script, jobs):
        assert_untouched(of_rank)
    assert_each_has_a_plan(tmp_path / "auto")
