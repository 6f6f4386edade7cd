"""Whole jobs of one rank under policies that know the time, in virtual time."""

import itertools
import os
from datetime import datetime, timedelta, timezone

import pytest
from frontiers import save_true_frontier
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_records import (
    CostsSoFar,
    Failed,
    Halted,
    IterationRecord,
    PlanChosen,
    PolicyChanged,
    PowerCapChanged,
    TimetableMade,
)
from perseus_ds.errors import GpuBusyError, SignalError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.policy import selector

WORK_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.1 * (2 - 1 / 6), Kind.TAIL: 0.01}
BEGIN = datetime(2026, 11, 22, tzinfo=timezone.utc)
BEGIN_S = 100.0
"""The job begins at BEGIN plus so much."""


@pytest.fixture(scope="module")
def frontier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontier")
    return folder, save_true_frontier(folder, stages=1, micro_batches=3, forward_s=0.1)


@pytest.fixture
def start(tmp_path, frontier):
    """A function that starts a job under a policy."""
    jobs = []

    def start(folder="perseus", **policy):
        block = {"mode": "run", "frontier": str(frontier[0]), "policy": policy}
        jobs.append(VirtualJob(tmp_path / folder, work_s=dict(WORK_S), **block))
        return jobs[-1]

    yield start
    for job in jobs:
        job.runtime.close()


def date(seconds):
    return (BEGIN + timedelta(seconds=seconds)).isoformat()


def write_signal(path, *values, step_s=60.0, begin_s=BEGIN_S - 60.0):
    """Write values, each of which holds for a minute; the first one began a minute before the job."""
    rows = [f"{date(begin_s + n * step_s)},{value}" for n, value in enumerate(values)]
    text = "\n".join(["time,value [EUR/MWh]", *rows]) + "\n"
    path.write_text(text)
    changed_ns = path.stat().st_mtime_ns + 10**9 * len(text)  # whatever the file system's resolution
    os.utime(path, ns=(changed_ns, changed_ns))
    return str(path)


def cheapest(path, minutes, steps, **more):
    return {
        "name": "cheapest",
        "finish_by": date(BEGIN_S + 60 * minutes),
        "total_steps": steps,
        "signal": str(path),
        **more,
    }


def test_a_window_of_a_schedule_is_a_change_of_plan_at_a_boundary(start, frontier):
    window = {"begin": "00:02", "end": "00:03", "policy": {"name": "energy_optimal"}}
    job = start(name="schedule", timezone="UTC", windows=[window])
    ended_s = []
    while job.time.seconds < 200:
        job.train()
        ended_s.append(job.time.seconds)
    records = job.close()
    last = len(frontier[1].plans) - 1
    planned = [(r, end_s - r.time_s) for r, end_s in zip(records, ended_s, strict=True) if r.phase == "run"]
    assert {record.plan for record, _ in planned} == {0, last}
    for record, begin_s in planned:
        # Decided on at the end of an iteration, a plan runs one iteration later.
        if not any(edge_s <= begin_s < edge_s + 2.5 * record.time_s for edge_s in (120, 180)):
            assert record.plan == (last if 120 <= begin_s < 180 else 0)
    changed = [event.policy["name"] for event in job.events(PolicyChanged) if event.by_schedule]
    assert changed == ["slowdown", "energy_optimal", "slowdown"]
    assert [event.plan for event in job.events(PlanChosen)] == [0, last, 0]


def test_a_job_ends_in_time_for_hardly_more_than_the_bound(start, tmp_path):
    signal = write_signal(tmp_path / "prices.csv", 50, 90, 20, 70, 30, 80, 40, 60)
    job = start(**cheapest(signal, 6, 380))
    job.train(380)
    assert job.time.seconds <= BEGIN_S + 360
    job.close()
    first, costs = job.events(TimetableMade)[0], job.events(CostsSoFar)[-1]
    records = job.events(IterationRecord)
    assert 1 <= 380 - costs.iterations <= 24, "all but the last ones, and those before default clocks were measured"
    assert sum(record.phase == "run" for record in records) > 300
    assert costs.bound == first.bound <= first.cost
    assert first.unit == "EUR/MWh"
    assert costs.cost == pytest.approx(first.bound * costs.iterations / 380, rel=0.05)
    assert costs.cost < 0.85 * costs.fastest_cost
    assert len({record.plan for record in job.events(IterationRecord)}) > 2


