"""How long a clock change of a simulated GPU takes: as measured, and differently towards each clock."""

import random

import numpy as np
import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.device.gpu.lock_latency import LATENCIES
from perseus_ds.device.gpu.simulated import SimulatedGpu

CLOCKS = DEVICES["a100-sxm"].clocks_mhz


def latencies_s(clocks, **settings):
    now = VirtualTime()
    gpu = SimulatedGpu(DEVICES["a100-sxm"], timebase=now, **settings)
    found = []
    for clock_mhz in clocks:
        begin_s = now.now_s()
        gpu.lock_clock(clock_mhz)
        found.append(now.now_s() - begin_s)
    return np.array(found)


def test_it_is_constant_unless_a_distribution_is_chosen():
    assert latencies_s(CLOCKS, lock_latency_s=0.02) == pytest.approx(0.02)


def test_the_v100s_is_as_measured():
    found_s = latencies_s(random.Random(0).choices(CLOCKS, k=5000), lock_latency="v100")
    assert np.percentile(found_s, [50, 95, 99]) == pytest.approx([0.0045, 0.0092, 0.0115], rel=0.1)
    low_s, high_s = (latencies_s([clock] * 1000, lock_latency="v100") for clock in (CLOCKS[0], CLOCKS[-1]))
    assert [np.median(low_s), np.median(high_s)] == pytest.approx([0.0032, 0.0060], rel=0.05)


def test_a_heavy_tail_has_calls_that_take_ten_times_as_long():
    found_s = latencies_s([CLOCKS[-1]] * 5000, lock_latency="heavy-tail")
    assert np.median(found_s) == pytest.approx(0.017, rel=0.05)
    assert np.mean(found_s > 0.1) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("name", LATENCIES)
def test_other_noise_does_not_depend_on_the_latency(name):
    def times_s(**settings):
        now = VirtualTime()
        gpu = SimulatedGpu(DEVICES["a100-sxm"], timebase=now, time_noise=0.1, seed=4, **settings)
        begins_s = []
        for _ in range(5):
            gpu.lock_clock(CLOCKS[-1])
            begins_s.append(now.now_s())
            gpu.begin_work()
            gpu.finish_work(0.1)
            begins_s[-1] = now.now_s() - begins_s[-1]
        return begins_s

    assert times_s(lock_latency=name) == pytest.approx(times_s())
