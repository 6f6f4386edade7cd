"""The simulated GPU in virtual time: its models, and its two logs compared with a numeric integration."""

import csv
import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import stage_profile
from virtual.gpu import OneAtATime
from virtual.time import VirtualTime

from perseus_ds.client.lease import SharedMemory
from perseus_ds.errors import GpuError
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES, MEMORY_BOUND, Workload
from perseus_ds.simulation.gpu import Log, SimulatedGpu, turn_on_node

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
    half = model.clocks_mhz[-1] // 2
    # Work that is bound by memory depends less on the clock.
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
    ("name", "powers_w"),
    [("h100-sxm", {345: 140.7, 945: 273.2, 1305: 461.3}), ("h200", {345: 161.2, 945: 303.1, 1350: 528.6})],
)
def test_power_at_locked_clocks_is_as_measured_under_matrix_multiplication(name, powers_w):
    """Source: github.com/AyeshaAfzal91/GPU-Energy-Sweetspot, commit 242d142."""
    model = DEVICES[name]
    assert {clock_mhz: model.power_w(clock_mhz) for clock_mhz in powers_w} == pytest.approx(powers_w, rel=0.025)


@pytest.mark.parametrize(("clocks_mhz", "median_s"), [(A100.clocks_mhz[:1], 0.0032), (A100.clocks_mhz[-1:], 0.0060)])
def test_the_latency_of_the_v100_is_as_measured(now, clocks_mhz, median_s):
    gpu = SimulatedGpu(A100, timebase=now, lock_latency="v100")

    def latencies_s(clocks_mhz):
        for clock_mhz in clocks_mhz:
            begin_s = now.now_s()
            gpu.lock_clock(clock_mhz)
            yield now.now_s() - begin_s

    assert np.median([*latencies_s(clocks_mhz * 1000)]) == pytest.approx(median_s, rel=0.05)
    found_s = [*latencies_s(random.Random(0).choices(A100.clocks_mhz, k=5000))]
    assert np.percentile(found_s, [50, 95, 99]) == pytest.approx([0.0045, 0.0092, 0.0115], rel=0.1)


def test_clock_setting_calls_of_a_node_wait_for_each_other_under_contention(now):
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


def test_transfers_are_delayed_for_a_while_after_changes_of_the_clock(now):
    gpu = SimulatedGpu(A100, lock_latency_s=0, timebase=now, conditions=["slow-transfers"])
    assert gpu.transfer_delay_s == 0
    gpu.lock_clock(1200)
    gpu.lock_clock(1305)
    now.sleep(0.001)
    assert gpu.transfer_delay_s == pytest.approx(0.02)
    now.sleep(0.06)
    assert gpu.transfer_delay_s == 0


STEP_S = 0.0005
PERIOD_STEPS = 200  # of the counter


