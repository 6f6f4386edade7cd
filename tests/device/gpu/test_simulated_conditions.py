"""Conditions that make simulated GPUs as unpleasant as real ones may be."""

import os
import tempfile

import pytest
from virtual_time import VirtualTime

from perseus_ds.device.gpu.device_models import DEVICES
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.gpu.simulated_conditions import OneAtATime, OneAtATimeOnNode
from perseus_ds.errors import GpuError

MODEL = DEVICES["a100-sxm"]


def simulated(*conditions, **settings):
    now = VirtualTime()
    return now, SimulatedGpu(MODEL, lock_latency_s=0, timebase=now, conditions=conditions, **settings)


def compute(gpu, passes, work_s=0.1, pause_s=0.0):
    """Run passes; return the time of the last one."""
    for _ in range(passes):
        begin_s = gpu._time.now_s()
        gpu.begin_work()
        gpu.finish_work(work_s)
        taken_s = gpu._time.now_s() - begin_s
        gpu._time.sleep(pause_s)
    return taken_s


def test_a_sampled_counter_sees_the_last_quarter_of_each_period_only():
    now, gpu = simulated("sampled-counter")
    begin_j, begin_true_j = gpu.energy_j(), gpu.true_energy_j
    for _ in range(10):  # computing for half of each period, of which the samples see nothing
        gpu.begin_work()
        now.sleep(0.05)
        gpu.finish_work(0.0)
        now.sleep(0.05)
    assert gpu.true_energy_j - begin_true_j == pytest.approx(0.5 * 475.0 + 0.5 * 83.64, rel=0.01)
    assert gpu.energy_j() - begin_j == pytest.approx(83.64, rel=0.11)


def test_clock_setting_calls_of_a_node_wait_for_each_other_under_contention():
    now = VirtualTime()
    queue = OneAtATime(now)
    gpus = [SimulatedGpu(MODEL, lock_latency_s=0.01, timebase=now, driver_queue=queue) for _ in range(4)]
    threads = [now.thread(lambda gpu=gpu: gpu.lock_clock(1200), "lock") for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert now.seconds == pytest.approx(100.04)


def test_processes_of_a_node_take_turns_too():
    with OneAtATimeOnNode().turn():
        pass
    with OneAtATimeOnNode().turn():
        pass


def test_the_file_by_which_processes_take_turns_is_no_link_and_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    queue = OneAtATimeOnNode()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    queue._path.symlink_to(precious)
    with pytest.raises(OSError), queue.turn():  # noqa: PT011 - the system's own words
        pass
    assert precious.read_text() == "precious"
    queue._path.unlink()
    precious.rename(queue._path)
    with queue.turn():
        assert queue._path.read_text() == "precious", "nothing is written"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(GpuError, match="belongs to another user"), queue.turn():
        pass


def test_transfers_are_delayed_for_a_while_after_changes_of_the_clock():
    now, gpu = simulated("slow-transfers")
    assert gpu.transfer_delay_s == 0
    gpu.lock_clock(1200)
    gpu.lock_clock(1305)
    assert gpu.transfer_delay_s == pytest.approx(0.02)
    now.sleep(0.06)
    assert gpu.transfer_delay_s == 0


def test_a_warming_gpu_draws_more_after_a_minute():
    now, gpu = simulated("warming")
    gpu.begin_work()
    cold_w, cold_c = gpu.power_w(), gpu.state.temperature_c
    now.sleep(60)
    gpu.finish_work(0.0)
    gpu.begin_work()
    assert gpu.state.temperature_c > cold_c + 20
    assert 1.02 < gpu.power_w() / cold_w < 1.05


def test_passes_repeated_without_pause_are_slower_on_a_board_that_limits_its_mean_power():
    _, busy = simulated("duty-limit")
    _, training = simulated("duty-limit")
    assert compute(training, 40, pause_s=0.1) == pytest.approx(0.1 * MODEL.slowdown(1410), rel=0.001)
    assert compute(busy, 40) > 1.03 * 0.1 * MODEL.slowdown(1410)
    assert busy.throttle_reasons() == ("idle",)


def test_waiting_draws_less_at_a_low_clock_where_that_is_simulated():
    for conditions, least, most in (((), 1.0, 1.0), (("low-clock-waiting",), 0.5, 0.8)):
        _, gpu = simulated(*conditions)
        before_w = gpu.power_w()
        gpu.lock_clock(600)
        assert least <= gpu.power_w() / before_w <= most