def test_a_job_stands_still_while_energy_is_dear_and_says_so(start, tmp_path, capsys):
    signal = write_signal(tmp_path / "prices.csv", 10, 10, 900, 900, 10, 10, 10)
    job = start(**cheapest(signal, 6, 180, may_pause=True))
    began_s, ended_s = [], []
    for _ in range(180):
        began_s.append(job.time.seconds)
        job.train()
        ended_s.append(job.time.seconds)
    records = job.close()
    assert len(records) == 180
    dear = [(b, e) for b, e, r in zip(began_s, ended_s, records, strict=True) if e - r.time_s > 162 and b < 278]
    assert len(dear) <= 2, "iterations in the dear minutes, but for those that had begun"
    (halt,) = job.events(Halted)
    assert halt.time_s == pytest.approx(120, abs=4)
    assert halt.energy_j < 120 * 90, "the GPU is idle"
    costs = job.events(CostsSoFar)[-1]
    assert costs.halted_s == pytest.approx(halt.time_s, abs=0.01)
    assert costs.cost < 0.8 * costs.fastest_cost
    assert ended_s[-1] <= BEGIN_S + 360
    assert [e.halts for e in job.events(PlanChosen)].count(True) == 1
    assert "cost" in capsys.readouterr().out


def test_a_halt_whose_energy_cannot_be_read_costs_what_idle_gpus_do(start, tmp_path):
    signal = write_signal(tmp_path / "prices.csv", 10, 10, 900, 900, 10, 10, 10)
    job = start(**cheapest(signal, 6, 180, may_pause=True))
    energy_j = job.gpu.energy_j

    def busy_as_the_halt_begins():
        if 150 < job.time.seconds < 175:
            raise GpuBusyError("the driver did not answer in time")
        return energy_j()

    job.gpu.energy_j = busy_as_the_halt_begins
    job.train(180)
    job.close()
    (halt,) = job.events(Halted)
    assert halt.energy_j is None
    costs = job.events(CostsSoFar)[-1]
    assert costs.halted_s == pytest.approx(120, abs=4)
    assert costs.cost > 900 / 3.6e9 * 110 * job.gpu.model.blocking_power_w


@pytest.mark.parametrize("how", ["policy", "pause", "close"])
def test_a_job_that_stands_still_goes_on_when_it_is_told_to(start, tmp_path, how):
    signal = write_signal(tmp_path / "prices.csv", 10, 10, 900, 900, 900, 10, 10, 10)
    job = start(**cheapest(signal, 6, 180, may_pause=True))

    def tell():
        job.time.sleep(210.0 - job.time.seconds)
        if how == "close":
            job.runtime.close()  # as a handler of SIGTERM on the main thread would
        elif how == "pause":
            job.runtime.carry_out({"command": "pause"})
        else:
            job.runtime.carry_out({"command": "policy", "policy": {"name": "slowdown"}})

    job.time.thread(tell, "teller").start()
    began_s = []
    while job.time.seconds < 215:
        began_s.append(job.time.seconds)
        job.train()
    times_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise([*began_s, job.time.seconds])]
    assert 45 < max(times_s) < 55, "it stood still from the beginning of the dear minutes until it was told"
    assert sum(time_s > 2 for time_s in times_s) == 1
    phases = job.train(6)
    assert phases[-1] == {"policy": "run", "pause": "pause", "close": "observe"}[how]
    assert job.time.seconds < 245


def test_a_changed_signal_is_taken_up_and_a_bad_one_is_not(start, tmp_path, caplog):
    path = tmp_path / "prices.csv"
    write_signal(path, 10, 90, 10, 90, 10, 90)
    job = start(**cheapest(path, 4, 200))
    job.train(5)
    made = len(job.events(TimetableMade))
    write_signal(path, 90, 10, 90, 10, 90, 10)
    job.train(6)
    assert len(job.events(TimetableMade)) == made + 1
    path.write_text("time,value\nnonsense")
    job.train(10)
    (failed,) = job.events(Failed)
    assert failed.event == "signal"
    assert str(path) in failed.error
    assert "The last good values stay in use" in failed.error
    assert caplog.text.count("The last good values stay in use") == 1
    path.unlink()
    job.train(10)
    assert "no such file" in job.events(Failed)[-1].error
    write_signal(path, 90, 20, 90, 10, 90, 10)
    made = len(job.events(TimetableMade))
    job.train(5)
    assert len(job.events(TimetableMade)) == made + 1


def test_a_timetable_is_recorded_with_the_entries_that_come_first(start, tmp_path, monkeypatch):
    monkeypatch.setattr(selector, "_MOST_ENTRIES", 2)
    signal = write_signal(tmp_path / "prices.csv", 50, 90, 20, 70, 30, 80, 40, 60)
    job = start(**cheapest(signal, 6, 380))
    job.train(2)
    made = job.events(TimetableMade)[0]
    assert len(made.entries) == 2
    assert made.entries[0][0] <= made.entries[1][0] < made.ends - 60


