"""Plans for alternating and growing numbers of micro-batches, which share one profile."""

import random
import statistics
from dataclasses import replace

import msgspec
import pytest
from pipelines import one_f_one_b
from virtual.gpu import AveragingGpu
from virtual.job import SLOWER, WorkerAtOnce

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Failed, OrderPlanned, PlanJudged, ProfileWritten, Started
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_savings import NO_ORDER
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client import runtime
from perseus_ds.client.meeting import key_of
from perseus_ds.errors import GpuError, ScheduleError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.protocol.job_messages import Joined, ScheduleRead
from perseus_ds.protocol.layout import OTHER_ORDERS
from perseus_ds.protocol.messages import LONGEST, encode
from perseus_ds.server.orders import Orders
from perseus_ds.server.under_plans import PlanRunner
from perseus_ds.simulation.device_models import COMPUTE_BOUND


@pytest.fixture
def job(start):
    """Return a job of one rank."""
    return start(mode="auto", micro_batches=4, **SLOWER)


def train(job, counts):
    """Run an iteration for each number of micro-batches and return the phases."""
    phases = []
    for count in counts:
        job.schedule = one_f_one_b(ranks=len(job.schedule.ranks), micro_batches=count)
        phases += job.train()
    return phases


def of_count(records, counts, count):
    """Return the records of iterations with a number of micro-batches."""
    return [record for record, number in zip(records, counts, strict=True) if number == count]


def test_counts_that_alternate_each_get_a_plan_of_one_profile_and_are_tried_together(job):
    counts = [4, 2] * 100
    phases = train(job, counts)
    assert phases[-2:] == ["run", "run"]
    assert len(job.events(ProfileWritten)) == 1, "passes are the same"
    (planned,) = job.events(OrderPlanned)
    assert planned.micro_batches == 2
    assert [event.kept for event in job.events(PlanJudged)] == [True], "one trial for all counts"
    records = job.events(IterationRecord)
    for order, count in ((None, 4), (1, 2)):
        mine = [record for record in of_count(records, counts[: len(records)], count) if record.phase == "run"][-10:]
        assert {record.order for record in mine} == {order}
        assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
        assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)
        folder = job.folder / "orders" / "1" if order else job.folder
        assert Frontier.load(folder).provenance.micro_batches == count
        assert StageProfile.load(folder).info.micro_batches == count
    assert job.read == 1


def test_a_later_start_finds_the_plans_of_all_counts_under_their_numbers(job):
    train(job, [4, 2] * 60)
    job.schedule = one_f_one_b(ranks=1, micro_batches=4)  # that of the declared order
    job.restart()
    train(job, [2, 2, 4, 4, 2])  # it begins with the other one
    train(job, [4, 2] * 10)
    records = job.close()[-20:]
    assert {record.order for record in records} == {None, 1}
    assert {record.plan is None for record in records if record.phase == "run"} == {False}
    assert len(job.events(ProfileWritten)) == 1


def test_a_later_start_that_begins_with_another_count_uses_the_profile_and_what_is_known_of_all_counts(start):
    job = start(mode="auto", stages_s=(0.036, 0.05), micro_batches=4, gpu={"lock_latency_s": 0.015})
    train(job, [4] * 40 + [2] * 60)
    for count, number in ((2, 1), (3, 2)):
        job.schedule = one_f_one_b(ranks=2, micro_batches=count)
        job.restart()
        train(job, [count] * 10 + [4] * 30)
        started = job.events(Started)[-1]
        assert (started.order, started.micro_batches) == (number, count)
        records = [record for record in job.events(IterationRecord) if record.order == (number or None)]
        assert any(record.plan is not None for record in records)
    job.close()
    assert len(job.events(ProfileWritten)) == 1
    assert Frontier.load(job.folder).provenance.micro_batches == StageProfile.load(job.folder).info.micro_batches == 3
    planned = [record for record in job.events(IterationRecord)[-20:] if record.plan is not None]
    assert {record.order for record in planned} == {None}, "4 micro-batches keep their number"
    assert sum(record.energy_j for record in planned) < 0.97 * sum(record.default_energy_j for record in planned)


