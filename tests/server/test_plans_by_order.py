"""Plans for alternating and growing numbers of micro-batches, which share one profile."""

from datetime import timedelta
from statistics import fmean

import pytest
from pipelines import one_f_one_b
from virtual.gpu import AveragingGpu
from virtual.job import SLOWER, in_order

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import Failed, IterationRecord, OrderPlanned, PlanJudged, ProfileWritten
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client import runtime
from perseus_ds.client.runtime import key_of
from perseus_ds.errors import GpuError, ScheduleError
from perseus_ds.gpu.device_models import COMPUTE_BOUND
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.protocol.job_messages import Joined, ScheduleRead
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.protocol.messages import LONGEST, encode
from perseus_ds.server import kinds
from perseus_ds.server.under_plans import PlanRunner


@pytest.fixture
def job(start):
    """Return a job of one rank."""
    return start(mode="auto", micro_batches=8, **SLOWER)


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


def test_counts_that_alternate_from_the_start_each_get_a_plan_and_one_profile_is_measured(job):
    counts = [8, 4] * 110
    phases = train(job, counts)
    records = job.close()
    assert phases[-2:] == ["run", "run"]
    assert len(job.events(ProfileWritten)) == 1, "passes are the same"
    (planned,) = job.events(OrderPlanned)
    assert (planned.micro_batches, planned.shares_profile) == (4, True)
    assert sorted((event.order, event.kept) for event in job.events(PlanJudged)) == [(0, True), (1, True)]
    for order, count in ((None, 8), (1, 4)):
        mine = of_count(records, counts, count)[-10:]
        assert {(record.order, record.phase) for record in mine} == {(order, "run")}
        assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
        assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)
        folder = job.folder / "orders" / "1" if order else job.folder
        assert Frontier.load(folder).provenance.micro_batches == count
        assert StageProfile.load(folder).info.micro_batches == count
    assert job.read == 1


def test_counts_that_alternate_are_profiled_although_the_counter_needs_longer_than_one_iteration(start):
    job = start(mode="auto", stages_s=(0.004,), micro_batches=4, gpu_class=AveragingGpu, **SLOWER)
    while not job.events(ProfileWritten):
        train(job, [4, 2] * 10)
        assert len(job.taken) < 2000
    train(job, [4, 2] * 10)
    job.close()
    assert job.events(Failed) == []
    profile = StageProfile.load(job.folder)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        row = profile.at_highest_clock(0, kind)
        assert row.time_s == pytest.approx(job.work_s[0][kind] * job.gpu.model.slowdown(row.clock_mhz), rel=0.02)
        assert row.energy_j / row.time_s == pytest.approx(job.gpu.model.power_w(row.clock_mhz, COMPUTE_BOUND), rel=0.1)
    records = [record for record in job.records() if isinstance(record, IterationRecord)]
    assert {record.order for record in records if record.phase == "profile"} == {None, 255}
    assert {record.phase for record in records[-10:]}.isdisjoint({"warm-up", "profile"})


def test_only_orders_that_can_be_measured_run_at_the_clock_that_is_measured(job):
    phases = []
    while phases[-2:] != ["profile"] * 2:
        phases += train(job, [8, 4])
    orders, number = job.server._kinds.orders_for(0), job.server._kinds.first.number
    assert {key: number for key, _, number in orders.numbers} == {key_of(8): number, key_of(4): number}
    assert orders.others == DEFAULT_CLOCKS


def test_profile_mode_measures_iterations_of_all_counts_for_one_profile(start):
    mixed, alone = (start(folder=name, mode="profile", micro_batches=8) for name in ("mixed", "alone"))
    phases = train(mixed, [8, 2, 5, 4] * 12)
    alone.train_until("observe")
    assert phases.count("profile") < 24, "iterations of all counts are measured"
    assert len(mixed.events(ProfileWritten)) == 1
    found, expected = (StageProfile.load(job.folder) for job in (mixed, alone))
    assert found.info.micro_batches == 8
    for row in expected.measurements:
        if row.kind is not Kind.TAIL:
            measured = found.at(row.stage, row.kind, row.clock_mhz)
            assert measured.time_s == pytest.approx(row.time_s, rel=0.02)
            assert measured.energy_j == pytest.approx(row.energy_j, rel=0.06)


