"""Operations are timed on the host, on CUDA (with replaced events) and on a simulated GPU."""

import types

import pytest
import torch
from virtual.gpu import RecordingGpu, VirtualCuda, wait_for_event

from perseus_ds.client.timers import CudaExecution, FlopCounter, HostExecution, SimulatedExecution
from perseus_ds.gpu.device_models import DEVICES, MEMORY_BOUND
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange
from perseus_ds.server.phases import most_in_step

FORWARD, BACKWARD, TAIL = (Compute(Instruction(0, kind, 0)) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.TAIL))
A100 = DEVICES["a100-sxm"]


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


class TwoDevices:
    """CUDA with two devices, which records the stream of each event."""

    def __init__(self, current):
        self.current = current
        self.recorded_on = []

    def current_device(self):
        return self.current

    def current_stream(self, device):
        return f"current stream of device {device}"

    def Event(self, *, enable_timing):  # noqa: N802
        def record(stream=None):
            self.recorded_on.append(stream or self.current_stream(self.current))

        return types.SimpleNamespace(record=record)


@pytest.mark.parametrize("current", [0, 1])
def test_events_are_recorded_on_the_stream_of_the_ranks_device_whichever_is_current(now, current):
    cuda = TwoDevices(current)
    execution = CudaExecution(torch.device("cuda:1"), cuda)
    execution.start_iteration()
    execution.end(execution.begin(FORWARD) and FORWARD)
    assert len(cuda.recorded_on) == 3
    assert set(cuda.recorded_on) == {"current stream of device 1"}


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", timebase=now)


def test_simulated_passes_take_as_long_as_the_gpus_clock_makes_them(now, gpu):
    execution = SimulatedExecution(gpu, transfer_s=0.01, tail_s=0.5, timebase=now)
    gpu.lock_clock(705)
    weights = torch.ones(8, 8)

    def iteration():
        execution.start_iteration()
        for operation in (FORWARD, Exchange(), TAIL, TAIL):
            execution.begin(operation)
            if operation is FORWARD:
                weights @ weights
            execution.end(operation)
        return [span.time_s for span in execution.finish_iteration().spans()]

    assert iteration() == [0.0, 0.0, 0.0, 0.0], "times are not scaled before the calibration"
    (flops,) = execution.flops.values()
    assert flops == 2 * 8**3
    execution.calibrate(0.1 / flops)
    forward_s, tail_s = 0.1 * A100.slowdown(705), 0.5 * A100.slowdown(705, MEMORY_BOUND)
    assert iteration() == [pytest.approx(forward_s), pytest.approx(0.01), pytest.approx(tail_s), 0.0]
    (key,) = execution.flops
    other = {key: 2 * flops, "a pass of another stage": 100 * flops}
    execution.calibrate(0.1 / flops, most_in_step([0, 0, 1], [execution.flops, other, {key: 50 * flops}])[0])
    assert iteration()[0] == pytest.approx(2 * forward_s), "as long as on the busiest rank of its stage"


def test_work_is_counted_for_each_shape_of_the_inputs(now, gpu):
    execution = SimulatedExecution(gpu, timebase=now)
    gpu.lock_clock(705)

    def forward_s(rows):
        execution.start_iteration()
        execution.input_shapes = (rows, 8)
        execution.begin(FORWARD)
        torch.ones(rows, 8) @ torch.ones(8, 8)
        execution.end(FORWARD)
        return execution.finish_iteration().spans()[0].time_s

    forward_s(4)
    execution.calibrate(0.1 / max(execution.flops.values()))
    short_s = forward_s(4)
    assert short_s >= 0.1
    assert forward_s(12) == pytest.approx(3 * short_s)
    assert forward_s(4) == pytest.approx(short_s)


def test_counting_lets_torch_compile_compile(now, gpu):
    """A function that is first called where frames cannot compile would never be compiled."""
    torch._dynamo.reset()
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda left, right: (left @ right).relu(), backend=backend)
    execution = SimulatedExecution(gpu, timebase=now)
    execution.start_iteration()
    execution.begin(FORWARD)
    function(torch.ones(8, 8), torch.ones(8, 8))
    execution.end(FORWARD)
    assert len(compiled) == 1
    assert list(execution.flops.values()) == [2 * 8**3]


def test_attention_on_the_processor_is_work_as_on_a_gpu():
    batch, heads, tokens, width = 2, 3, 8, 16
    query, key, value = (torch.randn(batch, heads, tokens, width, requires_grad=True) for _ in range(3))
    with FlopCounter() as forward:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with FlopCounter() as backward:
        out.sum().backward()
    product = 2 * batch * heads * tokens * tokens * width
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)  # the backward recomputes the scores
