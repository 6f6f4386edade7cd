"""Somebody outside the job limits GPUs while plans run. GPUs are simulated, in virtual time.

Scenarios run twice with the same limits at the same times, once at default clocks: under plans a job is not slower by
more than 1 %, and uses no more energy.
"""

import functools
import re
from dataclasses import replace
from datetime import timedelta
from statistics import median

import pytest
from prometheus_client import generate_latest
from virtual.job import SLOWER, VirtualJob, WorkerAtOnce, in_order

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.run_records import LimitsChanged, PlanChosen, PlanJudged, PowerCapChanged, ProfileWritten
from perseus_ds.runtime.metrics import registry_of
from perseus_ds.runtime.progress import JobFacts

ALL, SLOWEST = (0, 1, 2, 3), (3,)


def limits(job):
    return [event.limits for event in job.events(LimitsChanged)]


def test_a_power_limit_is_named_within_two_iterations_and_once(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    assert limits(job) == [], "a board that is at its own limit is not limited"
    job.gpu.limit(power_w=300.0)
    job.train(2)
    (found,) = limits(job)
    assert found == ((0, 299.25, None),)
    job.train(10)
    assert len(limits(job)) == 1
    job.gpu.limit()
    job.train(2)
    assert limits(job)[1:] == [()]
    said = capsys.readouterr().out
    assert said.count("limited below what was profiled: rank 0's GPU to 299.2 W") == 1
    assert said.count("no GPU is limited any more") == 1


def test_heat_is_named_with_the_clock_that_it_allows(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.gpu.limit(clock_mhz=600)
    job.train(2)
    ((limit, *_),) = limits(job)
    assert limit == (0, None, 600.0)
    assert "rank 0's GPU to 600 MHz by heat or the machine" in capsys.readouterr().out


def test_a_limit_is_shown_by_status_and_as_a_metric(start):
    job = start(mode="observe")
    job.train(3)
    job.gpu.limit(power_w=300.0)
    job.train(2)
    status = job.runtime.carry_out({"command": "status"})["status"]
    assert [list(limit) for limit in status["limits"]] == [[0, 299.25, None]]
    text = generate_latest(registry_of(lambda: JobFacts.model_validate(status))).decode()
    assert re.search(r'perseus_gpu_power_limit_watts\{.*rank="0".*\} 299.25', text)
    assert re.search(r"perseus_limited_gpus\{.*\} 1.0", text)


TWO = {"stages_s": (0.036, 0.05), "micro_batches": 6}
FOUR = {"stages_s": (0.036, 0.034, 0.034, 0.05), "micro_batches": 8}


@pytest.fixture
def start_compared(start, frontiers):
    """A function that starts a job of two stages, whose plan is kept."""

    def start_compared(**shape):
        job = start(mode="run", frontier=frontiers(**TWO), **TWO, **shape)
        job.train_until_compared()
        return job

    return start_compared


def at(time_s, ranks, **limit):
    """A change of limits: when, of which GPUs, and to what; none for the board's own."""
    return time_s, ranks, limit


SCENARIOS = {
    "one GPU": [at(10, SLOWEST, power_w=300.0), at(150, SLOWEST)],
    "one GPU that has slack": [at(10, (0,), power_w=250.0), at(150, (0,))],
    "all GPUs": [at(10, ALL, power_w=280.0), at(150, ALL)],
    "steps": [at(10 + 60 * n, SLOWEST, power_w=power_w) for n, power_w in enumerate((380.0, 300.0, 380.0, None))],
    "a ramp": [at(10 + 4 * n, ALL, power_w=475.0 - 10 * abs(15 - abs(n - 15))) for n in range(31)],
    "heat": [at(10, SLOWEST, clock_mhz=1100), at(150, SLOWEST)],
    "heat where there is slack": [at(10, (0,), clock_mhz=800), at(150, (0,))],
}


def limit(job, scenario):
    """Let the limits of a scenario come, beginning now."""
    begin_s = job.time.now_s()

    def run():
        for time_s, ranks, limit in scenario:
            job.time.sleep(max(0.0, begin_s + time_s - job.time.now_s()))
            for rank in ranks:
                job.gpus[rank].limit(**limit)

    job.time.thread(run, "site").start()


@pytest.fixture(scope="module")
def frontiers(tmp_path_factory):
    """A function that returns the frontier of a job of some stages, with the profile that it was made of."""

    @functools.cache
    def frontier(stages_s, micro_batches):
        folder = tmp_path_factory.mktemp("profiled")
        job = VirtualJob(folder, stages_s=stages_s, micro_batches=micro_batches, mode="auto")
        job.train_until("run")
        job.close()
        made = Frontier.load(folder)
        provenance = made.provenance.model_copy(update={"profile": str(folder / "profile.csv")})
        return str(replace(made, provenance=provenance).save(folder))

    return frontier


@pytest.fixture
def run(tmp_path, frontiers):
    """A function that runs a scenario, under plans or in observe mode; returns the job, and each iteration under it."""
    jobs = []

    def run(scenario, shape=FOUR, *, mode="run", **settings):
        block = {"frontier": frontiers(**shape)} if mode == "run" else {}
        job = VirtualJob(tmp_path / mode, mode=mode, **shape, **block, **settings)
        jobs.append(job)
        job.train(5) if mode == "observe" else job.train_until_compared()
        job.train(2)
        begun, iteration_s = len(job.taken), job.taken[-1][1]
        limit(job, scenario)
        job.train(round((scenario[-1][0] + 70) / iteration_s))
        return job, [(time_s, energy_j) for _, time_s, energy_j in job.taken[begun:]]

    yield run
    for job in jobs:
        job.close()


@pytest.fixture
def compared(run):
    """A function that runs a scenario under plans and at default clocks.

    It returns the first job, and by how much more time and energy its iterations took than the same of the other one,
    as fractions.
    """

    def compared(*scenario, **settings):
        _, default = run(*scenario, mode="observe", **settings)
        job, planned = run(*scenario, **settings)
        same = min(len(default), len(planned))
        theirs, ours = (map(sum, zip(*each[:same], strict=True)) for each in (default, planned))
        return job, *(mine / default - 1 for mine, default in zip(ours, theirs, strict=True))

    return compared


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=() if name == "one GPU" else pytest.mark.extended) for name in SCENARIOS],
)
def test_under_limits_that_others_set_a_job_is_not_slower_than_at_default_clocks_and_uses_less(compared, scenario):
    job, slower, more = compared(SCENARIOS[scenario])
    assert slower < 0.01
    assert more < 0.0
    assert limits(job)[-1] == ()
    assert job.runtime.next.phase == "run"
    assert not job.runtime.next.limited, "what ran before is back"