@pytest.mark.extended
def test_a_deadline_slows_down_all_counts_alike_and_is_met_just_in_time(start):
    counts = [8, 2] * 400
    typical = start(folder="default", mode="observe", micro_batches=8)
    train(typical, [8, 2] * 5)
    seconds = sum(time_s for _, time_s, _ in typical.taken[-2:]) / 2 * len(counts)
    finish_by = (typical.time.epoch + timedelta(seconds=1.2 * seconds)).isoformat()
    policy = {"name": "deadline", "finish_by": finish_by, "total_steps": len(counts)}
    job = start(mode="auto", micro_batches=8, policy=policy)
    begun_s = job.time.now_s()
    train(job, counts)
    assert 1.1 * seconds < job.time.now_s() - begun_s <= 1.2 * seconds
    records = [record for record in job.close()[400:] if record.phase == "run"]
    slowdowns = {
        order: fmean(record.promised_slowdown for record in records if record.order == order) for order in (None, 1)
    }
    assert slowdowns[1] == pytest.approx(slowdowns[None], abs=0.05)


def test_an_order_that_comes_seldom_runs_at_default_clocks_and_leaves_nothing(job, capsys):
    train(job, [8] * 80)
    assert "differ in their number" not in capsys.readouterr().out
    assert train(job, [3, 8, 5, 8, 8, 6]) == ["observe", "run", "observe", "run", "run", "observe"]
    records = job.close()
    assert [record.order for record in records[-6:]] == [255, None, 255, None, None, 255]
    assert [record.plan is None for record in records[-6:]] == [True, False, True, False, False, True]
    assert capsys.readouterr().out.count("differ in their number of micro-batches") == 1
    assert not (job.folder / "orders").exists()
    assert job.read == 0


@pytest.mark.parametrize(("limit", "most"), [("MOST_NUMBERS", 1), ("MOST_KINDS", 2)])
def test_more_orders_than_may_have_plans_run_at_default_clocks(job, monkeypatch, limit, most):
    monkeypatch.setattr(kinds, limit, most)
    train(job, [8] * 80)
    counts = [8, 4, 5] * 60
    phases = train(job, counts)
    job.close()
    assert phases[-3:] == ["run", "run", "observe"]
    assert [event.micro_batches for event in job.events(OrderPlanned)] == [4]
    assert [path.name for path in (job.folder / "orders").iterdir()] == ["1"]


def test_an_order_that_is_used_no_more_makes_room_for_another(start, monkeypatch):
    """A long ramp of the batch size, in which the first order stays."""
    monkeypatch.setattr(kinds, "MOST_KINDS", 2)
    monkeypatch.setattr(kinds, "UNUSED", 20)
    job = start(mode="auto", micro_batches=2, **SLOWER)
    counts = [2] * 70 + [3] * 60 + [4] * 110
    train(job, counts)
    records = job.close()
    assert [event.micro_batches for event in job.events(OrderPlanned)] == [3, 4]
    assert records[-1].phase == "run"
    assert job.runtime._follows.latest(1).phase == "observe", "the replaced order"


def test_after_a_fault_the_job_begins_again_with_the_order_of_its_schedule(job, monkeypatch):
    train(job, [8] * 100)

    def fail(*_, **__):
        raise GpuError("the driver is gone for a moment")

    with monkeypatch.context() as broken:
        broken.setattr(PlanRunner, "_add_iteration", fail)
        train(job, [8])
    counts = [4] * 40 + [8] * 120
    train(job, counts)
    records = job.close()[-160:]
    assert {record.order for record in of_count(records, counts, 4)} <= {None, 1, 255}
    assert all(record.phase == "observe" for record in of_count(records, counts, 4) if record.order is None)
    assert records[-1].phase == "run"
    assert records[-1].order is None
    assert Frontier.load(job.folder).provenance.micro_batches == 8


@pytest.mark.parametrize("phase", ["warm-up", "profile"])
def test_a_first_count_that_is_left_before_its_profile_is_done_keeps_no_other_from_a_plan(start, phase):
    job = start(mode="auto", micro_batches=2, **SLOWER)
    job.train_until(phase)
    train(job, [2] + [4] * 160)
    records = job.close()
    assert records[-1].phase == "run"
    (planned,) = job.events(OrderPlanned)
    assert planned.micro_batches == 4
    assert planned.shares_profile is (phase == "profile"), "iterations of all counts are measured"
    (profiled,) = job.events(ProfileWritten)
    assert profiled.order == (0 if phase == "profile" else 1)


def test_in_run_mode_the_plan_runs_whenever_the_count_is_the_one_it_was_made_for(start, frontier, capsys):
    job = start(mode="run", frontier=frontier)
    train(job, [3] * 50)
    phases = train(job, [3, 5, 3, 3, 5, 3])
    records = job.close()
    assert [phase == "observe" for phase in phases] == [False, True, False, False, True, False]
    assert [record.plan is None for record in records[-6:]][1::3] == [True, True]
    assert "the plans are for one number" in capsys.readouterr().out


