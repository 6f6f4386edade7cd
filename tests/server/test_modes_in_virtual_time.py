"""Whole jobs of one rank, from the first iteration to the last, in virtual time."""

import itertools
import re
import shlex
import statistics
from datetime import timedelta

import pytest
from virtual.gpu import AveragingGpu
from virtual.job import SLOWER, WorkerAtOnce, in_order

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import (
    ClockNotReached,
    Drifted,
    Failed,
    GoalChanged,
    PlanChosen,
    PlanJudged,
    ProfileWritten,
)
from perseus_ds.errors import ConfigError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy.decisions import decide
from perseus_ds.report.live import JobFollower
from perseus_ds.simulation.device_models import COMPUTE_BOUND


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.extended)])
def start(start, request):
    """Return a function that starts a job with passes on the host or on a fake CUDA device."""
    return lambda folder="perseus", **block: start(folder, cuda=request.param == "cuda", **block)


def test_auto_mode_profiles_optimises_and_runs_on_less_energy(start, capsys):
    job = start(mode="auto", **SLOWER)
    phases = job.train_until("run")
    assert in_order(phases) == ["warm-up", "profile", "optimizing"]
    assert phases.count("warm-up") == 3 + job.under_way, "the last ones had begun before times were known to be stable"
    job.train_until_compared()
    job.train(100)
    records = job.close()
    assert [record.iteration for record in records] == list(range(1, len(job.taken) + 1)), "one record per iteration"
    assert {record.clocks_asked_mhz for record in records if record.phase == "warm-up"} == {None}
    iterations = [record for record in records if record.phase == "run"][-19:]
    (asked,), (reached,) = iterations[-1].clocks_asked_mhz, iterations[-1].clocks_reached_mhz
    assert asked == reached < job.gpu.supported_clocks_mhz()[-1]
    profile = StageProfile.load(job.folder)
    (refused,) = [event for event in job.events(ClockNotReached) if event.clock_mhz is None]  # at default clocks
    assert profile.info.default_clock_mhz == refused.reached_mhz
    assert refused.reached_mhz < job.gpu.model.top_clock_mhz, "limited by the power limit of the board"
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        expected_s = job.work_s[0][kind] * job.gpu.model.slowdown(profile.at_highest_clock(0, kind).clock_mhz)
        assert profile.at_highest_clock(0, kind).time_s == pytest.approx(expected_s, rel=0.02)
    # What the GPU really used. The counter's readings vary, because its refreshes are 0.1 s apart.
    taken_j = [energy_j for phase, _, energy_j in job.taken if phase == "run"][-19:]
    energy_j = sum(taken_j) / len(taken_j)
    assert iterations[-1].time_s / iterations[-1].default_time_s == pytest.approx(1.2, abs=0.02)
    assert energy_j == pytest.approx(iterations[0].predicted_energy_j, rel=0.02)
    assert energy_j < 0.9 * iterations[0].default_energy_j
    slower = max(event.plan for event in job.events(PlanChosen))
    assert {event.plan for event in job.events(PlanChosen)} <= {slower - 1, slower}, "two may take turns"
    (written,) = job.events(ProfileWritten)
    profiled, clocks = phases.count("profile"), {row.clock_mhz for row in profile.info.rows}
    assert written.iterations == profiled - job.under_way, "the last ones had begun when enough was known"
    assert profiled <= (1 + 0.5 * job.under_way) * len(clocks) + 1, "few iterations, though some had begun"
    printed = capsys.readouterr().out
    assert "saved at additional time" in printed
    assert "one clock for all GPUs" in printed


def test_waiting_is_measured_after_a_counter_that_averages_has_forgotten_the_load(start):
    job = start(mode="profile", gpu_class=AveragingGpu, profile={"sampling": "stride", "clock_stride": 40})
    job.train_until("observe", most=400)
    profile = StageProfile.load(job.folder)
    waiting_w = job.gpu.model.blocking_power_w
    assert profile.info.blocking_power_w == pytest.approx(waiting_w, rel=0.02)
    for clock_mhz in profile.options(0, Kind.FORWARD).clock_mhz:
        row = profile.at(0, Kind.FORWARD, int(clock_mhz))
        assert row.energy_j / row.time_s == pytest.approx(job.gpu.model.power_w(clock_mhz, COMPUTE_BOUND), rel=0.1)


