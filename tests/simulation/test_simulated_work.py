"""Operations on a simulated GPU take the time that its clock gives them, whether they are timed or not."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from virtual.gpu import RecordingGpu

from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Exchange
from perseus_ds.server.phases import most_in_step
from perseus_ds.simulation.device_models import DEVICES, MEMORY_BOUND
from perseus_ds.simulation.work import FlopCounter, SimulatedWork

FORWARD, TAIL = (Compute(Instruction(0, kind, 0)) for kind in (Kind.FORWARD, Kind.TAIL))
A100 = DEVICES["a100-sxm"]


@pytest.fixture
def gpu(now):
    return RecordingGpu.named("a100-sxm", timebase=now)


def time_of(now, work, operation, compute=lambda: None, inputs=None):
    begin_s = now.now_s()
    with work.within(nullcontext(), operation, inputs):
        compute()
    return now.now_s() - begin_s


def test_simulated_passes_take_as_long_as_the_gpus_clock_makes_them(now, gpu):
    work = SimulatedWork(gpu, transfer_s=0.01, tail_s=0.5, timebase=now)
    gpu.lock_clock(705)
    weights = torch.ones(8, 8)

    def iteration():
        passes = {FORWARD: lambda: weights @ weights}
        operations = FORWARD, Exchange(), TAIL, TAIL
        return [time_of(now, work, operation, passes.get(operation, lambda: None)) for operation in operations]

    assert iteration() == [0.0, 0.0, 0.0, 0.0], "times are not scaled before the calibration"
    (flops,) = work.flops.values()
    assert flops == 2 * 8**3
    work.calibrate(0.1 / flops)
    forward_s, tail_s = 0.1 * A100.slowdown(705), 0.5 * A100.slowdown(705, MEMORY_BOUND)
    for _ in range(2):
        assert iteration() == [pytest.approx(forward_s), pytest.approx(0.01), pytest.approx(tail_s), 0.0]
    (key,) = work.flops
    other = {key: 2 * flops, "a pass of another stage": 100 * flops}
    work.calibrate(0.1 / flops, most_in_step([0, 0, 1], [work.flops, other, {key: 50 * flops}])[0])
    assert iteration()[0] == pytest.approx(2 * forward_s), "as long as on the busiest rank of its stage"


@pytest.fixture
def waits_for_a_second(monkeypatch, now):
    """A function that waits for other ranks for a second, as a collective does."""
    monkeypatch.setattr(dist.Work, "wait", lambda work: now.sleep(1.0))
    return lambda: dist.Work.wait(None)


def test_a_pass_that_waits_for_other_ranks_does_no_work_meanwhile(now, gpu, waits_for_a_second):
    work = SimulatedWork(gpu, timebase=now)
    weights = torch.ones(8, 8)

    def forward():
        weights @ weights
        waits_for_a_second()
        weights @ weights

    time_of(now, work, FORWARD, forward)
    work.calibrate(0.1 / next(iter(work.flops.values())))
    begin_j = gpu.true_energy_j
    assert time_of(now, work, FORWARD, forward) == pytest.approx(1.0 + 0.1 * A100.slowdown(1410))
    busy_w = A100.power_w(A100.reached_clock_mhz(A100.top_clock_mhz))
    assert gpu.true_energy_j - begin_j == pytest.approx(
        0.1 * A100.slowdown(1410) * busy_w + 1.0 * A100.blocking_power_w, rel=0.01
    )


def test_work_is_counted_for_each_shape_of_the_inputs(now, gpu):
    work = SimulatedWork(gpu, timebase=now)
    gpu.lock_clock(705)

    def forward_s(rows):
        return time_of(now, work, FORWARD, lambda: torch.ones(rows, 8) @ torch.ones(8, 8), (rows, 8))

    forward_s(4)
    work.calibrate(0.1 / max(work.flops.values()))
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
    work = SimulatedWork(gpu, timebase=now)
    time_of(now, work, FORWARD, lambda: function(torch.ones(8, 8), torch.ones(8, 8)))
    assert len(compiled) == 1
    assert list(work.flops.values()) == [2 * 8**3]


def test_attention_on_the_processor_is_work_as_on_a_gpu():
    batch, heads, tokens, width = 2, 3, 8, 16
    query, key, value = (torch.randn(batch, heads, tokens, width, requires_grad=True) for _ in range(3))
    with FlopCounter() as forward:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with FlopCounter() as backward:
        out.sum().backward()
    product = 2 * batch * heads * tokens * tokens * width
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)  # the backward recomputes the scores
