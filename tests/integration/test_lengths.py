"""A length that was not profiled runs under a plan, and training has the same bits."""

import pytest
from job import QUICK_PROFILE, assert_same_training, assert_untouched, block_in, run, run_jobs
from megatron_job import __file__ as megatron_script
from run_log import events, iterations, records

pytestmark = [pytest.mark.integration, pytest.mark.extended]
POLICY = {"name": "energy_optimal"}
# Iterations of each length follow others, and last for several refreshes of the counter.
SIMULATED = {"longest_instruction_s": 0.04, "counter_period_s": 0.005, "lock_latency_s": 0.001}


def lengths(known, new):
    """Return lengths in turns, first those to profile, and then with a new one among them."""
    return [*known * 95, *[*known, new] * 45]


def assert_new_length_is_planned(folder):
    """Assert that the last shape had no profile of its own, and ran under a plan."""
    of_job = records(folder)
    *profiled, predicted = events(of_job, "shape")
    assert [event["profile_error"] for event in profiled] == [None] * len(profiled)
    assert 0 < predicted["profile_error"] < 0.05
    assert predicted["shape"] in {record["shape"] for record in iterations(of_job, "run")}
    assert not events(of_job, "failure")


def test_deepspeed(tmp_path):
    perseus = {"mode": "auto", "profile": QUICK_PROFILE, "cache": False, "policy": POLICY, "simulated": SIMULATED}
    job = {"work": [3, 2], "micro_batches": 2, "buckets": lengths([16, 24, 40], 32)}
    job["steps"] = len(job["buckets"])
    planned = run(tmp_path / "auto", 2, perseus=perseus, **job)
    assert_new_length_is_planned(tmp_path / "auto" / "perseus")
    assert_same_training(planned, run(tmp_path / "without", 2, **job))


def test_megatron(tmp_path):
    job = {"stages": 2, "micro_batches": 2, "lengths": lengths([4, 6, 8], 7)}
    job["orders"] = [[2]] * len(job["lengths"])
    auto = block_in(tmp_path, "auto", policy=POLICY, simulated=SIMULATED)
    for of_rank in run_jobs(tmp_path, 2, megatron_script, {"auto": {**job, "perseus": auto}, "without": job}):
        assert_untouched(of_rank)
    assert_new_length_is_planned(tmp_path / "auto")