def test_a_signal_that_cannot_be_used_is_an_error_before_training(start, tmp_path):
    with pytest.raises(SignalError, match=r"prices.csv: no such file"):
        start(**cheapest(tmp_path / "prices.csv", 4, 200))
    write_signal(tmp_path / "prices.csv", 1, 2, begin_s=-7200)
    with pytest.raises(SignalError, match=r"prices.csv: all its values are of the past"):
        start("other", **cheapest(tmp_path / "prices.csv", 4, 200))


def test_an_order_with_a_bad_signal_is_refused_and_changes_nothing(start, tmp_path):
    job = start(name="slowdown")
    job.train(2)
    with pytest.raises(SignalError, match="no such file"):
        job.runtime.set_policy(cheapest(tmp_path / "prices.csv", 4, 200))
    assert job.runtime.state()["policy"]["name"] == "slowdown"
    job.runtime.set_policy(cheapest(write_signal(tmp_path / "prices.csv", 1, 2, 3, 4, 5), 3, 100))
    job.train(4)
    assert len(job.events(TimetableMade)) == 1


@pytest.mark.parametrize(("by", "most_s"), [("order", 0.0), ("file", 1.0)])
def test_power_is_below_a_changed_cap_from_the_second_iteration_after_the_change_on(
    start, tmp_path, frontier, by, most_s
):
    plans = frontier[1].plans
    high_w, low_w = (plans[n].energy_j / plans[n].time_s for n in (1, len(plans) * 2 // 3))
    high_w *= 1.006  # half a percent is kept in reserve
    path = tmp_path / "cap"
    path.write_text(f"{high_w}\n")
    job = start(name="power_cap", **({"signal": str(path)} if by == "file" else {"watts": high_w}))
    job.train(12)
    told_s = job.time.seconds
    if by == "file":
        path.write_text(f"{low_w:.9f}    \n")
    else:
        job.runtime.set_policy({"name": "power_cap", "watts": low_w})
    began_s, powers_w = [], {}
    for iteration in range(13, 37):
        began_s.append(job.time.seconds)
        begin_j = job.gpu.true_energy_j
        job.train()
        powers_w[iteration] = (job.gpu.true_energy_j - begin_j) / (job.time.seconds - began_s[-1])
    records = [r for r in job.close() if r.iteration > 12]
    before, under = [r for r in records if r.plan == 1], [r for r in records if r.plan not in (1, None)]
    assert [r.iteration for r in before] == list(range(13, 13 + len(before)))
    assert began_s[len(before)] - told_s <= most_s + 2.05 * before[0].time_s
    assert len(before) == 2 or by == "file"
    # The GPU's own energy: its counter moves every 0.1 s, so that the energy of a single iteration is not known.
    settled = [powers_w[r.iteration] for r in under[10:]]
    assert sum(settled) / len(settled) <= low_w
    assert max(powers_w[r.iteration] for r in under) < 1.01 * low_w, "before the profile's power is corrected, too"


def test_power_is_reduced_for_as_long_as_ordered_and_training_then_goes_on_as_before(start, frontier):
    plans = frontier[1]
    default_w, least_w = plans.baseline.mean_power_w, plans.plans[-1].mean_power_w
    fraction = (least_w + 0.3 * (default_w - least_w)) / default_w
    job = start(name="slowdown")
    job.train(8)
    order = {"command": "reduce", "power_fraction": fraction, "duration_s": 40.0}
    answer = job.runtime.carry_out(order)["done"]
    assert "iterations later" in answer
    job.train(2)
    end_s, begin_s, begin_j = job.time.seconds + 30.0, job.time.seconds, job.gpu.true_energy_j
    while job.time.seconds < end_s:
        job.train()
    assert (job.gpu.true_energy_j - begin_j) / (job.time.seconds - begin_s) <= 1.005 * fraction * default_w
    job.train(25)
    records = job.close()
    assert {record.plan for record in records[-3:]} == {0}
    assert [event.watts is None for event in job.events(PowerCapChanged)] == [False, True]


def test_costs_go_on_from_a_checkpoint(start, tmp_path):
    signal = write_signal(tmp_path / "prices.csv", 50, 90, 20, 70, 30, 80, 40, 60)
    job = start(**cheapest(signal, 6, 350))
    job.train(60)
    state = job.runtime.state()
    job.close()
    resumed = start("resumed", **cheapest(signal, 6, 350))
    resumed.time.seconds = job.time.seconds + 5
    resumed.runtime.restore(state, 60)
    resumed.train(10)
    assert [record.iteration for record in resumed.close()] == list(range(61, 71))
    before, after = job.events(CostsSoFar)[-1], resumed.events(CostsSoFar)[-1]
    assert after.iterations > before.iterations + 5
    assert before.cost < after.cost < 1.4 * before.cost
    assert after.bound == before.bound
