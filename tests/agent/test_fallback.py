"""A rank falls back to default clocks when its driver fails, and runs programs again when it works."""

from itertools import pairwise

import pytest
from virtual.agent import clocks_of
from virtual.gpu import FaultyGpu

from perseus_ds.errors import GpuError
from perseus_ds.protocol.job_messages import Follow, Program, RankFailed, RankRecovered, RankReport, Report, Say

AFTER_PROBES_S = 200.0
"""Longer than the interval between two probes of the driver."""


@pytest.fixture
def gpu(now):
    return FaultyGpu.named("a100-sxm", timebase=now)


@pytest.fixture
def clocks(gpu, now, told):
    made = clocks_of(gpu, now, tell=told.append)
    program = Program(0, 1110)
    made._link.agent.receive_from_server(Follow(program, serial=1, from_iteration=0, shown_from=0, phase="run"))
    yield made
    made.close()


@pytest.fixture
def train(clocks, now, agent):
    """A function that runs iterations for some time, and calls ``update()`` as the agent's loop does."""

    def train(seconds, each_s=1.0):
        for _ in range(round(seconds / each_s)):
            number = clocks.begin_iteration(0, 0)
            now.sleep(each_s)
            clocks.end_iteration(number)
            agent.update()

    return train


def fail(agent, error):
    def call():
        raise error

    agent._actor.call(call)


def follow(agent, clock_mhz):
    agent.receive_from_server(Follow(Program(0, clock_mhz), serial=2, from_iteration=0, shown_from=0, phase="run"))


def failures(told):
    return [message for message in told if isinstance(message, RankFailed | RankRecovered)]


@pytest.mark.parametrize("fault", ["driver error", "driver hangs", "driver busy"])
def test_a_rank_falls_back_by_any_fault_and_runs_its_program_again_when_the_driver_works(
    train, agent, gpu, told, fault
):
    train(5)
    assert gpu.locked_clock_mhz == 1110
    gpu.begin(fault)
    follow(agent, 1200)
    train(20)
    assert agent._actor.health.has_failed
    assert gpu.is_at_default_clock or fault == "driver hangs"
    assert [type(message) for message in failures(told)] == [RankFailed]
    gpu.end()
    train(AFTER_PROBES_S, each_s=5.0)
    assert not agent._actor.health.has_failed
    assert gpu.locked_clock_mhz == 1200


def test_that_it_works_again_is_told_once_it_has_for_long(train, gpu, told):
    gpu.begin("driver error")
    train(20)
    gpu.end()
    train(AFTER_PROBES_S, each_s=5.0)
    assert [type(message) for message in failures(told)] == [RankFailed]
    train(300, each_s=5.0)
    assert [type(message) for message in failures(told)] == [RankFailed, RankRecovered]


def test_a_fault_that_comes_back_soon_is_not_told_again_and_one_of_another_kind_is(train, agent, gpu, told):
    for clock_mhz in (1200, 1110, 1200):
        gpu.begin("driver error")
        follow(agent, clock_mhz)
        train(20)
        gpu.end()
        train(AFTER_PROBES_S, each_s=5.0)
    assert len(failures(told)) == 1
    agent._actor.call(lambda: 1 / 0)
    train(2)
    assert [message.error for message in failures(told)][1:] == ["division by zero"]


@pytest.mark.parametrize("errors", [["a mistake"], ["a fault", "a mistake"]])
def test_a_mistake_stays_even_if_it_comes_while_the_rank_has_fallen_back(train, agent, gpu, errors):
    for text in errors:
        fail(agent, ValueError(text) if text == "a mistake" else GpuError(text))
        train(1)
    train(AFTER_PROBES_S, each_s=5.0)
    assert agent._actor.health.has_failed
    assert gpu.is_at_default_clock


def test_a_driver_that_fails_for_hours_is_probed_once_a_minute(train, agent, gpu, monkeypatch, now):
    probes = []
    monkeypatch.setattr(agent._actor, "_probe", lambda epoch: probes.append(now.now_s()))
    fail(agent, GpuError("the GPU is lost"))
    train(364)
    gaps = [after - before for before, after in pairwise(probes)]
    assert gaps[:6] == pytest.approx([2, 4, 8, 16, 32, 60])
    assert set(map(round, gaps[6:])) == {60}


def test_an_iteration_whose_clock_was_refused_is_known_to_have_run_no_program(clocks, agent, gpu, now, told):
    """The driver works again before the client reports the iteration."""

    def iterate():
        number = clocks.begin_iteration(0, 0)
        now.sleep(1.0)
        clocks.end_iteration(number)
        agent.update()
        return number

    for busy in (False, True, False):
        if busy:
            agent.receive_from_server(Follow(Program(0, 1200), serial=2, from_iteration=0, shown_from=0, phase="run"))
            gpu.begin("driver busy")
        number = iterate()
        gpu.end()
        now.sleep(1.0)
        clocks.send(Report(number, 0, agent.timeline.serial_of(number), 0, 1.0))
        agent.update()
    reports = [message for message in told if isinstance(message, RankReport)]
    assert [report.serial for report in reports] == [1, -1, 2]
    assert not any(report.has_failed for report in reports)


def test_a_counter_that_fails_leaves_the_clock_as_it_is_and_is_told_once(clocks, train, agent, gpu, told):
    train(5)
    for _ in range(2):
        gpu.begin("counter fails")
        train(20)
        assert gpu.locked_clock_mhz == 1110
        follow(agent, 1200)
        train(2)
        assert gpu.locked_clock_mhz == 1200
        follow(agent, 1110)
        gpu.end()
        train(3)
    assert failures(told) == []
    said = [message.text for message in clocks.received() if isinstance(message, Say)]
    assert len(said) == 2
    assert "Reading the energy counter failed: unknown error (code 999)" in said[0]
    assert agent._actor.read_energy_j() > 0