def fail_to_read(rank, schedule):
    raise ScheduleError("the passes have no order")


def test_an_order_whose_schedule_cannot_be_read_runs_at_default_clocks_and_the_first_goes_on(job):
    train(job, [8] * 100)
    job.read_order = fail_to_read
    phases = train(job, [8, 4] * 20)
    job.close()
    assert (set(phases[::2]), set(phases[1::2])) == ({"run"}, {"observe"})
    (given_up,) = job.events(OrderPlanned)
    assert "no order" in given_up.given_up
    assert job.events(Failed) == []


def test_an_order_that_cannot_be_read_in_profile_mode_is_requested_once(start):
    job = start(mode="profile", micro_batches=8)
    job.read_order = fail_to_read
    train(job, [8, 4] * 10)
    job.close()
    assert len(job.events(OrderPlanned)) == 1


def test_an_order_whose_profile_cannot_be_written_runs_at_default_clocks(job, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(kinds, "share_profile", fail)
    train(job, [8] * 80)
    assert set(train(job, [8, 4] * 10)[1::2]) == {"observe"}
    assert job.events(OrderPlanned)[-1].given_up == "No space left on device"
    assert job.events(Failed) == []


def test_a_long_schedule_fits_into_a_message(start, monkeypatch):
    job = start(mode="profile", micro_batches=8)
    long, sent = one_f_one_b(ranks=1, micro_batches=2000), []
    assert len(ScheduleStreams.of(long).model_dump_json()) > LONGEST
    job.read_order = lambda *_: long
    add = job.server._kinds.add_schedule
    monkeypatch.setattr(job.server._kinds, "add_schedule", lambda *read: add(*read) or sent.append(encode(read[1])))
    train(job, [8, 4, 4, 4])
    assert job.server._kinds.streams_of(key_of(4)) == long.ranks
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
    assert job.server._kinds.streams_of(key_of(4))


@pytest.fixture
def profiling(job, monkeypatch):
    """Return a job that profiles its second order of four micro-batches."""
    monkeypatch.setattr(kinds, "share_profile", lambda *_: False)
    train(job, [8] * 80)
    while job.runtime.phase != "profile":
        train(job, [4])
    assert job.agent(0)._logged == {1}
    return job


def fail_in(order, monkeypatch):
    """Make the mode of an order fail."""
    advance = kinds.Kind.advance

    def advance_or_fail(kind, seen):
        if kind.context.job.order == order and seen is not None:
            raise GpuError("no counter")
        advance(kind, seen)

    monkeypatch.setattr(kinds.Kind, "advance", advance_or_fail)


def test_an_order_whose_mode_fails_runs_at_default_clocks_and_its_counter_is_not_polled(profiling, monkeypatch):
    fail_in(1, monkeypatch)
    train(profiling, [4] * 3)
    assert set(train(profiling, [4] * 3)) == {"observe"}
    assert not profiling.agent(0)._logged
    assert profiling.events(OrderPlanned)[-1].given_up == "no counter"


def test_no_two_kinds_have_the_same_number_after_many_kinds(job, monkeypatch):
    train(job, [8] * 80 + [4] * 10)
    fail_in(1, monkeypatch)
    train(job, [4])
    job.server._kinds._number = kinds.MOST_NUMBERS
    train(job, [5] * 10)
    numbers = {number for _, _, number in job.server._kinds.orders_for(0).numbers}
    assert numbers == {0, 1, 2}


def test_shapes_of_a_replaced_order_are_replaced_too(start, monkeypatch):
    monkeypatch.setattr(kinds, "MOST_KINDS", 2)
    monkeypatch.setattr(kinds, "UNUSED", 20)
    job = start(mode="auto", micro_batches=2, **SLOWER)
    train(job, [2] * 70 + [3] * 10)
    found = job.server._kinds
    found._ends(found.latest, None)
    train(job, [3] * 10)
    assert {(kind.number, kind.context.job.shape) for kind in found.kinds()} == {(0, 0), (2, 1)}
    train(job, [4] * 40)
    assert {(kind.number, kind.context.job.shape) for kind in found.kinds()} == {(0, 0), (3, 0)}
    assert job.runtime._follows.latest(2).phase == "observe"


def test_a_later_start_finds_plans_for_both_counts_again(job):
    train(job, [8, 4] * 110)
    job.schedule = one_f_one_b(ranks=1, micro_batches=8)  # that of the first iteration
    state = job.restart()
    assert state["progress"]["plan"] is None, "its order is not known"
    assert in_order(train(job, [8, 4] * 110)[::2])[-1] == "run"
