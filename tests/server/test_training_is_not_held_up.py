"""Asynchronous iterations, in virtual time: training waits neither for the device nor for other ranks."""

import itertools

import pytest
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.run_events import Failed
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.protocol.job_messages import RankReport


@pytest.fixture
def job(tmp_path):
    made = VirtualJob(tmp_path, cuda=True, mode="observe")
    yield made
    made.close()


def test_an_iteration_ends_when_all_is_launched_and_is_measured_as_the_device_ran_it(job):
    begin_s = job.time.now_s()
    job.train(1)
    assert job.time.now_s() == begin_s, "the device must not have run any of it yet"
    job.train(9)
    host_s = job.time.now_s() - begin_s
    begin_j = job.gpu.energy_j()
    records = job.close()
    device_s = job.time.now_s() - begin_s
    model = job.gpu.model
    for record in records:
        assert record.time_s == pytest.approx(3 * 0.3 * model.slowdown(model.top_clock_mhz), rel=0.06)
    assert sum(record.time_s for record in records) == pytest.approx(device_s, abs=0.003)
    assert host_s == pytest.approx(device_s - records[-1].time_s, abs=0.003), "the host is an iteration ahead"
    # Energy is read when the device begins and ends an iteration. The counter is refreshed every 0.1 s.
    assert sum(record.energy_j for record in records) == pytest.approx(job.gpu.energy_j(), abs=0.1 * 400)
    assert begin_j < job.gpu.energy_j()


def test_a_report_is_sent_once_the_device_is_done_with_its_iteration(job, monkeypatch):
    sent, receive = [], job.server.receive

    def note(rank, message):
        if isinstance(message, RankReport):
            sent.append(job.time.now_s())
        receive(rank, message)

    monkeypatch.setattr(job.server, "receive", note)
    begin_s = job.time.now_s()
    job.train(1)
    assert sent == []
    with job.runtime.iteration():
        for number, instruction in enumerate(job.schedule.instructions[0]):
            with job.runtime.instruction(instruction):
                job.time.sleep(0.2)  # the host is slower than the device
            assert bool(sent) is (number >= 5), "must be sent at an operation, and only there"
    assert sent == [pytest.approx(begin_s + 1.0)]


def test_after_warm_up_iterations_create_no_events(start, frontier):
    job = start("pooled", cuda=True, mode="run", frontier=frontier, **SLOWER)
    job.train(40)
    created = job.cuda.events
    job.train(40)
    assert job.cuda.events == created
    assert len(job.close()) == 80


def test_a_job_that_ends_while_the_device_hangs_waits_two_seconds_for_its_last_iteration(job):
    job.train(2)
    job.cuda.enqueue(lambda: job.time.sleep(1e6))
    job.train(1)
    begin_s = job.time.now_s()
    job.runtime.close()
    assert job.time.now_s() - begin_s == pytest.approx(2.0, abs=0.01)


def test_a_host_that_is_four_seconds_ahead_of_the_device_does_not_take_the_driver_for_silent(start, frontier):
    work_s = {Kind.FORWARD: 0.5, Kind.BACKWARD: 1.0, Kind.TAIL: 0.01}
    job = start(cuda=True, mode="run", frontier=frontier, work_s=work_s, **SLOWER)
    job.train(20)
    job.close()
    assert job.events(Failed) == []


def test_time_that_the_host_takes_while_the_device_computes_is_no_part_of_a_comparison(start):
    job = start(cuda=True, mode="auto", **SLOWER)
    work, forwards = job.work, itertools.count()

    def work_after_host(rank, instruction):
        if instruction.kind is Kind.FORWARD and next(forwards) % 3 == 0:
            job.time.sleep(0.03)
        work(rank, instruction)

    job.work = work_after_host
    (judged,) = job.train_until_compared()
    assert judged.kept
    assert judged.trial.slowdown == pytest.approx(judged.promised_slowdown, abs=0.003)
