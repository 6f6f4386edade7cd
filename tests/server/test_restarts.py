"""Restarts: a server that is replaced during training, and a job that is resumed from its state."""

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.run_records import IterationRecord, PlanJudged, ProfileWritten


def test_a_job_that_was_restarted_counts_its_steps_on_and_keeps_its_policy(start):
    job = start(mode="observe")
    job.train(7)
    job.time.sleep(1.0)  # its last report has arrived
    job.restart()
    job.train(3)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == list(range(1, 11))


def test_the_steps_that_the_engine_has_done_count_more_than_those_that_were_kept(start):
    """The checkpoint is older than the end of the job."""
    job = start(mode="observe")
    job.train(7)
    job.restart(steps=4)
    job.train(2)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == [*range(1, 8), 5, 6]


@pytest.mark.parametrize("phase", ["profile", "optimizing", "run"])
def test_a_job_that_is_restarted_in_any_phase_runs_under_a_plan_that_is_kept(start, phase):
    job = start(mode="auto", **SLOWER)
    job.train_until(phase)
    job.train(2)
    job.restart()
    assert job.train_until_compared(len(job.events(PlanJudged)) + 1)[-1].kept
    assert job.train(5)[-1] == "run"
    assert 1 <= len(job.events(ProfileWritten)) <= 2


def test_the_state_of_another_job_is_not_taken_up(start):
    other = start("other", mode="observe", micro_batches=5)
    other.train(7)
    state = other.server.state()
    job = start(mode="observe")
    job.close()
    job._start(state)
    job.train(2)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == [1, 2]


def test_a_server_that_takes_the_place_of_a_killed_one_runs_the_plan_and_counts_the_steps_on(start):
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(5)
    energies_j = [energy_j for _, _, energy_j in job.taken[-3:]]
    job.renew()
    job.train_until("run")
    job.train(8)
    assert [energy_j for _, _, energy_j in job.taken[-3:]] == pytest.approx(energies_j, rel=0.01)
    numbers = [record.iteration for record in job.close()]
    assert numbers == sorted(numbers)
    assert numbers[-1] == len(job.taken)


def test_steps_are_counted_on_if_a_server_is_replaced_twice_before_an_iteration_ends(start):
    job = start(mode="observe")
    job.train(7)
    job.renew()
    job.renew()
    job.train(3)
    assert [record.iteration for record in job.close()] == list(range(1, 11))


def test_no_server_of_a_job_uses_a_number_of_another_one(start):
    """Numbers identify what agents and clients have run."""
    job = start(mode="observe")
    job.train(3)
    before = set(job.server.runs.known) - {0}
    job.renew()
    job.train(3)
    after = set(job.server.runs.known) - {0}
    assert before
    assert after
    assert not before & after
