"""Plans for alternating and growing numbers of micro-batches, which share one profile."""

import statistics

import pytest
from pipelines import one_f_one_b
from virtual.gpu import AveragingGpu
from virtual.job import SLOWER, WorkerAtOnce, in_order

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
from perseus_ds.protocol.messages import LONGEST, encode
from perseus_ds.server import kinds
from perseus_ds.server.under_plans import PlanRunner


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


def test_counts_that_alternate_each_get_a_plan_for_one_profile_and_a_later_start_finds_both(job):
    counts = [4, 2] * 100
    phases = train(job, counts)
    assert phases[-2:] == ["run", "run"]
    assert len(job.events(ProfileWritten)) == 1, "passes are the same"
    (planned,) = job.events(OrderPlanned)
    assert (planned.micro_batches, planned.shares_profile) == (2, True)
    assert sorted((event.order, event.kept) for event in job.events(PlanJudged)) == [(0, True), (1, True)]
    records = job.events(IterationRecord)
    for order, count in ((None, 4), (1, 2)):
        mine = of_count(records, counts[: len(records)], count)[-10:]
        assert {(record.order, record.phase) for record in mine} == {(order, "run")}
        assert mine[-1].time_s == pytest.approx(mine[-1].predicted_time_s, rel=0.02)
        assert sum(record.energy_j for record in mine) < 0.95 * sum(record.default_energy_j for record in mine)
        folder = job.folder / "orders" / "1" if order else job.folder
        assert Frontier.load(folder).provenance.micro_batches == count
        assert StageProfile.load(folder).info.micro_batches == count
    assert job.read == 1
    job.schedule = one_f_one_b(ranks=1, micro_batches=4)  # that of the first iteration
    assert job.restart()["progress"]["plan"] is None, "its order is not known"
    assert in_order(train(job, [4, 2] * 30)[::2])[-1] == "run"


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
    assert {record.order for record in records if record.phase == "profile"} == {None, 255}
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


def test_times_of_orders_are_compared_at_default_clocks_if_only_one_runs_under_a_plan(job):
    train(job, [4] * 70)
    train(job, [4, 3] * 4)
    times = job.server.control.kind_times
    passes_s = sum(job.work_s[0][kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
    tail_s = job.work_s[0][Kind.TAIL]
    expected = (3 * passes_s + tail_s) / (4 * passes_s + tail_s)
    assert times.relative(255) / times.relative(0) == pytest.approx(expected, rel=0.03)


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


def test_an_order_that_comes_seldom_runs_at_default_clocks_and_leaves_nothing(job, capsys):
    train(job, [4] * 70)
    assert "differ in their number" not in capsys.readouterr().out
    assert train(job, [3, 4, 5, 4, 4, 6]) == ["observe", "run", "observe", "run", "run", "observe"]
    records = job.close()
    assert [record.order for record in records[-6:]] == [255, None, 255, None, None, 255]
    assert [record.plan is None for record in records[-6:]] == [True, False, True, False, False, True]
    assert capsys.readouterr().out.count("differ in their number of micro-batches") == 1
    assert not (job.folder / "orders").exists()
    assert job.read == 0


def test_an_order_that_is_used_no_more_makes_room_for_another(start, monkeypatch):
    """A long ramp of the batch size, in which the first order stays."""
    monkeypatch.setattr(kinds, "_MOST_KINDS", 2)
    monkeypatch.setattr(kinds, "_UNUSED", 20)
    job = start(mode="auto", micro_batches=2, **SLOWER)
    train(job, [2] * 50 + [3] * 15 + [4] * 12)
    assert [event.micro_batches for event in job.events(OrderPlanned)] == [3]
    train(job, [4] * 40)
    assert [event.micro_batches for event in job.events(OrderPlanned)] == [3, 4]
    assert job.close()[-1].phase in ("run", "default")
    assert job.runtime._follows.latest(1).phase == "observe", "the replaced order"


def test_after_a_fault_the_job_begins_again_with_the_order_of_its_schedule(job, monkeypatch):
    train(job, [4] * 70)

    def fail(*_, **__):
        raise GpuError("the driver is gone for a moment")

    with monkeypatch.context() as broken:
        broken.setattr(PlanRunner, "_add_iteration", fail)
        train(job, [4])
    counts = [2] * 30 + [4] * 60
    train(job, counts)
    records = job.close()[-90:]
    assert {record.order for record in of_count(records, counts, 2)} <= {None, 1, 255}
    assert all(record.phase == "observe" for record in of_count(records, counts, 2) if record.order is None)
    assert records[-1].phase == "run"
    assert records[-1].order is None
    assert Frontier.load(job.folder).provenance.micro_batches == 4


@pytest.mark.parametrize("phase", ["warm-up", "profile"])
def test_a_first_count_that_is_left_before_its_profile_is_done_keeps_no_other_from_a_plan(start, phase):
    job = start(mode="auto", micro_batches=2, **SLOWER)
    job.train_until(phase)
    train(job, [2] + [4] * 80)
    assert job.close()[-1].phase in ("run", "default")
    (planned,) = job.events(OrderPlanned)
    assert planned.micro_batches == 4
    assert planned.shares_profile is (phase == "profile"), "iterations of all counts are measured"
    (profiled,) = job.events(ProfileWritten)
    assert profiled.order == (0 if phase == "profile" else 1)


def test_in_run_mode_the_plan_runs_whenever_the_count_is_the_one_it_was_made_for(start, frontier, capsys):
    job = start(mode="run", frontier=frontier)
    phases = train(job, [3, 5, 3, 3, 5, 3])
    records = job.close()
    assert [phase == "observe" for phase in phases] == [False, True, False, False, True, False]
    assert [record.plan is None for record in records[-6:]][1::3] == [True, True]
    assert "the plans are for one number" in capsys.readouterr().out


def fail_to_read(rank, schedule):
    raise ScheduleError("the passes have no order")


@pytest.mark.parametrize("is_read", [False, True], ids=["its schedule cannot be read", "planning fails"])
def test_an_order_that_cannot_be_planned_runs_at_default_clocks_and_the_first_goes_on(job, monkeypatch, is_read):
    train(job, [4] * 70)
    job.read_order = job.read_order if is_read else fail_to_read
    monkeypatch.setattr(WorkerAtOnce, "error", "the passes have no order")
    phases = train(job, [4, 2] * 20)
    job.close()
    assert (set(phases[-20::2]), set(phases[-19::2])) == ({"run"}, {"observe"})
    assert "no order" in job.events(OrderPlanned)[-1].given_up
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
