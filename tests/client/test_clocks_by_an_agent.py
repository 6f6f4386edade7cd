"""Failures while a real agent sets clocks, on the stub of NVML."""

import signal

import pytest
import torch
from one_rank_server import OneRankServer
from run_log import wait_until

from perseus_ds.client.devices import clocks_of
from perseus_ds.client.lease import Lease
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.protocol.job_messages import Program, Report
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, POSITIONS

CPU = torch.device("cpu")


@pytest.fixture
def stub(stub_nvml_here, monkeypatch):
    """GPUs that the agent can also open."""
    for name, value in {**stub_nvml_here.environment, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    return stub_nvml_here


@pytest.fixture
def server():
    with OneRankServer() as server:
        yield server


@pytest.fixture
def start(stub):
    """A function that returns the clocks of another rank."""
    started = []

    def start(gpu=0, server=None):
        started.append(clocks_of(Lease(NvmlGpu(gpu).address), CPU))
        if server is not None:
            started[-1].follow(server.connect)
        return started[-1]

    yield start
    for clocks in started:
        clocks.close()
    wait_until(lambda: not stub.agents(), "the end of the agents")


def iterate(clocks, order, positions=0):
    number = clocks.begin_iteration(order, positions)
    for slot in range(2 * positions):
        clocks.mark(slot)
    clocks.end_iteration(number)
    return number


def is_replaced(clocks):
    """Return True if another agent has replaced a lost one. Checks as between two iterations."""
    clocks.received()
    return clocks._link.is_watched() and clocks._link.grants == 2


def test_the_clock_of_a_rank_that_ends_is_not_kept_for_another_one_on_its_gpu(start, stub, server):
    first, second = start(server=server), start()
    iterate(second, DEFAULT_CLOCKS)
    server.follow(first, Program(0, 1200))
    number = first.begin_iteration(0, 0)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1200, "the first rank's clock")
    first.end_iteration(number)
    first.close()
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 0, "the default clock")
    second.follow(server.connect)
    server.follow(second, Program(0, 1110))
    number = second.begin_iteration(0, 0)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1110, "the second rank's clock")
    second.end_iteration(number)


def refreshes_of(clocks, count):
    """Return the next refreshes of the energy counter, with the GPU drawing power."""
    found = []
    clocks.log_counter(True)
    wait_until(lambda: found.extend(clocks.refreshes()) or len(found) >= count, "refreshes")
    clocks.log_counter(False)
    return found


def test_messages_that_make_no_sense_leave_agent_and_rank_as_they_are(start, stub):
    clocks = start()
    (agent,) = stub.agents()
    clocks.log_counter(False)
    clocks._link._connection.send(b"not a message")
    assert refreshes_of(clocks, 2)
    assert stub.agents() == [agent]


def test_a_client_receives_each_refresh_of_the_counter_once(start, stub):
    stub.gpus[0].counter_period_s = 0.02
    seen = refreshes_of(start(), 5)
    times_s, energies_j = zip(*seen, strict=True)
    assert list(times_s) == sorted(set(times_s))
    assert list(energies_j) == sorted(set(energies_j))


def test_a_counter_that_cannot_be_read_is_an_error_with_its_reason(start, stub):
    stub.gpus[0].fail("energy", "unknown")
    with pytest.raises(GpuError, match="energy"):
        refreshes_of(start(), 1)


def test_a_counter_whose_agent_is_lost_has_no_refreshes_and_training_goes_on(start, stub, server):
    clocks = start(server=server)
    (agent,) = stub.agents()
    agent.kill()
    agent.wait()
    clocks.log_counter(True)
    assert clocks.refreshes() == []
    wait_until(lambda: is_replaced(clocks), "another agent")
    server.follow(clocks, Program(0, 1200))
    number = clocks.begin_iteration(0, 0)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1200, "the clock")
    clocks.end_iteration(number)


def test_an_agent_that_is_lost_in_an_iteration_is_replaced_at_its_end(start, stub, server):
    """The next iteration may begin much later, and the clock may be locked."""
    clocks = start(server=server)
    number = clocks.begin_iteration(0, 0)
    (agent,) = stub.agents()
    agent.kill()
    agent.wait()
    clocks.end_iteration(number)
    wait_until(lambda: stub.agents() not in ([], [agent]), "another agent")
    wait_until(lambda: is_replaced(clocks), "another lease")


@pytest.fixture
def handler():
    """A handler of SIGTERM in this process."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_a_signal_between_two_agents_is_received_by_the_second_one(start, stub, server, handler, capfd):
    """A scheduler may end all processes of a job, among them the agent, and the rank writes its last checkpoint."""
    clocks = start(server=server)
    (agent,) = stub.agents()
    agent.kill()
    agent.wait()
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: is_replaced(clocks), "another agent")
    number = iterate(clocks, DEFAULT_CLOCKS)
    clocks.send(Report(number, 0, -1, 0, time_s=0.1))
    wait_until(lambda: number in server.reports, "a report")
    assert server.reports[number].has_failed, "its clock is not set any more"
    assert handler == [signal.SIGTERM]
    assert "wakeup" not in capfd.readouterr().err, "the interpreter could not write it"


def test_a_gpu_that_cannot_write_marks_any_more_ends_no_iteration(start, stub):
    clocks = start()

    class Broken:
        def fail(self, *_):
            raise GpuError("The GPU cannot write marks: CUDA_ERROR_ILLEGAL_ADDRESS.")

        begin = mark = end = fail

    clocks._marks = Broken()
    number = iterate(clocks, DEFAULT_CLOCKS, positions=3)
    assert str(clocks.mark_error) == "The GPU cannot write marks: CUDA_ERROR_ILLEGAL_ADDRESS."
    assert clocks.begin_iteration(DEFAULT_CLOCKS, 3) == number + 1


def test_a_program_of_as_many_instructions_as_there_are_marks_is_followed(start, stub, server):
    clocks = start(server=server)
    spans_s = tuple((0.001 * n, 0.001 * n + 0.001) for n in range(POSITIONS + 9))
    several = (1200, 1110) * (len(spans_s) // 2)
    server.follow(clocks, Program(0, None, several, spans_s[: len(several)], 9.0))
    number = clocks.begin_iteration(0, len(several))
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1200, "the first clock")
    clocks.mark(0)
    clocks.mark(1)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1110, "the second clock")
    clocks.mark(2 * POSITIONS + 1)
    clocks.end_iteration(number)