def test_limits_that_come_again_are_planned_for_and_compared_once(run):
    job, _ = run([at(60 * n, (1,), power_w=None if n % 2 else 300.0) for n in range(8)], TWO)
    phases = in_order(phase for phase, _, _ in job.taken)
    assert phases.count("optimizing") == 1
    assert [judged.kept for judged in job.events(PlanJudged)] == [True, True], "without limits, and under them"
    assert job.events(ProfileWritten) == []


def test_a_plan_that_is_late_under_a_limit_is_dropped_and_the_former_one_returns_when_the_limit_goes(start_compared):
    job = start_compared()
    job.gpus[1].limit(power_w=300.0)
    job.train_while(lambda: not job.runtime.next.limited)
    in_time = job.work
    job.late_under_plans()
    job.train_while(lambda: "training goes on at default clocks" not in job.events(PlanJudged)[-1].then)
    job.work = in_time
    judged = len(job.events(PlanJudged))
    assert set(job.train(20)) == {"observe"}
    job.gpus[1].limit()
    job.train(2)
    assert set(job.train(20)) == {"run"}
    assert not job.runtime.next.limited
    assert len(job.events(PlanJudged)) == judged, "it was kept before, and is not compared again"


def test_under_a_power_cap_that_default_clocks_exceed_no_iteration_runs_at_them_whatever_limits_come(start_compared):
    job = start_compared()
    job.runtime.set_policy({"name": "power_cap", "watts": 450.0})
    job.train(4)
    job.gpus[1].limit(power_w=300.0)
    assert set(job.train(20)) == {"run"}
    job.runtime.set_policy({"name": "slowdown"})
    job.train_while(lambda: not job.runtime.next.limited)
    job.train_until("run")
    job.runtime.set_policy({"name": "power_cap", "watts": 350.0})
    job.train(4)
    assert set(job.train(20)) == {"run"}
    job.gpus[1].limit()
    job.train(2)
    assert set(job.train(20)) == {"run"}
    assert not job.runtime.next.limited


def test_default_clocks_measured_under_a_limit_are_not_compared_with_plans_without_it(start, frontiers):
    judged = []
    for is_limited in (False, True):
        job = start(str(is_limited), mode="run", frontier=frontiers(**TWO), **TWO)
        job.train(2)
        if is_limited:
            job.gpus[1].limit(power_w=250.0)
            job.train_until_compared()
            job.gpus[1].limit()
            job.train_while(lambda job=job: job.runtime.next.limited)
        judged.append(job.train_until_compared(1 + is_limited)[-1])
    without, after = judged
    assert after.kept
    assert (after.slowdown, after.saved) == pytest.approx((without.slowdown, without.saved), abs=0.01)


