"""Iterations of other numbers of micro-batches and other lengths run under plans, and training has the same bits."""

import random

import pytest
from job import QUICK_PROFILE, assert_same_without_perseus, assert_untouched, block_in, run, run_jobs
from megatron_job import __file__ as megatron_script
from run_log import events, iterations, records
from schedule_job import __file__ as torch_script

pytestmark = [pytest.mark.integration, pytest.mark.extended]
GOAL = {"max_slowdown": None}
COUNTS = [4, 2]
SHORT = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
LONG = {"longest_instruction_s": 0.04, "counter_period_s": 0.005, "lock_latency_s": 0.001}


def on_deepspeed(folder, simulated, *, until, **job):
    """Train with and without Perseus, assert equal bits, and return the records."""
    perseus = {"mode": "auto", "profile": QUICK_PROFILE, "cache": False, "goal": GOAL, "simulated": simulated}
    planned = run(folder / "with", 2, perseus=perseus, steps=10_000, until=until, **job)
    assert_same_without_perseus(planned, 2, **job)
    return planned.records()


def by_script(script, folder, job, **end):
    """Train with another engine, with and without Perseus, assert equal bits, and return the records."""
    auto = {**job, **end, "perseus": block_in(folder, "auto", goal=GOAL)}
    for of_rank in run_jobs(folder, 2, script, {"auto": auto, "without": job}):
        assert_untouched(of_rank)
    return records(folder / "auto")


def assert_each_count_has_a_plan(found):
    """Assert that both numbers ran under plans at the end, based on the only measured profile."""
    assert {record["order"] for record in iterations(found, "run")[-10:]} == {None, 1}
    assert len(events(found, "profile")) == 1
    (planned,) = events(found, "schedule")
    assert planned["micro_batches"] == 2


def test_counts_that_alternate_on_deepspeed(tmp_path):
    job = {"counts": COUNTS, "work": [3, 2]}
    assert_each_count_has_a_plan(on_deepspeed(tmp_path, SHORT, until=["run", 50], **job))


def test_counts_that_alternate_on_torch(tmp_path):
    job = {"schedule": "1F1B", "micro_batches": max(COUNTS), "counts": COUNTS}
    assert_each_count_has_a_plan(by_script(torch_script, tmp_path, job, until=["run", 50]))


def test_counts_that_alternate_on_megatron(tmp_path):
    job = {"stages": 2, "counts": COUNTS}
    assert_each_count_has_a_plan(by_script(megatron_script, tmp_path, job, until=["run", 50]))


def mixed(sizes):
    """Return the sizes of the two micro-batches of each step."""
    draw = random.Random(3)
    return [[draw.choice(sizes), draw.choice(sizes)] for _ in range(400)]


def assert_one_profile_and_plans(found):
    """Assert that iterations ran under plans of one profile, in spite of their different lengths."""
    assert len(events(found, "profile")) == 1
    assert iterations(found, "run")
    assert not events(found, "failure")


def test_lengths_that_differ_on_deepspeed(tmp_path):
    job = {"work": [3, 2], "micro_batches": 2, "mixed": mixed([16, 24, 32, 40])}
    assert_one_profile_and_plans(on_deepspeed(tmp_path, LONG, until=["run", 30], **job))


def test_lengths_that_differ_on_megatron(tmp_path):
    job = {"stages": 2, "micro_batches": 2, "mixed": mixed([4, 5, 6, 8])}
    assert_one_profile_and_plans(by_script(megatron_script, tmp_path, job, until=["run", 30]))
