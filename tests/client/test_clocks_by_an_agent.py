"""Clocks that a real agent sets, on the stub of NVML: what does not go as planned."""

import math
import signal

import pytest
import torch
from run_log import wait_until

from perseus_ds.client.devices import clocks_of
from perseus_ds.errors import GpuError
from perseus_ds.gpu.nvml import NvmlGpu
from perseus_ds.protocol.layout import DEFAULT_CLOCKS, POSITIONS
from perseus_ds.protocol.messages import Ask, Program

CPU = torch.device("cpu")


@pytest.fixture
def stub(stub_nvml_here, monkeypatch):
    """GPUs that the agent sees too."""
    for name, value in {**stub_nvml_here.environment, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    return stub_nvml_here


@pytest.fixture
def start(stub):
    """A function that returns the clocks of another rank."""
    started = []

    def start(gpu=0):
        started.append(clocks_of(NvmlGpu(gpu), CPU))
        return started[-1]

    yield start
    for clocks in started:
        clocks.close()
    wait_until(lambda: not stub.agents(), "the end of the agents")


def iterate(clocks, program, positions=0):
    number = clocks.begin_iteration(program)
    for slot in range(2 * positions):
        clocks.mark(slot)
    clocks.end_iteration(number)
    return number


def test_the_clock_of_a_rank_that_ends_is_not_kept_for_another_one_on_its_gpu(start, stub):
    first, second = start(), start()
    iterate(second, DEFAULT_CLOCKS)
    number = first.begin_iteration(first.program(Program(0, 1200)))
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1200, "the first rank's clock")
    first.end_iteration(number)
    first.close()
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 0, "the default clock")
    number = second.begin_iteration(second.program(Program(0, 1110)))
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1110, "the second rank's clock")
    second.end_iteration(number)


def test_messages_that_make_no_sense_leave_agent_and_rank_as_they_are(start, stub):
    clocks = start()
    (agent,) = stub.agents()
    for message in (Ask(97, "refreshes", math.nan), Ask(98, "stop", math.inf), Program(-1, 1200), Program(900, 1200)):
        clocks._link.send(message)
    clocks._link._connection.send(b"not a message")
    assert clocks.probe().answer().number == 1
    assert stub.agents() == [agent]
    clocks._link._inbox.clear()
    clocks._link._receive = lambda: (_ for _ in ()).throw(GpuError("not understood"))
    clocks.poll()


def test_an_answer_that_is_lost_with_its_agent_is_an_error_and_training_goes_on(start, stub):
    clocks = start()
    (agent,) = stub.agents()
    agent.send_signal(signal.SIGSTOP)
    asked = clocks.probe()
    agent.kill()
    wait_until(lambda: clocks.problem is None and clocks.grants == 2, "another agent")
    assert asked.is_over
    assert not asked.has_worked
    assert clocks.probe().answer().error == ""
    number = iterate(clocks, clocks.program(Program(0, 1200)))
    assert clocks.recorded(number, waits=True).energy_j >= 0


def test_an_iteration_whose_agent_is_gone_is_not_waited_for(start, stub):
    clocks = start()
    number = clocks.begin_iteration(DEFAULT_CLOCKS)
    (agent,) = stub.agents()
    agent.kill()
    clocks.end_iteration(number)
    wait_until(lambda: clocks.problem is None and clocks.grants == 2, "another agent")
    assert math.isnan(clocks.recorded(number, waits=True).energy_j)


def test_a_gpu_that_cannot_write_marks_any_more_ends_no_iteration(start, stub):
    clocks = start()
    errors = []
    clocks.on_error = errors.append

    class Broken:
        def fail(self, *_):
            raise GpuError("The GPU cannot write marks: CUDA_ERROR_ILLEGAL_ADDRESS.")

        begin = mark = end = fail

    clocks._marks = Broken()
    number = iterate(clocks, clocks.program(Program(0, 1200)), positions=3)
    assert [str(error) for error in errors] == ["The GPU cannot write marks: CUDA_ERROR_ILLEGAL_ADDRESS."]
    assert math.isnan(clocks.recorded(number, waits=True).energy_j)


def test_a_program_of_as_many_instructions_as_there_are_marks_is_followed(start, stub):
    clocks = start()
    spans_s = tuple((0.001 * n, 0.001 * n + 0.001) for n in range(POSITIONS + 9))
    several = (1200, 1110) * (len(spans_s) // 2)
    program = clocks.program(Program(0, None, several, spans_s[: len(several)], 9.0))
    number = clocks.begin_iteration(program)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1200, "the first clock")
    clocks.mark(0)
    clocks.mark(1)
    wait_until(lambda: stub.locked_clocks_mhz()[0] == 1110, "the second clock")
    clocks.mark(2 * POSITIONS + 1)
    clocks.end_iteration(number)