@dataclass
class Integration:
    """The same physics in steps of half a millisecond."""

    conditions: list[str]
    steps: int = 200_000  # since second 0
    workload: Workload | None = None
    clock_mhz: float = A100.top_clock_mhz
    limit_w: float = A100.power_limit_w
    thermal_mhz: float = math.inf
    progress_s: float = 0.0
    energy_j: float = 0.0
    counted_j: float = 0.0
    counter_j: float = 0.0
    mean_w: float = A100.blocking_power_w
    warmer_c: float = 0.1 * A100.blocking_power_w
    reached_mhz: float = field(default=0.0, init=False)

    def run(self, steps=1):
        for _ in range(steps):
            power_w = self.power_w()
            self.energy_j += power_w * STEP_S
            is_seen = "sampled-counter" not in self.conditions or self.steps % PERIOD_STEPS >= 0.75 * PERIOD_STEPS
            self.counted_j += is_seen * power_w * STEP_S * (4 if "sampled-counter" in self.conditions else 1)
            if self.workload is not None:
                self.progress_s += STEP_S / A100.slowdown(self.reached_mhz, self.workload)
            self.mean_w += (power_w - self.mean_w) * STEP_S / 1.0
            self.warmer_c += (0.1 * power_w - self.warmer_c) * STEP_S / 60.0
            self.steps += 1
            if self.steps % PERIOD_STEPS == 0:
                self.counter_j = self.counted_j

    def power_w(self):
        if self.workload is None:
            waits = 0.5 + 0.5 * self.clock_mhz / A100.top_clock_mhz if "low-clock-waiting" in self.conditions else 1.0
            power_w = A100.blocking_power_w * waits
        else:
            allowed_w = self.limit_w
            if "duty-limit" in self.conditions:
                held_w = 0.85 * allowed_w
                allowed_w = min(allowed_w, max(0.5 * held_w, held_w + 4 * (held_w - self.mean_w)))
            self.reached_mhz = min(self.clock_mhz, self.thermal_mhz, A100.highest_clock_mhz(allowed_w, self.workload))
            power_w = A100.power_w(self.reached_mhz, self.workload)
        return power_w * (1 + (0.001 * self.warmer_c if "warming" in self.conditions else 0))

    def begin_work(self, workload):
        self.workload, self.progress_s = workload, 0.0

    def lock_clock(self, clock_mhz):
        self.run(30)
        self.clock_mhz = clock_mhz

    def limit(self, power_w=None, clock_mhz=None):
        self.limit_w, self.thermal_mhz = power_w or A100.power_limit_w, clock_mhz or math.inf

    def finish_work(self, work_s):
        while self.progress_s < work_s:
            self.run()
        self.workload = None


ACTIONS = st.one_of(
    st.tuples(st.just("begin_work"), st.sampled_from([COMPUTE_BOUND, MEMORY_BOUND])),
    st.tuples(st.just("lock_clock"), st.sampled_from(A100.clocks_mhz[20::7])),
    st.tuples(st.just("limit"), st.floats(200, 500), st.none() | st.floats(600, 1410)),
    st.tuples(st.just("limit")),
)


@pytest.mark.parametrize("condition", [None, "sampled-counter", "warming", "duty-limit", "low-clock-waiting"])
@settings(max_examples=8, deadline=None)
@given(events=st.lists(st.tuples(st.integers(0, 300), ACTIONS), max_size=6), work_s=st.floats(0.2, 0.6))
def test_time_energy_and_counter_are_those_of_a_numeric_integration(condition, events, work_s):
    now, conditions = VirtualTime(100.0), [condition] if condition else []
    gpu = SimulatedGpu(A100, timebase=now, conditions=conditions, lock_latency_s=30 * STEP_S)
    reference = Integration(conditions)
    for gap_ms, (action, *arguments) in [*events, (100, ("begin_work", COMPUTE_BOUND))]:
        now.seconds = (reference.steps + 2 * gap_ms + 1 - reference.steps % 2) * STEP_S  # never at a refresh
        reference.run(2 * gap_ms + 1 - reference.steps % 2)
        getattr(gpu, action)(*arguments)
        getattr(reference, action)(*arguments)
        assert gpu.locked_clock_mhz == reference.clock_mhz
    lenient = 0.02 if condition == "duty-limit" else 1e-4  # such a board decides every 20 ms, the reference each step
    assert gpu.energy_j() == pytest.approx(reference.counter_j, rel=lenient, abs=0.002)
    gpu.finish_work(work_s)
    reference.finish_work(work_s)
    taken_s = now.seconds - 100.0
    assert taken_s == pytest.approx(reference.steps * STEP_S - 100.0, rel=lenient, abs=1.01 * STEP_S)
    assert gpu.true_energy_j == pytest.approx(reference.energy_j, rel=lenient, abs=1.01 * STEP_S * 500)


@pytest.mark.parametrize("conditions", [["low-clock-waiting"], ["duty-limit", "warming"]])
def test_nothing_depends_on_the_times_of_readings(conditions):
    def results(period_s):
        now = VirtualTime()
        gpu = SimulatedGpu(A100, timebase=now, conditions=conditions, power_noise=0.05, time_noise=0.05, seed=3)

        def read():
            while True:
                now.sleep(period_s)
                gpu.power_w(), gpu.energy_j()

        now.thread(read, "reader").start()
        for clock_mhz in A100.clocks_mhz[40::4]:
            gpu.begin_work()
            now.thread(lambda clock_mhz=clock_mhz: gpu.lock_clock(clock_mhz), "lock").start()
            gpu.finish_work(0.3)
            now.sleep(0.05)
        return now.seconds, gpu.true_energy_j, gpu.energy_j(), gpu.power_w()

    assert results(0.0033) == pytest.approx(results(100.0), rel=1e-9)