def test_the_order_of_a_start_keeps_its_number_if_no_other_number_is_free(job):
    (key,) = job.server.orders.numbers
    full = {key + place: place for place in range(OTHER_ORDERS)}
    again = job.server.job
    same = Orders(again, lambda message: None, job.server.recorder, reads=True)
    assert same.restore(full)
    assert same.occurs(key + 1) is None, "its operations are those of another order"
    assert same.occurs(key) is same.first
    facts = msgspec.structs.replace(again.facts[0], key=key_of(3))
    another = Orders(replace(again, facts=(facts,)), lambda message: None, job.server.recorder, reads=True)
    assert not another.restore(full)
    assert (another.first.number, another.numbers) == (0, {key_of(3): 0})


def test_a_first_iteration_of_another_order_than_that_of_the_start_is_not_taken_for_it(job):
    train(job, [2] * 60 + [4] * 60)
    records = job.close()
    assert [record.order for record in records] == [NO_ORDER, *[1] * 59, *[None] * 60]
    assert Frontier.load(job.folder).provenance.micro_batches == 4
    assert Frontier.load(job.folder / "orders" / "1").provenance.micro_batches == 2


def test_counts_that_are_drawn_for_each_iteration_all_have_plans_within_a_hundred_iterations(start):
    job, draw = start(mode="auto", micro_batches=6, **SLOWER), random.Random(1)
    counts = [draw.randint(6, 14) for _ in range(250)]
    train(job, counts)
    records = job.close()
    first = next(number for number, record in enumerate(records) if record.plan is not None)
    ran = {record.order for record in records[first : first + 100] if record.plan is not None}
    assert len(ran) == 9
    assert len(job.events(ProfileWritten)) == 1
    assert [event.kept for event in job.events(PlanJudged)] == [True]


def test_an_order_has_a_plan_soon_after_it_was_seen_for_the_first_time(job):
    train(job, [4] * 70)
    phases = train(job, [3] * 6)
    records = job.close()[-6:]
    assert records[0].plan is None
    assert records[-1].plan is not None or phases[-1] == "default"
    assert [event.micro_batches for event in job.events(OrderPlanned)] == [3]


