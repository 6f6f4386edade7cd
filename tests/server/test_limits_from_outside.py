"""External limits of GPUs while plans run, on simulated GPUs in virtual time."""

import re
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.run_events import LimitsChanged, PlanJudged, ProfileWritten
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.progress.facts import JobFacts
from perseus_ds.server.metrics import registry_of

TWO = {"stages_s": (0.036, 0.05), "micro_batches": 6}


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory):
    """The keys of a job of two stages, with its frontier and profile."""
    job = VirtualJob(tmp_path_factory.mktemp("profiled"), **TWO, mode="auto")
    job.train_until("run")
    job.close()
    made = Frontier.load(job.folder)
    provenance = made.provenance.model_copy(update={"profile": str(job.folder / "profile.csv")})
    return {**TWO, "mode": "run", "frontier": str(replace(made, provenance=provenance).save(job.folder))}


@pytest.fixture
def compared(start, of_two_stages):
    """A job of two stages with a plan that was kept."""
    job = start(**of_two_stages)
    job.train_until_compared()
    return job


def limits(job):
    return [event.limits for event in job.events(LimitsChanged)]


def test_a_power_limit_is_named_within_two_iterations_and_once(start, capsys):
    job = start(mode="auto", **SLOWER)
    job.train_until("run")
    assert limits(job) == [], "a board at its own limit is not limited"
    job.gpu.limit(power_w=300.0)
    job.train(2)
    assert limits(job) == [((0, 299.25, None),)]
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
    assert limits(job) == [((0, None, 600.0),)]
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


@pytest.mark.parametrize(
    "scenario",
    [
        [(10, {"power_w": 300.0}), (60, {})],
        pytest.param(
            [(10 + 4 * n, {"power_w": 475.0 - 10 * abs(15 - abs(n - 15))}) for n in range(31)],
            marks=pytest.mark.extended,
        ),
        pytest.param([(10, {"clock_mhz": 1100}), (60, {})], marks=pytest.mark.extended),
    ],
    ids=["power", "ramp", "heat"],
)
def test_under_limits_a_job_is_not_slower_than_at_default_clocks_and_uses_less(start, of_two_stages, scenario):
    """It runs twice with the same limits at the same times, under plans and at default clocks."""
    taken = []
    for keys in ({**TWO, "mode": "observe"}, of_two_stages):
        job = start(keys["mode"], **keys)
        job.train(5) if keys["mode"] == "observe" else job.train_until_compared()
        job.train(2)
        begun, begin_s = len(job.taken), job.time.now_s()

        def limit(job=job, begin_s=begin_s):
            for time_s, limit in scenario:
                job.time.sleep(begin_s + time_s - job.time.now_s())
                job.gpus[1].limit(**limit)

        job.time.thread(limit, "site").start()
        job.train(round((scenario[-1][0] + 40) / job.taken[-1][1]))
        taken.append(job.taken[begun:])
    same = min(map(len, taken))
    default, ours = ([sum(values) for values in list(zip(*each[:same], strict=True))[1:]] for each in taken)
    assert ours[0] < 1.01 * default[0]
    assert ours[1] < default[1]
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
    job.train_while(lambda: len(job.events(ProfileWritten)) < 2)
    assert job.train_until_compared(len(job.events(PlanJudged)) + 1)[-1].kept


def test_limits_that_come_and_go_all_the_time_leave_a_good_plan_running(compared):
    """Blocks under different limits are not compared, so that they are no evidence against it."""
    phases = []
    for number in range(12):
        compared.gpus[1].limit(**({"power_w": 300.0} if number % 2 else {}))
        phases += compared.train(40)
    assert [event.kept for event in compared.events(PlanJudged)] == [True]
    assert phases.count("run") > 0.8 * len(phases)
    records = [record for record in compared.events(IterationRecord) if record.limited]
    assert {record.phase for record in records} >= {"default", "run"}


def test_under_a_power_cap_that_default_clocks_exceed_no_iteration_runs_at_them_whatever_limits_come(compared):
    compared.control(command="set", goal={"watts": 450.0})
    compared.train(4)
    for limit in ({"power_w": 300.0}, {}):
        compared.gpus[1].limit(**limit)
        assert set(compared.train(20)) == {"run"}


def test_default_clocks_measured_under_a_limit_are_not_compared_with_plans_without_it(start, of_two_stages):
    job = start(**of_two_stages)
    job.train(2)
    job.gpus[1].limit(power_w=250.0)
    job.train_until("default")
    job.train(8)
    job.gpus[1].limit()
    (judged,) = job.train_until_compared()
    assert judged.kept
    assert judged.trial.slowdown == pytest.approx(judged.promised_slowdown, abs=0.01)
    assert judged.trial.saved == pytest.approx(judged.promised_saved, abs=0.02)
