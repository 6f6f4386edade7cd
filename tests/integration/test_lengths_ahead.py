"""Lengths given an iteration ahead run under plans, and training has the same bits."""

import random

import pytest
from job import QUICK_PROFILE, assert_same_training, assert_untouched, block_in, run, run_jobs
from megatron_job import __file__ as megatron_script
from run_log import events, iterations, records
from schedule_job import __file__ as torch_script

pytestmark = pytest.mark.integration
POLICY = {"name": "energy_optimal"}
SIMULATED = {"longest_instruction_s": 0.04, "counter_period_s": 0.005, "lock_latency_s": 0.001}


def mixed(sizes, steps, micro_batches=2):
    """Return the sizes of the micro-batches of each step."""
    draw = random.Random(3)
    return [[draw.choice(sizes) for _ in range(micro_batches)] for _ in range(steps)]


def test_deepspeed(tmp_path):
    perseus = {"mode": "auto", "profile": QUICK_PROFILE, "cache": False, "policy": POLICY, "simulated": SIMULATED}
    job = {"work": [3, 2], "micro_batches": 2, "mixed": mixed([16, 24, 32, 40], 400)}
    planned = run(tmp_path / "auto", 2, perseus=perseus, until=["run", 30], steps=400, **job)
    of_job = records(tmp_path / "auto" / "perseus")
    assert not events(of_job, "failure")
    ran = iterations(of_job, "run")[-20:]
    times_s = [record["predicted_time_s"] for record in ran]
    assert max(times_s) > 1.2 * min(times_s), "each iteration is planned for its own lengths"
    steps = len(planned.ranks[0]["losses"])
    assert_same_training(planned, run(tmp_path / "without", 2, steps=steps, **job))


@pytest.mark.extended
def test_megatron(tmp_path):
    job = {"stages": 2, "micro_batches": 2, "mixed": mixed([4, 5, 6, 8], 400), "orders": [[2]] * 400}
    auto = block_in(tmp_path, "auto", policy=POLICY)
    jobs = {"auto": {**job, "orders": [[2, "run", 10]], "perseus": auto}, "without": job}
    for of_rank in run_jobs(tmp_path, 2, megatron_script, jobs):
        assert_untouched(of_rank)
    of_job = records(tmp_path / "auto")
    assert iterations(of_job, "run")
    assert not events(of_job, "failure")


@pytest.mark.extended
def test_torch(tmp_path):
    job = {"schedule": "1F1B", "micro_batches": 4, "mixed": mixed([100, 200, 300], 400, 4)}
    auto = block_in(tmp_path, "auto", policy=POLICY)
    jobs = {"auto": {**job, "until": ["run", 30], "perseus": auto}, "without": job}
    for of_rank in run_jobs(tmp_path, 2, torch_script, jobs):
        assert_untouched(of_rank)
    of_job = records(tmp_path / "auto")
    assert iterations(of_job, "run")
    assert not events(of_job, "failure")
