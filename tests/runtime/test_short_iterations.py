"""A job whose instructions take 6 ms and whose iterations 0.11 s, on simulated GPUs; in virtual time."""

import random
import statistics
from collections import Counter

import pytest
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_records import Drifted, PlanJudged, ProfileWritten

SHORT = {"stages_s": (0.0025, 0.0022, 0.003), "tail_s": 0.002, "micro_batches": 10}


@pytest.mark.extended
def test_short_iterations_are_profiled_and_compared_in_few_of_them_and_run_a_plan_that_skips_no_change(tmp_path):
    noise = {"time_noise": 0.02, "power_noise": 0.01}
    job = VirtualJob(tmp_path, **SHORT, gpu=noise, mode="auto")
    job.train(400)
    records = job.close()
    counts = Counter(phase for phase, _, _ in job.taken)
    assert counts["profile"] <= 80
    assert counts["default"] <= 100
    default, planned = ([taken for taken in job.taken if taken[0] == phase] for phase in ("default", "run"))
    assert {phase for phase, _, _ in job.taken[-100:]} == {"run"}
    default_s, planned_s = (statistics.median(time_s for _, time_s, _ in found) for found in (default, planned))
    default_j, planned_j = (statistics.mean(energy_j for *_, energy_j in found) for found in (default, planned))
    assert planned_s < 1.01 * default_s
    assert planned_j < 0.96 * default_j
    assert sum(record.clock_skips for record in records) == 0
    # As often as the plan says.
    assert statistics.median(record.clock_changes for record in records[-100:]) >= 4


@pytest.mark.extended
def test_a_plan_that_saves_energy_stays_where_a_busy_host_holds_up_short_instructions(tmp_path):
    job = VirtualJob(tmp_path, **SHORT, mode="auto")
    job.train_until_compared()
    draw, work = random.Random(3), job.work

    def work_held_up(rank, kind):
        job.idle(rank, draw.uniform(0.0004, 0.0005))
        work(rank, kind)

    job.work = work_held_up
    job.train_until_compared(times=2)
    job.train(20)
    job.close()
    assert max(event.drift for event in job.events(Drifted)) > 0.05
    assert len(job.events(ProfileWritten)) == 1
    assert [event.kept for event in job.events(PlanJudged)] == [True, True]
    assert job.taken[-1][0] == "run"
