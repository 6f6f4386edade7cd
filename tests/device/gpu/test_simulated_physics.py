"""The simulated GPU in a time of the test's own: clocks, power limit, energy."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import stage_profile
from virtual_time import VirtualTime

from perseus_ds.device.gpu.device_models import DEVICES, MEMORY_BOUND
from perseus_ds.device.gpu.simulated import SimulatedGpu


def test_energy_is_power_over_time_and_read_as_the_counter_was_last_refreshed():
    now = VirtualTime()
    gpu = SimulatedGpu(DEVICES["a100-sxm"], lock_latency_s=0, timebase=now)
    now.seconds = 101.25
    begin_j = gpu.energy_j()
    now.seconds = 101.29
    assert gpu.energy_j() == begin_j
    now.seconds = 102.25
    assert gpu.energy_j() - begin_j == pytest.approx(83.64, abs=0.002)
    gpu.begin_work()
    now.seconds = 103.25
    assert gpu.energy_j() - begin_j == pytest.approx(83.64 + 83.64 * 0.05 + 475.0 * 0.95, rel=1e-3)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_lower_clock_is_slower_and_draws_less_until_the_power_limit_flattens_both(name):
    model = DEVICES[name]
    slowdowns = [model.slowdown(c) for c in model.clocks_mhz]
    powers = [model.power_w(c) for c in model.clocks_mhz]
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert powers == sorted(powers)
    assert powers[-1] == pytest.approx(model.power_limit_w)
    assert slowdowns[-1] == slowdowns[-2]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_work_bound_by_memory_depends_less_on_the_clock(name):
    model = DEVICES[name]
    half = model.clocks_mhz[-1] // 2
    assert 1 < model.slowdown(half, MEMORY_BOUND) < model.slowdown(half)
    assert model.blocking_power_w < model.power_w(half, MEMORY_BOUND) < model.power_w(half)


@pytest.mark.parametrize("name", ["a100-sxm", "a40"])
def test_the_device_model_follows_the_published_measurements(name):
    with stage_profile(name).open() as file:
        rows = [r for r in csv.DictReader(file) if r["stage"] == "0" and r["instruction"] == "forward"]
    model = DEVICES[name]
    top_s = float(rows[0]["time"]) / model.slowdown(int(rows[0]["frequency"]))
    for row in rows:
        clock, time_s, energy_j = int(row["frequency"]), float(row["time"]), float(row["energy"])
        assert top_s * model.slowdown(clock) == pytest.approx(time_s, rel=0.02)
        assert model.power_w(clock) == pytest.approx(energy_j / time_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "clock_mhz", "power_w"),
    [
        ("h100-sxm", 345, 140.7),
        ("h100-sxm", 945, 273.2),
        ("h100-sxm", 1305, 461.3),
        ("h200", 345, 161.2),
        ("h200", 945, 303.1),
        ("h200", 1350, 528.6),
    ],
)
def test_power_at_locked_clocks_is_as_measured_under_matrix_multiplication(name, clock_mhz, power_w):
    """Source: github.com/AyeshaAfzal91/GPU-Energy-Sweetspot, commit 242d142."""
    assert DEVICES[name].power_w(clock_mhz) == pytest.approx(power_w, rel=0.025)


@given(st.sampled_from(sorted(DEVICES)), st.integers(0, 60))
def test_work_takes_as_long_as_its_clock_allows(name, step):
    model = DEVICES[name]
    now = VirtualTime()
    gpu = SimulatedGpu(model, lock_latency_s=0, timebase=now)
    clock = model.clocks_mhz[step]
    gpu.lock_clock(clock)
    gpu.begin_work()
    needed_s = 0.5 * model.slowdown(clock)
    now.seconds += needed_s * 1.0001
    gpu.finish_work(0.5)  # returns at once: the time is over
    assert gpu.power_w() == model.blocking_power_w


def test_a_clock_change_counts_from_the_moment_it_is_in_effect():
    model = DEVICES["a100-sxm"]
    now = VirtualTime()
    gpu = SimulatedGpu(model, lock_latency_s=0, timebase=now)
    gpu.begin_work()
    now.seconds += 0.25 * model.slowdown(1410)
    gpu.lock_clock(705)
    now.seconds += 0.25 * model.slowdown(705) * 1.0001
    gpu.finish_work(0.5)
    assert gpu.power_w() == model.blocking_power_w
