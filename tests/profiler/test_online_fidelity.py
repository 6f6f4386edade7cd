"""Online rows compared with the model of simulated GPUs, in virtual time."""

import numpy as np
import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.device_models import COMPUTE_BOUND, DEVICES, MEMORY_BOUND
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.timers import Span
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.profiler.online import OnlineProfiler

WORKLOAD = {Kind.FORWARD: COMPUTE_BOUND, Kind.BACKWARD: COMPUTE_BOUND, Kind.TAIL: MEMORY_BOUND}


def run_iteration(gpu, now, rng, work_s, micro_batches):
    """Run instructions with waits between; return the spans and the refreshes of the counter, seen up to 2 ms late."""
    spans, readings = [], []

    def pass_time(seconds):
        end_s = now.seconds + seconds
        while (refresh_s := (np.floor(now.seconds / 0.1 + 1e-9) + 1) * 0.1) < end_s:
            now.seconds = refresh_s + 1e-6
            readings.append((now.seconds + rng.uniform(0, 0.002), gpu.energy_j()))
        now.seconds = end_s

    def run(kind, micro_batch):
        begin_s, clock_mhz = now.seconds, gpu.clock_mhz()
        gpu.begin_work(WORKLOAD[kind])
        time_s = work_s[kind] * (1 + 0.01 * rng.standard_normal())
        pass_time(time_s * gpu.model.slowdown(clock_mhz, WORKLOAD[kind]))
        gpu.finish_work(0.0)
        spans.append(Span(Compute(Instruction(0, kind, micro_batch)), begin_s, now.seconds))

    for micro_batch in range(micro_batches):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            pass_time(rng.uniform(0, work_s[Kind.FORWARD]))
            run(kind, micro_batch)
    run(Kind.TAIL, 0)
    return spans, readings


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("forward_s", [0.02, 0.05, 0.2])
def test_rows_agree_with_the_simulated_gpu(forward_s, seed):
    model = DEVICES["a100-sxm"]
    now, rng = VirtualTime(), np.random.default_rng(seed)
    gpu = SimulatedGpu(model, lock_latency_s=0.015, power_noise=0.02, timebase=now, seed=seed)
    work_s = {Kind.FORWARD: forward_s, Kind.BACKWARD: 2 * forward_s, Kind.TAIL: 2 * forward_s}
    profiler = OnlineProfiler(model.blocking_power_w)
    clocks = model.clocks_mhz[::-8][:6]
    for clock in clocks:
        gpu.lock_clock(clock)
        for _ in range(2):
            spans, readings = run_iteration(gpu, now, rng, work_s, micro_batches=8)
            profiler.add(clock, [spans], readings)
    rows = [row.measurement for row in profiler.rows()]
    assert len(rows) == 3 * len(clocks)
    for row in rows:
        time_s = work_s[row.kind] * model.slowdown(row.clock_mhz, WORKLOAD[row.kind])
        power_w = model.power_w(row.clock_mhz, WORKLOAD[row.kind])
        # There is one tail an iteration, so its rows have the largest errors.
        is_tail = row.kind is Kind.TAIL
        assert row.time_s == pytest.approx(time_s, rel=0.03 if is_tail else 0.02)
        assert row.energy_j == pytest.approx(time_s * power_w, rel=0.15 if is_tail else 0.04)