def test_counts_that_alternate_are_profiled_although_the_counter_needs_longer_than_one_iteration(start):
    job = start(mode="auto", stages_s=(0.02,), micro_batches=4, gpu_class=AveragingGpu, **SLOWER)
    while not job.events(ProfileWritten):
        train(job, [4, 2] * 10)
        assert len(job.taken) < 1000
    train(job, [4, 2] * 10)
    job.close()
    assert job.events(Failed) == []
    profile = StageProfile.load(job.folder)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        row = profile.at_highest_clock(0, kind)
        assert row.time_s == pytest.approx(job.work_s[0][kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.02)
        assert row.energy_j / row.time_s == pytest.approx(job.gpu.model.power_w(row.clock_mhz, COMPUTE_BOUND), rel=0.1)
    records = job.events(IterationRecord)
    assert {record.order for record in records if record.phase == "profile"} == {None, 1}
    assert {record.phase for record in records[-10:]}.isdisjoint({"warm-up", "profile"})


def test_profile_mode_measures_iterations_of_all_counts_for_one_profile(start):
    mixed, alone = (start(folder=name, mode="profile", micro_batches=8) for name in ("mixed", "alone"))
    phases = train(mixed, [8, 2, 5, 4] * 12)
    alone.train_until("observe")
    assert phases.count("profile") < 24, "iterations of all counts are measured"
    assert len(mixed.events(ProfileWritten)) == 1
    found, expected = (StageProfile.load(job.folder) for job in (mixed, alone))
    assert found.info.micro_batches == 8
    of_both = {row.clock_mhz for row in found.measurements} & {row.clock_mhz for row in expected.measurements}
    assert len(of_both) > 30
    for row in expected.measurements:
        if row.kind is not Kind.TAIL and row.clock_mhz in of_both:
            measured = found.at(row.stage, row.kind, row.clock_mhz)
            assert measured.time_s == pytest.approx(row.time_s, rel=0.02)
            assert measured.energy_j == pytest.approx(row.energy_j, rel=0.06)


def test_the_cost_of_profiling_iterations_of_all_counts_is_relative_to_default_clocks_of_each_count(start):
    job, counts = start(mode="profile", micro_batches=8), [8, 2, 5, 4] * 12
    train(job, counts)
    (written,) = job.events(ProfileWritten)
    records = [*zip(job.close(), counts, strict=True)]
    at_default = [(record, count) for record, count in records if record.phase == "observe"]
    profiled = [(record, count) for record, count in records if record.phase == "profile"][: written.iterations]

    def lost(figure):
        default = {}
        for count in set(counts):
            default[count] = statistics.fmean(getattr(record, figure) for record, of in at_default if of == count)
        return sum(getattr(record, figure) - default[count] for record, count in profiled)

    assert written.lost_s == pytest.approx(lost("time_s"), abs=0.01 * sum(record.time_s for record, _ in profiled))
    assert written.lost_j == pytest.approx(lost("energy_j"), abs=0.02 * sum(record.energy_j for record, _ in profiled))


def test_after_a_fault_the_job_continues_with_the_plans_of_all_orders(job, monkeypatch):
    train(job, [4, 2] * 35)

    def fail(*_, **__):
        raise GpuError("the driver is gone for a moment")

    with monkeypatch.context() as broken:
        broken.setattr(PlanRunner, "_note_drift", fail)
        train(job, [4])
    counts = [2, 4] * 20
    train(job, counts)
    records = job.close()[-20:]
    assert {record.order for record in records if record.plan is not None} == {None, 1}
    assert len(job.events(ProfileWritten)) == 1


@pytest.mark.parametrize("phase", ["warm-up", "profile"])
def test_a_first_count_that_is_left_before_its_profile_is_done_keeps_no_other_from_a_plan(start, phase):
    job = start(mode="auto", micro_batches=2, **SLOWER)
    job.train_until(phase)
    train(job, [2] + [4] * 80)
    assert any(record.plan is not None for record in job.close()[-10:])
    (planned,) = job.events(OrderPlanned)
    assert planned.micro_batches == 4
    assert len(job.events(ProfileWritten)) == 1, "iterations of all counts are measured"


def test_in_run_mode_the_plan_runs_whenever_the_count_is_the_one_it_was_made_for(start, frontier, capsys):
    job = start(mode="run", frontier=frontier)
    phases = train(job, [3, 5, 3, 3, 5, 3])
    records = job.close()
    assert [phase == "observe" for phase in phases] == [False, True, False, False, True, False]
    assert [record.plan is None for record in records[-6:]][1::3] == [True, True]
    assert "all others than the first run at default clocks" in capsys.readouterr().out


def fail_to_read(rank, schedule):
    raise ScheduleError("the passes have no order")


@pytest.mark.parametrize("is_read", [False, True], ids=["its schedule cannot be read", "planning fails"])
def test_an_order_that_cannot_be_planned_runs_at_default_clocks_and_the_first_goes_on(job, monkeypatch, is_read):
    train(job, [4] * 70)
    job.read_order = job.read_order if is_read else fail_to_read
    monkeypatch.setattr(WorkerAtOnce, "error", "the passes have no order")
    phases = train(job, [4, 2] * 20)
    job.close()
    assert set(phases[-20::2]) <= {"run", "default"}
    assert set(phases[-19::2]) <= {"observe", "default"}
    assert "no order" in job.events(OrderPlanned)[-1].given_up
    assert job.events(Failed) == []


def test_a_long_schedule_fits_into_a_message(start, monkeypatch):
    job = start(mode="profile", micro_batches=8)
    long, sent = one_f_one_b(ranks=1, micro_batches=2000), []
    assert len(ScheduleStreams.of(long).model_dump_json()) > LONGEST
    job.read_order = lambda *_: long
    add = job.server.orders.add_schedule
    monkeypatch.setattr(job.server.orders, "add_schedule", lambda *read: sent.append(encode(read[1])) or add(*read))
    train(job, [8, 4, 4, 4])
    assert job.server.orders.streams_of(key_of(4)) == long.ranks
    assert len(sent[0]) < LONGEST / 2
    assert job.events(OrderPlanned) == []
    monkeypatch.setattr(runtime, "_MOST_SCHEDULE_BYTES", 100)
    train(job, [5, 5, 5])
    assert "too long" in job.events(OrderPlanned)[-1].given_up


def test_a_schedule_that_was_lost_is_requested_again_from_a_rank_that_joins_again(start):
    job = start(mode="profile", micro_batches=8)
    send = job._to_server
    job._to_server = lambda rank, message: None if isinstance(message, ScheduleRead) else send(rank, message)
    train(job, [8, 4, 4, 4])
    job._to_server = send
    job._to_server(0, Joined(job.runtime.clocks.memory.iteration))
    train(job, [4, 4])
    assert job.server.orders.streams_of(key_of(4))