def test_clocks_are_measured_for_longer_if_iterations_are_shorter_than_those_of_the_warm_up(start):
    job = start(mode="profile", stages_s=(0.004,), profile={"sampling": "stride", "clock_stride": 40})
    job.slowdowns[0] = 10.0
    job.train_until("profile")
    job.slowdowns[0] = 1.0
    job.train_until("observe", most=400)
    assert job.events(Failed) == []
    assert job.events(ProfileWritten)


def test_observe_mode_changes_no_clock_and_names_the_commands_that_show_the_job(start, capsys):
    job = start("it's here", mode="observe")
    assert set(job.train(5)) == {"observe"}
    assert [record.clock_changes for record in job.close()] == [0] * 5
    lines = capsys.readouterr().out.splitlines()
    folder = shlex.quote(str(job.folder))
    assert f"perseus-ds watch {folder}" in lines[0]
    assert f"perseus-ds report {folder}" in lines[-1]


def test_run_mode_trains_under_its_frontier_and_keeps_a_plan_that_wins_against_default_clocks(start, frontier):
    job = start(mode="run", frontier=frontier, **SLOWER)
    phases = job.train(150)
    records, plans = job.close(), Frontier.load(frontier).plans
    first = records[0]
    assert plans[first.plan].time_s <= 1.2 * plans[0].time_s < plans[first.plan + 1].time_s
    assert first.predicted_time_s == pytest.approx(plans[first.plan].time_s)
    turns = in_order(phases)
    assert turns == ["run", "default"] * (len(turns) // 2) + ["run"] * (len(turns) % 2), "alternating, ever more rarely"
    assert 5 <= len(turns) // 2 <= 7
    assert phases.count("run") > 0.7 * len(phases)
    (judged,) = job.events(PlanJudged)
    assert judged.kept
    default = [r for r in records if r.phase == "default"]
    planned = [r for r in records if r.phase == "run"]
    mean_s = statistics.mean(record.time_s for record in planned)
    assert judged.trial.slowdown == pytest.approx(mean_s / default[-1].time_s - 1, abs=0.005)
    assert (first.default_measured, planned[-1].default_measured) == (False, True)


def test_where_no_plan_keeps_its_promise_any_longer_the_job_says_why_and_tries_again_later(start, frontier, capsys):
    job = start(mode="run", frontier=frontier, max_drift=10.0, **SLOWER)
    job.train_until_compared()
    work = job.work
    job.late_under_plans()
    job.train_until("observe", most=400)
    first, *late = compared = job.events(PlanJudged)
    assert first.kept
    assert [event.kept for event in late] == [False] * len(late)
    assert all(event.trial.slowdown > event.promised_slowdown + 0.05 for event in late)
    assert late[-1].then == "training continues at default clocks, tried again in 200 iterations"
    job.train(1)  # messages are printed between iterations
    assert capsys.readouterr().out.count("is dropped, since it takes longer than promised") == len(late)
    job.work = work
    assert set(job.train(189)) == {"observe"}
    job.train_until("run", most=40)
    assert job.train_until_compared(times=len(compared) + 1)[-1].kept


def test_a_faster_plan_has_its_turn_after_one_that_is_late_and_is_held_to_the_same_promise(start, frontier):
    job = start(mode="run", frontier=frontier, max_drift=10.0, goal={"max_slowdown": 0.25})
    job.late_under_plans(by_s=0.015)
    first, second = job.train_until_compared(times=2)
    assert (first.kept, first.then) == (False, "a faster plan is tried next")
    assert second.kept
    assert second.plan < first.plan
    assert second.promised_slowdown == pytest.approx(first.promised_slowdown, abs=0.01)
    job.train(20)
    assert job.close()[-1].plan == second.plan


def test_a_plan_that_was_late_does_not_run_again_after_a_reduction_of_power(start, frontier):
    job = start(mode="run", frontier=frontier, max_drift=10.0, goal={"max_slowdown": 0.25})
    job.late_under_plans(by_s=0.015)
    late, kept = job.train_until_compared(times=2)
    until = job.time.date() + timedelta(seconds=10)
    job.control(command="set", goal={"power_fraction": 0.95, "until": until.isoformat()})
    job.train(30)
    plans = [record.plan for record in job.close()[-30:] if record.plan is not None]
    assert kept.plan in plans
    assert late.plan not in plans


def test_a_plan_that_runs_is_compared_again_at_growing_distances(start, frontier):
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.train_until_compared()
    job.train(200)
    at = [place for place, record in enumerate(job.close()) if record.phase == "default"]
    gaps = [after - before for before, after in itertools.pairwise(at) if after - before > 1]
    assert all(after > 1.6 * before for before, after in itertools.pairwise(gaps[-4:]))
    (judged,) = job.events(PlanJudged)
    assert judged.kept


def test_while_passes_deviate_from_the_profile_it_predicts_no_saving(start, frontier):
    """Default clocks would exceed the cap, so that they are never measured. Passes are checked every 10 iterations."""
    job = start(mode="run", frontier=frontier, goal={"watts": 250})
    job.slowdowns = [1.4]
    job.train(20)
    job.server.recorder.flush()
    facts = job.server.recorder.facts()
    assert (facts.under_plans.saved, facts.under_plans.saved_j) == (None, pytest.approx(facts.whole.saved_j))
    job.slowdowns = [1.0]
    job.train(100)
    ran = [record for record in job.close() if record.phase == "run"]
    known = [record.default_time_s is not None for record in ran]
    assert known[:9] == [True] * 9
    assert known[12:19] == [False] * 7
    assert known[-7:] == [True] * 7
    saved_j = sum(record.default_energy_j - record.energy_j for record in ran if record.default_energy_j)
    assert job.server.recorder.facts().whole.saved_j == pytest.approx(saved_j)


@pytest.mark.parametrize("begins", ["while compared", "while backing off"])
def test_under_a_power_cap_that_default_clocks_would_exceed_all_iterations_run_under_plans(start, frontier, begins):
    job = start(mode="run", frontier=frontier, **SLOWER)
    if begins == "while compared":
        for phase in ("default", "run", "default", "run"):
            job.train_until(phase)
        job.train(13)
    else:
        job.late_under_plans()
        job.train_until("observe", most=400)
    job.control(command="set", goal={"watts": 300.0})
    job.train(3)
    assert set(job.train(60)) == {"run"}
    assert not job.events(Failed)
    job.control(command="clear", limit="power")
    assert "default" in job.train(40), "must be compared as soon as default clocks are allowed"
    capped = [record for record in job.close() if record.phase == "run" and record.plan is not None][-40:]
    assert sum(r.energy_j for r in capped) / sum(r.time_s for r in capped) <= 300.0


def test_where_a_cap_allows_no_comparison_instructions_that_drift_are_profiled_again_three_times_at_most(start):
    """Until plans run again, the cost of a power limit is unknown."""
    job = start(mode="auto", goal={"watts": 300.0})
    limit = {"command": "set", "goal": {"watts": 299.0}}
    for profiles in (1, 2, 3):
        job.train_until("run")
        assert "% slower" in job.control(**limit)["done"]
        job.train(12)
        assert len(job.events(ProfileWritten)) == profiles
        job.slowdowns[0] *= 1.3
        if profiles < 3:
            job.train_until("profile")
            assert "once the job runs under plans" in job.control(**limit)["done"]
    assert set(job.train(60)) == {"run"}
    job.close()
    assert ["profiling again" in event.then for event in job.events(Drifted)] == [True, True, False]
    assert len(job.events(ProfileWritten)) == 3


def test_an_optimiser_that_fails_leaves_the_job_at_default_clocks(start, monkeypatch, caplog):
    monkeypatch.setattr(WorkerAtOnce, "error", "no such profile")
    job = start(mode="auto")
    job.train_until("observe")
    job.train(3)
    assert [record.plan for record in job.close()][-3:] == [None] * 3
    assert caplog.text.count("optimising failed: no such profile. Training continues at default clocks") == 1
    assert [event.error for event in job.events(Failed)] == ["optimising failed: no such profile"]


def test_an_unexpected_error_in_a_decision_never_ends_training(start, monkeypatch, caplog):
    """The job continues at default clocks, and tries again later."""
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.train(2)
    monkeypatch.setattr("perseus_ds.server.under_plans.rank_drift", lambda *_: 1 / 0)
    job.train_until("observe")
    without_plan = len(job.train_until("run"))
    assert without_plan >= 10
    assert caplog.text.count("division by zero") == 1
    assert {record.plan for record in job.close()[-without_plan:]} == {None}
    assert len(job.events(ProfileWritten)) == 1, "the profile is complete"


def test_a_goal_that_fails_means_default_clocks_until_there_is_another(start, frontier, monkeypatch, capsys):
    job = start(mode="run", frontier=frontier)
    job.train_until("run")
    job.control(command="set", goal={"watts": 300.0})
    fail = lambda goal, *about: 1 / 0 if goal.watts else decide(goal, *about)  # noqa: E731
    monkeypatch.setattr("perseus_ds.server.selector.decide", fail)
    assert job.train(6)[-1] == "pause"
    job.settle()
    assert job.gpu.clock_mhz() == job.gpu.supported_clocks_mhz()[-1]
    assert capsys.readouterr().out.count("the goal cannot be followed (ZeroDivisionError") == 1
    job.control(command="clear")
    assert job.train(4)[-1] == "run"
    job.close()
    problems = [record.problem for record in job.events(GoalChanged) if record.problem]
    assert len(problems) == 1
    assert problems[0].endswith("Running at default clocks")


def test_pause_and_resume_at_iteration_boundaries(start, frontier):
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.train_until_compared()
    job.control(command="pause")
    assert job.train(4) == ["run", "pause", "pause", "pause"]
    job.control(command="resume")
    assert job.train(3) == ["pause", "run", "run"]
    assert in_order([event.paused for event in job.events(PlanChosen)]) == [False, True, False]


def test_each_phase_says_what_follows_and_about_when(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.train_until_compared()
    job.train(1)
    iterations = job.close()
    follows = {
        record.phase: record.next_phase
        for record in iterations[:-2]
        if record.next_in_s != 0 or record.phase == "optimizing"
    }
    assert follows == {
        "warm-up": "profile",
        "profile": "optimizing",
        "optimizing": "run",
        "default": "verdict",
        "run": "verdict",
    }
    assert iterations[-1].next_phase is None  # the verdict is known
    for phase, most_off in (("warm-up", 0.1), ("profile", 0.4)):
        ahead = [record for record in iterations if record.phase == phase and record.next_in_s is not None]
        spent_s = sum(record.time_s for record in ahead[1:])
        assert ahead[0].next_in_s == pytest.approx(spent_s, rel=most_off, abs=1.2)


def test_a_goal_that_no_plan_keeps_is_said_to_be_so_in_the_answer(start):
    job = start(mode="auto", **SLOWER)
    limit = {"command": "set", "goal": {"watts": 5.0}}
    assert job.control(**limit)["done"] == "max_slowdown 0.2, watts 5.0, once the job runs under plans"
    job.train_until("run")
    answer = job.control(**limit)["done"]
    assert ". However, a power limit of 5 W cannot be kept: the plan with the lowest power draws" in answer
    assert "cannot" not in job.control(command="set", goal={"watts": 5000.0})["done"]


def test_status_gives_the_facts_of_the_records_and_what_is_next_apart_from_what_was_last(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.train(3)
    status = job.control(command="status")["status"]
    followed = JobFollower(job.folder).facts(0.0).model_dump(mode="json")
    for not_of_records in ("silent_s", "next_in_s", "remaining_s", "phase", "waits", "busy_s"):
        followed.pop(not_of_records)
    assert {key: status[key] for key in followed} == followed
    assert status["next"]["plan"] == status["last"]["plan"]
    assert status["last"]["iteration"] == job.server.control.steps
    assert status["next"]["t_min_s"] == Frontier.load(job.folder).t_min_s


def test_profile_mode_measures_while_training_goes_on_and_then_observes(start, capsys):
    job = start(mode="profile", profile={"sampling": "stride", "clock_stride": 20})
    job.slowdowns[0] = 1.1
    phases = job.train(2)
    job.slowdowns[0] = 1.0
    phases += job.train_until("observe")
    assert in_order(phases) == ["warm-up", "profile"]
    assert phases.count("warm-up") > 3 + job.under_way, "until times are stable"
    assert set(job.train(20)) == {"observe"}
    assert job.runtime.profiled
    job.close()
    assert "training ended before" not in capsys.readouterr().out
    profile = StageProfile.load(job.folder)
    model = job.gpu.model
    for row in profile.measurements:
        expected_s = job.work_s[0][row.kind] * model.slowdown(row.clock_mhz)
        assert row.time_s == pytest.approx(expected_s, rel=0.015)
        assert row.energy_j == pytest.approx(expected_s * model.power_w(row.clock_mhz), rel=0.03)
    (written,) = job.events(ProfileWritten)
    assert written.iterations == phases.count("profile") - job.under_way, (
        "the last ones had begun when enough was known"
    )


def test_iterations_of_unequal_times_are_compared_with_the_mean_at_default_clocks(start, frontier):
    """Each fourth iteration takes longer, so that the median of any eight iterations is below their mean."""
    job = start(mode="run", frontier=frontier, max_drift=10.0, **SLOWER)
    for number in range(150):
        job.slowdowns = [1.3 if number % 4 == 0 else 1.0]
        job.train()
    records = job.close()
    last = [record for record in records if record.phase == "run"][-1]
    assert last.default_measured
    default = [record for record in records if record.phase == "default"]
    mean_s = statistics.fmean(record.time_s for record in default)
    assert mean_s > 1.05 * statistics.median(record.time_s for record in default)
    # The last eight at default clocks count, of which one to three take longer.
    assert last.default_time_s == pytest.approx(mean_s, rel=0.04)
    mean_j = statistics.fmean(record.energy_j for record in default)
    assert last.default_energy_j == pytest.approx(mean_j, rel=0.04)


def test_the_cost_of_profiling_is_relative_to_the_mean_at_default_clocks(start):
    """The middle one of three iterations before profiling takes longer. Times of the last two are equal."""
    job = start(mode="profile", profile={"warm_up": 4})
    for slowdown in (1.0, 1.4, 1.0, 1.0):
        job.slowdowns = [slowdown]
        job.train()
    job.train_until("observe")
    iterations = job.close()
    warm_up_s = [record.time_s for record in iterations if record.phase == "warm-up"]
    mean_s = statistics.fmean(warm_up_s[1:])
    profiled_s = [record.time_s for record in iterations if record.phase == "profile"]
    lost_s = sum(profiled_s) - len(profiled_s) * mean_s
    assert job.server.recorder.facts().profiling_s == pytest.approx(lost_s, abs=0.01)
    (written,) = job.events(ProfileWritten)
    assert written.lost_s == pytest.approx(lost_s, abs=2.0), "without the last iterations, which end after the profile"


def test_the_cost_of_profiling_does_not_depend_on_the_number_of_pipelines(start):
    """The same iterations at lower clocks take longer, and all GPUs of the job use energy in them."""
    costs = []
    for pipelines in (1, 2):
        job = start(f"pipelines-{pipelines}", mode="profile", stages_s=(0.1,), pipelines=pipelines)
        job.train_until("observe")
        (profile,) = job.events(ProfileWritten)
        costs.append((profile.lost_s / profile.iterations, profile.lost_j / profile.iterations / pipelines))
    (alone_s, alone_j), (together_s, together_j) = costs
    assert alone_s > 0
    assert together_s == pytest.approx(alone_s, rel=0.1)
    assert together_j == pytest.approx(alone_j, rel=0.1)


def test_a_plan_that_saves_nothing_is_dropped_and_orders_are_answered_so(start, capsys):
    """One stage has no slack, so nothing can be saved without a slowdown."""
    # Without noise, refreshes of the counter and blocks coincide. A longer tail could run at a lower clock.
    job = start(mode="auto", tail_s=0.001, gpu={"time_noise": 0.005})
    job.train_until("run")
    job.train_until("observe", most=400)
    assert set(job.train(5)) == {"observe"}
    (judged,) = job.events(PlanJudged)
    assert not judged.kept
    assert "is dropped, since it saves no energy that could be measured" in capsys.readouterr().out
    answer = job.control(command="pause")
    assert answer == {"done": "at default clocks. However, this job runs no plans now"}
    assert job.control(command="status")["status"]["phase"] == "observe"


@pytest.fixture
def max_drift():
    return 10.0


@pytest.fixture
def second(start, monkeypatch, tmp_path, max_drift):
    """Return a job with a cache, in which an earlier job has left its profile and plans."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    block = {"mode": "auto", "cache": True, **SLOWER}
    first = start("first", **block)
    first.train_until("run")
    assert not has_cached(tmp_path)
    first.train_until_compared()
    first.train(1)
    first.close()
    assert has_cached(tmp_path)
    return start("second", max_drift=max_drift, **block)


def has_cached(folder):
    return any((folder / "cache").rglob("frontier.json"))


def test_a_cached_plan_proves_itself_again_and_leaves_the_job_if_it_does_not_win(second, tmp_path):
    assert second.train_until("run") == []
    second.late_under_plans()
    assert set(second.train_until("observe", most=400)) == {"run", "default", "optimizing"}, "others are tried, too"
    second.close()
    assert has_cached(tmp_path), "the profile is valid, so another goal may save energy"


def test_a_start_with_the_profile_of_an_earlier_one_reads_profile_and_plans_once(second, monkeypatch):
    read = []
    for kind in (StageProfile, Frontier):
        monkeypatch.setattr(kind, "load", lambda path, load=kind.load, kind=kind: read.append(kind) or load(path))
    second.restart()
    assert second.train_until("run") == []
    assert read == [StageProfile, Frontier]


def test_plans_are_computed_from_a_cached_profile_if_the_cached_ones_are_damaged(second, start, tmp_path):
    (frontier,) = (tmp_path / "cache").rglob("frontier.json")
    frontier.write_text("{}")
    third = start("third", mode="auto", cache=True, **SLOWER)
    assert set(third.train_until("run")) == {"optimizing"}


@pytest.mark.parametrize("max_drift", [0.1])
def test_a_cached_profile_from_which_passes_deviate_is_replaced_if_its_plan_is_dropped(second, tmp_path):
    second.late_under_plans()
    second.work_s[0][Kind.BACKWARD] *= 1.2
    second.train_until("profile", most=600)
    assert not has_cached(tmp_path)
    assert in_order(second.train_until("run")) == ["profile", "optimizing"]


def test_a_goal_that_changes_during_the_proof_is_judged_by_its_own_plan(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.train(5)
    job.control(command="set", goal={"max_slowdown": 0.1})
    (judged,) = job.train_until_compared()
    assert judged.kept
    assert judged.promised_slowdown == pytest.approx(0.1, abs=0.02)
    assert judged.trial.slowdown == pytest.approx(judged.promised_slowdown, abs=0.01)


def test_where_instructions_drift_they_are_profiled_again_at_once_and_what_is_known_of_stops_stays(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    for _ in range(12):
        job.time.sleep(1.0)
        job.train()
    job.slowdowns[0] *= 1.3
    job.late_under_plans()
    assert "observe" not in job.train_until("profile", most=600)
    assert job.events(PlanJudged)[-1].then == "training continues at default clocks, profiling again"
    kept = job.server.state()["plans"]["statistics"]
    assert kept["stops"] > 12
    assert kept["times"] == []
    job.train_until("run")
    after = job.server.state()["plans"]["statistics"]
    assert (after["stops"], after["stopped_s"]) == (kept["stops"], kept["stopped_s"])


def test_a_job_that_ends_too_early_says_where_it_was(start, capsys):
    job = start(mode="auto")
    job.train_until("profile")
    job.train(1)
    job.close()
    told = r"before a plan ran, while measuring the profile \(about \d+ more iterations\); then"
    assert re.search(told, capsys.readouterr().out)


def test_a_deadline_in_the_past_is_an_error_in_a_new_job_and_by_control_and_not_in_a_resumed_job(
    start, frontier, capsys
):
    goal = {"finish_by": "2020-01-01T00:00:00Z", "total_steps": 10}
    with pytest.raises(ConfigError, match=r"2020-01-01T00:00:00.* has passed"):
        start("new", mode="run", frontier=frontier, goal=goal)
    job = start("known", mode="run", frontier=frontier)
    job.train(2)
    with pytest.raises(ConfigError, match="has passed"):
        job.control(command="set", goal=goal)
    job.close()
    resumed = start("known", mode="run", frontier=frontier, goal=goal)
    assert "run" in resumed.train(3)
    assert "has passed" in capsys.readouterr().out
    assert resumed.close()[-1].plan == 0