def test_a_profile_that_is_wrong_since_a_limit_came_meanwhile_is_measured_again_when_that_has_gone(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("profile")
    job.train(3)
    job.gpu.limit(power_w=250.0)
    job.train_until("run")
    job.train(60)
    job.gpu.limit()
    job.train_while(lambda: len(job.events(ProfileWritten)) < 2, most=150)
    assert job.train_until_compared(len(job.events(PlanJudged)) + 1)[-1].kept


def test_under_limits_a_reduction_is_of_the_power_without_them(start_compared):
    job = start_compared()
    caps_w = []
    for number, limit in enumerate(({}, {"power_w": 300.0}), start=1):
        job.train_until_compared(number)
        job.gpus[1].limit(**limit)
        job.train_while(lambda limit=limit: job.runtime.next.phase != "run" or job.runtime.next.limited != bool(limit))
        until = job.time.date() + timedelta(seconds=20)
        job.runtime.set_policy({"name": "reduce", "power_fraction": 0.8, "until": until.isoformat()})
        job.train(6)
        caps_w.append(job.events(PowerCapChanged)[-1].watts)
        job.train_while(lambda: job.events(PowerCapChanged)[-1].watts is not None)
    assert caps_w[1] == pytest.approx(caps_w[0], rel=0.01)


def test_clocks_above_a_limit_are_left_out_for_that_gpu_alone(run):
    job, _ = run([at(10, (1,), power_w=300.0), at(40, (1,))], TWO)
    frontier = Frontier.load(job.folder / "limits" / "0")
    others, limited = ({clock for plan in frontier.plans for clock in plan.clocks_mhz[rank]} for rank in (0, 1))
    assert all(clock <= 1110 or clock == 1410 for clock in limited), "1410 MHz: as fast as it may, like default clocks"
    assert any(1110 < clock < 1410 for clock in others)


@pytest.mark.parametrize("ranks", [pytest.param((3,), marks=pytest.mark.extended), (2, 3)], ids=["one GPU", "a node"])
def test_pipelines_wait_at_once_for_one_whose_gpus_are_limited(compared, ranks):
    scenario = [at(10, ranks, power_w=300.0), at(70, ranks)]
    job, slower, more = compared(scenario, shape=TWO, pipelines=2)
    assert slower < 0.01
    assert more < 0.0
    first, limited, *_ = job.events(PlanChosen)
    assert (first.straggler, limited.straggler) == (None, 1)
    assert limited.slowdown > 1.1
    assert limited.plans[0] > limited.plans[1], "from its frontier, before an iteration under a plan has shown it"


class SlowWorker(WorkerAtOnce):
    """Takes twenty iterations."""

    polls = 0

    def poll(self):
        self.polls += 1
        return super().poll() if self.polls > 20 else None


def test_while_plans_for_a_pipeline_under_limits_are_made_the_others_are_as_slow_as_it_lets_them_be(start_compared):
    job = start_compared(pipelines=2)
    job.worker = SlowWorker
    job.gpus[3].limit(power_w=300.0)
    begun = len(job.taken)
    job.train_while(lambda: job.runtime.next.phase != "optimizing")
    default = [(time_s, energy_j) for phase, time_s, energy_j in job.taken[begun:] if phase == "default"]
    job.train(3)
    assert set(job.train(10)) == {"optimizing"}
    optimizing = [(time_s, energy_j) for _, time_s, energy_j in job.taken[-10:]]
    (time_s, energy_j), (default_s, default_j) = (
        map(median, zip(*taken, strict=True)) for taken in (optimizing, default)
    )
    assert time_s == pytest.approx(default_s, rel=0.002)
    assert energy_j < 0.9 * default_j


def test_where_plans_under_limits_cannot_be_made_the_former_ones_stay(start_compared, capsys):
    job = start_compared(pipelines=2)
    job.worker = type("FailingWorker", (WorkerAtOnce,), {"problem": "no memory"})
    job.gpus[3].limit(power_w=300.0)
    assert job.train_until_compared(2)
    assert "plans for these limits cannot be made (optimising failed: no memory)" in capsys.readouterr().out
    assert job.runtime.next.limited


def test_without_its_profile_a_plan_stays_and_is_compared_under_the_limit(tmp_path, start, frontiers):
    made = Frontier.load(frontiers(**TWO))
    without = replace(made, provenance=made.provenance.model_copy(update={"profile": None})).save(tmp_path)
    job = start(mode="run", frontier=str(without), **TWO)
    job.train_until_compared()
    job.gpus[1].limit(power_w=300.0)
    assert len(job.train_until_compared(2)) == 2
    assert "optimizing" not in {phase for phase, _, _ in job.taken}
