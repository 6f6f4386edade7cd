"""Restarts: what a replaced server, a job that is started again and another job take up from files."""

import pwd
from collections import Counter

import pytest
from virtual.job import SLOWER

from perseus_ds.artifacts.run_events import PlanJudged, ProfileWritten
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.server.frontiers import cached


@pytest.mark.parametrize(("steps", "numbers"), [(None, [8, 9]), (4, [5, 6])], ids=["kept", "of the engine"])
def test_a_job_that_is_restarted_keeps_its_goal_and_counts_on_from_the_steps_of_its_checkpoint(start, steps, numbers):
    job = start(mode="observe")
    job.train(7)
    job.control(command="set", goal=SLOWER["goal"])
    job.time.sleep(1.0)  # its last report has arrived
    job.restart(steps)
    job.train(2)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == [*range(1, 8), *numbers]
    assert job.server.control.goal.max_slowdown == 0.2


def test_a_server_that_is_replaced_twice_counts_on_and_uses_no_number_of_another_one(start):
    """Numbers identify what agents and clients have run."""
    job = start(mode="observe")
    job.train(7)
    before = set(job.server.runs.known) - {0}
    job.renew()
    job.renew()
    job.train(3)
    after = set(job.server.runs.known) - {0}
    assert before and after and not before & after  # noqa: PT018
    assert [record.iteration for record in job.close()] == list(range(1, 11))


def test_the_state_of_another_job_is_not_taken_up(start):
    other = start("other", mode="observe", stages_s=(0.02, 0.02))
    other.train(7)
    job = start(mode="observe")
    job.close()
    job._start(other.server.state())
    job.train(2)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        {"orders": {"first": 0}},
        {"orders": [0]},
        {"measured": [[0.1]]},
        {"measured": 7},
        {"iteration": "ten"},
        {"plans": 3},
    ],
    ids=str,
)
def test_a_job_with_a_damaged_state_begins_anew_and_says_so(start, damage, caplog):
    job = start(mode="observe")
    job.train(3)
    state = {**job.server.state(), **damage}
    job.close()
    job._start(state)
    job.train(2)
    job.close()
    assert [record.iteration for record in job.events(IterationRecord)] == [1, 2, 3, 1, 2]
    (warning,) = [text for text in caplog.messages if "the state of an earlier start cannot be read" in text]
    assert next(iter(damage)) in warning


@pytest.mark.parametrize("phase", ["profile", "optimizing", "run"])
def test_a_job_that_is_restarted_in_any_phase_runs_under_a_plan_that_is_kept(start, phase):
    job = start(mode="auto", **SLOWER)
    job.train_until(phase)
    job.train(2)
    job.restart()
    assert job.train_until_compared(len(job.events(PlanJudged)) + 1)[-1].kept
    assert job.train(5)[-1] == "run"
    assert 1 <= len(job.events(ProfileWritten)) <= 2


def test_a_server_that_takes_the_place_of_a_killed_one_runs_the_plan_and_counts_the_steps_on(start):
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(5)
    energies_j = [energy_j for _, _, energy_j in job.taken[-3:]]
    job.renew()
    assert not {"profile", "optimizing", "default"} & set(job.train_until("run")), "the plan was kept"
    job.train(8)
    assert [energy_j for _, _, energy_j in job.taken[-3:]] == pytest.approx(energies_j, rel=0.01)
    numbers = [record.iteration for record in job.close()]
    assert numbers == sorted(numbers)
    assert numbers[-1] == len(job.taken)


def trained_until_100(job, at, how):
    """Restart a job or replace its server after an iteration, and train on until iteration 100."""
    job.train(at)
    getattr(job, how)()
    job.train(100 - at)


@pytest.mark.parametrize("how", ["renew", "restart"])
@pytest.mark.parametrize(
    "iterations",
    [
        pytest.param([5, 13, 33], id="some"),
        pytest.param(range(1, 90), marks=pytest.mark.extended, id="every iteration"),
    ],
)
def test_a_job_continues_its_profile_and_its_trial_from_wherever_it_was_interrupted(start, how, iterations):
    undisturbed = start("undisturbed", mode="auto", **SLOWER)
    undisturbed.train(100)
    usual = Counter(phase for phase, _, _ in undisturbed.taken)
    for at in iterations:
        job = start(f"interrupted-{at}", mode="auto", **SLOWER)
        trained_until_100(job, at, how)
        assert len(job.events(ProfileWritten)) == 1, at
        assert {event.kept for event in job.events(PlanJudged)} == {True}, at
        phases = Counter(phase for phase, _, _ in job.taken)
        assert phases["profile"] <= usual["profile"] + 6, f"{at}: measured clocks are not measured again"
        assert phases["default"] <= usual["default"] + 13, f"{at}: at most two blocks more"
        job.close()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match="Set XDG_CACHE_HOME"):
        cached("key")


def test_a_job_that_was_killed_before_its_verdict_does_not_measure_its_profile_again(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.train(1)
    before = (job.folder / "profile.csv").read_bytes()
    again = start(mode="auto", **SLOWER)  # in the same folder
    phases = again.train_until("run")
    assert phases == [], "plans are known, too"
    assert (again.folder / "profile.csv").read_bytes() == before
    (verdict,) = again.train_until_compared()
    assert verdict.kept


def test_a_search_that_was_interrupted_goes_on_and_another_job_measures_its_own_profile(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("profile")
    job.train(5)
    again = start(mode="auto", **SLOWER)
    assert "profile" in again.train_until("optimizing")
    assert again.events(ProfileWritten)[-1].resumed_clocks > 0
    other = start(mode="auto", profile={"max_clock_mhz": 1200}, **SLOWER)
    assert "profile" in other.train_until("optimizing")
    assert other.events(ProfileWritten)[-1].resumed_clocks == 0


def test_a_profile_that_no_longer_held_is_measured_again_by_the_next_start(start):
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.work_s[0][Kind.BACKWARD] *= 1.5
    job.late_under_plans()
    job.train_until("warm-up", most=900)
    again = start(mode="auto", **SLOWER)
    assert "profile" in again.train_until("run")
