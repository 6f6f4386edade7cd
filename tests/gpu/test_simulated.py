"""The simulated GPU in virtual time: clocks, power limit, energy, latency, adverse conditions."""

import csv
import os
import random
import tempfile

import numpy as np
import pytest
from profiles import stage_profile
from virtual.gpu import OneAtATime
from virtual.time import VirtualTime

from perseus_ds.errors import GpuError
from perseus_ds.gpu.device_models import DEVICES, MEMORY_BOUND
from perseus_ds.gpu.simulated import SimulatedGpu, turn_on_node

A100 = DEVICES["a100-sxm"]


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


def latencies_s(clocks, **settings):
    now = VirtualTime()
    gpu = SimulatedGpu(A100, timebase=now, **settings)
    found = []
    for clock_mhz in clocks:
        begin_s = now.now_s()
        gpu.lock_clock(clock_mhz)
        found.append(now.now_s() - begin_s)
    return np.array(found)


def test_the_v100s_is_as_measured():
    found_s = latencies_s(random.Random(0).choices(A100.clocks_mhz, k=5000), lock_latency="v100")
    assert np.percentile(found_s, [50, 95, 99]) == pytest.approx([0.0045, 0.0092, 0.0115], rel=0.1)
    low_s, high_s = (
        latencies_s([clock] * 1000, lock_latency="v100") for clock in (A100.clocks_mhz[0], A100.clocks_mhz[-1])
    )
    assert [np.median(low_s), np.median(high_s)] == pytest.approx([0.0032, 0.0060], rel=0.05)


def test_a_heavy_tail_has_calls_that_take_ten_times_as_long():
    found_s = latencies_s([A100.clocks_mhz[-1]] * 5000, lock_latency="heavy-tail")
    assert np.median(found_s) == pytest.approx(0.017, rel=0.05)
    assert np.mean(found_s > 0.1) == pytest.approx(0.02, rel=0.3)


def simulated(*conditions, **settings):
    now = VirtualTime()
    return now, SimulatedGpu(A100, lock_latency_s=0, timebase=now, conditions=conditions, **settings)


def test_clock_setting_calls_of_a_node_wait_for_each_other_under_contention():
    now = VirtualTime()
    turn = OneAtATime(now)
    gpus = [SimulatedGpu(A100, lock_latency_s=0.01, timebase=now, driver_turn=turn) for _ in range(4)]
    threads = [now.thread(lambda gpu=gpu: gpu.lock_clock(1200), "lock") for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert now.seconds == pytest.approx(100.04)


def test_the_file_by_which_processes_take_turns_is_no_link_and_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with turn_on_node():
            pass
    (path,) = tmp_path.iterdir()
    path.unlink()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.symlink_to(precious)
    with pytest.raises(OSError), turn_on_node():  # noqa: PT011 - the system's own words
        pass
    path.unlink()
    precious.rename(path)
    with turn_on_node():
        assert path.read_text() == "precious", "the file is not overwritten"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(GpuError, match="belongs to another user"), turn_on_node():
        pass


def test_transfers_are_delayed_for_a_while_after_changes_of_the_clock():
    now, gpu = simulated("slow-transfers")
    assert gpu.transfer_delay_s == 0
    gpu.lock_clock(1200)
    gpu.lock_clock(1305)
    now.sleep(0.001)
    assert gpu.transfer_delay_s == pytest.approx(0.02)
    now.sleep(0.06)
    assert gpu.transfer_delay_s == 0
