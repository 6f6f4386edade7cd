"""Operations are timed on the host and on CUDA (with replaced events)."""

import pytest
import torch
from virtual.cuda import VirtualCuda, wait_for_event

from perseus_ds.client.timers import CudaExecution, HostExecution
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

FORWARD, BACKWARD = (Compute(Instruction(0, kind, 0)) for kind in (Kind.FORWARD, Kind.BACKWARD))


@pytest.fixture
def cuda(now):
    return VirtualCuda(now, device=3)


@pytest.fixture
def on_cuda(now, cuda):
    return CudaExecution(torch.device("cuda"), cuda, wait_for_event)


def launch(execution, cuda, operation, seconds):
    begun = execution.begin(operation)
    cuda.launch(seconds)
    return begun, execution.end(operation)


def times(execution):
    spans = execution.finish_iteration().spans()
    return [(span.operation, pytest.approx(span.start_s), pytest.approx(span.end_s)) for span in spans]


def test_host_operations_count_from_the_iterations_start(now):
    execution = HostExecution(now)
    now.sleep(5.0)
    execution.start_iteration()
    now.sleep(0.5)
    execution.begin(FORWARD)
    now.sleep(1.0)
    execution.end(FORWARD)
    now.sleep(0.25)
    assert execution.finish_iteration().time_s() == pytest.approx(1.75)
    assert times(execution) == [(FORWARD, 0.5, 1.5)]
    execution.start_iteration()
    assert execution.finish_iteration().spans() == []


def test_cuda_times_count_from_the_iterations_start_on_the_device(now, cuda, on_cuda):
    execution = on_cuda
    cuda.launch(0.5)  # of the previous iteration
    execution.start_iteration()
    launch(execution, cuda, FORWARD, 0.1)
    now.sleep(2.0)
    launch(execution, cuda, BACKWARD, 0.2)
    cuda.launch(0.3)
    assert times(execution) == [(FORWARD, 0.0, 0.1), (BACKWARD, 1.5, 1.7)]
    assert execution.finish_iteration().time_s() == pytest.approx(2.0)
    execution.start_iteration()
    assert execution.finish_iteration().spans() == []


def test_an_iteration_is_ended_without_waiting_and_read_while_the_next_one_runs(now, cuda, on_cuda):
    begin_s = now.now_s()
    on_cuda.start_iteration()
    launch(on_cuda, cuda, FORWARD, 0.3)
    first = on_cuda.finish_iteration()
    begun = on_cuda.start_iteration()
    launch(on_cuda, cuda, BACKWARD, 0.5)
    second = on_cuda.finish_iteration()
    assert now.now_s() == begin_s
    assert not first.is_over()
    begun.synchronize()
    now.sleep(0.1)
    assert (first.is_over(), second.is_over()) == (True, False)
    assert first.time_s() == pytest.approx(0.3)
    assert [span.operation for span in first.spans()] == [FORWARD]
    assert now.now_s() == pytest.approx(begin_s + 0.4), "reading does not wait"
    assert second.time_s() == pytest.approx(0.5)


def test_no_event_is_a_blocking_one_because_the_driver_takes_few_launches_after_them(cuda, on_cuda):
    on_cuda.start_iteration()
    launch(on_cuda, cuda, FORWARD, 0.1)
    on_cuda.finish_iteration().spans()
    assert cuda.events > 0
    assert cuda.blocking_events == 0


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
def test_times_are_those_of_the_ranks_device_whichever_is_current(now, before, current):
    cuda = VirtualCuda(now, device=before)
    execution = CudaExecution(torch.device("cuda", 1), cuda, wait_for_event)
    cuda.device = current
    execution.start_iteration()
    execution.begin(FORWARD)
    cuda.current_stream(0).launch(0.1)
    cuda.current_stream(1).launch(0.3)
    execution.end(FORWARD)
    assert times(execution) == [(FORWARD, 0.0, 0.3)]