def test_a_clock_change_in_another_process_affects_a_pass_that_runs(now):
    logs = {f"{kind}_log": Log.create(kind, now.seconds, np.zeros(4096, np.uint8)) for kind in ("work", "clock")}
    rank, agent = (SimulatedGpu(A100, timebase=now, lock_latency_s=0.015, **logs) for _ in range(2))
    agent.lock_clock(705)
    begin_s, begin_j = now.seconds, rank.true_energy_j
    rank.begin_work()

    def lock():
        now.sleep(0.1 - 0.015)
        agent.lock_clock(1410)

    now.thread(lock, "agent").start()
    rank.finish_work(0.1 / A100.slowdown(705) + 0.2)
    assert now.seconds - begin_s == pytest.approx(0.1 + 0.2 * A100.slowdown(1410))
    assert agent.true_energy_j == pytest.approx(rank.true_energy_j)
    assert rank.true_energy_j - begin_j == pytest.approx(0.1 * A100.power_w(705) + 0.2 * A100.slowdown(1410) * 475.0)
    agent.limit(power_w=300.0)
    assert rank.power_limit_w() == 300.0


def test_entries_are_read_before_they_are_overwritten(now):
    changes = 5000
    gpu = SimulatedGpu(A100, timebase=now, lock_latency_s=1.0, conditions=["low-clock-waiting"])
    for number in range(changes):
        gpu.lock_clock(705 if number % 2 == 0 else 1410)
    seconds_at_705 = changes // 2
    expected_j = A100.blocking_power_w * (changes - 0.25 * seconds_at_705)
    assert gpu.true_energy_j == pytest.approx(expected_j)


WRITER = """
import itertools, mmap, sys
from perseus_ds.simulation.gpu import Log
log = Log(mmap.mmap(int(sys.argv[1]), 0), "work")
for number in itertools.count():
    log.append(*[float(number)] * 4)
"""


def test_a_reader_in_another_process_sees_whole_entries_in_their_order():
    memory = SharedMemory(4096)
    log = Log.create("work", 0.0, memory.view)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(memory.file)], pass_fds=[memory.file]) as writer:
        try:
            count, last, found = 0, -1.0, 0
            while found < 20_000:
                assert writer.poll() is None
                count, entries = log.since(count)
                for entry in entries:
                    assert set(entry) == {entry[0]}
                    assert entry[0] > last
                    last = entry[0]
                found += len(entries)
        finally:
            writer.kill()


def test_memory_that_contains_something_else_is_refused():
    for offset, content in ((0, b"PDSSIMck"), (8, b"\2\0\0\0"), (12, b"\xff\xff\xff\xff")):
        memory = bytearray(4096)
        Log.create("work", 0.0, memory)
        Log(memory, "work")
        memory[offset : offset + len(content)] = content
        with pytest.raises(GpuError, match=r"work log .* damaged or of another version"):
            Log(memory, "work")
    with pytest.raises(GpuError, match="expected at least"):
        Log(bytearray(8), "work")


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("work", (100.0, 3.0, 1.0, 0.0)),
        ("work", (math.nan, 1.0, 1.0, 0.0)),
        ("work", (100.0, 1.0, math.inf, 0.0)),
        ("clock", (100.0, 0.0, math.nan, 0.0)),
        ("clock", (1e300, 1.0, 300.0, math.inf)),
    ],
)
def test_entries_out_of_range_are_an_error(now, kind, entry):
    logs = {f"{kind}_log": Log.create(kind, now.seconds) for kind in ("work", "clock")}
    gpu = SimulatedGpu(A100, timebase=now, **logs)
    logs[f"{kind}_log"].append(*entry)
    with pytest.raises(GpuError, match=f"{kind} log of a simulated GPU is damaged"):
        gpu.power_w()
