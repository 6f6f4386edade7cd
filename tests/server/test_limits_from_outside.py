"""External limits of GPUs while plans run, on simulated GPUs in virtual time.

Each scenario runs twice with the same limits at the same times, under plans and at default clocks. Under plans, the job
must take at most 1 % longer and use less energy.
"""

import functools
import re
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.run_records import IterationRecord, LimitsChanged, PlanJudged, ProfileWritten
from perseus_ds.server.metrics import registry_of
from perseus_ds.server.progress import JobFacts

ALL, SLOWEST = (0, 1, 2, 3), (3,)


def limits(job):
    return [event.limits for event in job.events(LimitsChanged)]


def test_a_power_limit_is_named_within_two_iterations_and_once(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    assert limits(job) == [], "a board at its own limit is not limited"
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
    assert said.count("limited more than during profiling: rank 0's GPU to 299.2 W") == 1
    assert said.count("no GPU is limited more than during profiling") == 1


def test_heat_is_named_with_the_clock_that_it_allows(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    job.gpu.limit(clock_mhz=600)
    # The first changes of a job are not read back if another change follows before their timeout.
    job.train_while(lambda: not limits(job), most=8)
    ((limit, *_),) = limits(job)
    assert limit == (0, None, 600.0)
    job.train()
    assert "rank 0's GPU to 600 MHz by heat or the machine" in capsys.readouterr().out


def test_a_limit_is_shown_by_status_and_as_a_metric(start):
    job = start(mode="observe")
    job.train(3)
    job.gpu.limit(power_w=300.0)
    job.train(2)
    status = job.control(command="status")["status"]
    assert [list(limit) for limit in status["limits"]] == [[0, 299.25, None]]
    text = generate_latest(registry_of(lambda: JobFacts.model_validate(status))).decode()
    assert re.search(r'perseus_gpu_power_limit_watts\{.*rank="0".*\} 299.25', text)
    assert re.search(r"perseus_limited_gpus\{.*\} 1.0", text)


TWO = {"stages_s": (0.036, 0.05), "micro_batches": 6}
FOUR = {"stages_s": (0.036, 0.034, 0.034, 0.05), "micro_batches": 8}


@pytest.fixture
def start_compared(start, frontiers):
    """Return a function that starts a job of two stages whose plan is kept."""

    def start_compared(**shape):
        job = start(mode="run", frontier=frontiers(**TWO), **TWO, **shape)
        job.train_until_compared()
        return job

    return start_compared


def at(time_s, ranks, **limit):
    """Return a change of limits: its time, ranks and limit. Without a limit, that of the board applies."""
    return time_s, ranks, limit


SCENARIOS = {
    "one GPU": [at(10, SLOWEST, power_w=300.0), at(150, SLOWEST)],
    "a ramp": [at(10 + 4 * n, ALL, power_w=475.0 - 10 * abs(15 - abs(n - 15))) for n in range(31)],
    "heat": [at(10, SLOWEST, clock_mhz=1100), at(150, SLOWEST)],
}


def limit(job, scenario):
    """Apply the limits of a scenario, starting now."""
    begin_s = job.time.now_s()

    def run():
        for time_s, ranks, limit in scenario:
            job.time.sleep(max(0.0, begin_s + time_s - job.time.now_s()))
            for rank in ranks:
                job.gpus[rank].limit(**limit)

    job.time.thread(run, "site").start()


@pytest.fixture(scope="module")
def frontiers(tmp_path_factory):
    """Return a function that profiles a job and returns the path of its frontier."""

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
    """Return a function that runs a scenario and returns the job and the time and energy of iterations."""
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
    """Return a function that runs a scenario under plans and at default clocks.

    It returns the job under plans, and the additional time and energy of its iterations relative to default clocks.
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
    job.train_until("run", most=250)  # a plan dropped during a thermal limit is tried again after 200 iterations


def test_a_profile_that_is_wrong_since_a_limit_came_meanwhile_is_measured_again_when_that_has_gone(start):
    job = start(mode="auto", **SLOWER)
    job.train_until("profile")
    job.train(2)
    job.gpu.limit(power_w=250.0)
    job.train_until("run")
    job.train(60)
    job.gpu.limit()
    job.train_while(lambda: len(job.events(ProfileWritten)) < 2, most=300)
    assert job.train_until_compared(len(job.events(PlanJudged)) + 1)[-1].kept


def test_a_plan_is_compared_again_under_a_limit_and_when_it_has_gone(start_compared):
    job = start_compared()
    for number, limit in enumerate(({"power_w": 380.0}, {}), start=2):
        job.gpus[1].limit(**limit)
        job.train(3)
        assert job.phase == "default", "default clocks must be measured under the same limit"
        job.train_until_compared(number)
    assert len(limits(job)) == 2
    records = [record for record in job.events(IterationRecord) if record.limited]
    assert {record.phase for record in records} >= {"default", "run"}


def test_under_a_power_cap_that_default_clocks_exceed_no_iteration_runs_at_them_whatever_limits_come(start_compared):
    job = start_compared()
    job.control(command="policy", policy={"name": "power_cap", "watts": 450.0})
    job.train(4)
    job.gpus[1].limit(power_w=300.0)
    assert set(job.train(20)) == {"run"}
    job.gpus[1].limit()
    assert set(job.train(20)) == {"run"}


def test_default_clocks_measured_under_a_limit_are_not_compared_with_plans_without_it(start, frontiers):
    judged = []
    for is_limited in (False, True):
        job = start(str(is_limited), mode="run", frontier=frontiers(**TWO), **TWO)
        job.train(2)
        if is_limited:
            job.gpus[1].limit(power_w=250.0)
            job.train_while(lambda job=job: job.phase != "default")
            job.train(8)
            job.gpus[1].limit()
        judged.append(job.train_until_compared(1)[-1])
    without, after = judged
    assert after.kept
    assert (after.slowdown, after.saved) == pytest.approx((without.slowdown, without.saved), abs=0.01)
