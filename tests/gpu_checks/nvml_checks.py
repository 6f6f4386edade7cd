"""NVML: GPU selection, the values it reports, and how long its calls take."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from gpu_checks.machine import full_load
from gpu_checks.results import Results, add_times, percentile

from perseus_ds.gpu.energy_counter import counter_period_s
from perseus_ds.gpu.nvml import index_of_cuda_device, index_of_uuid

_PROCESSES = 8
# Reader in another process: prints the times of all readings [s].
_READER = """
import json, statistics, sys, time
from perseus_ds.gpu.nvml import NvmlGpu
gpu, times_s, end_s = NvmlGpu(int(sys.argv[1])), [], time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end_s or len(times_s) < 3:
    began_s = time.perf_counter()
    gpu.energy_j()
    times_s.append(time.perf_counter() - began_s)
    time.sleep(0.002)
gpu.close()
print(json.dumps(times_s))
"""


def nvml(machine: Any, results: Results) -> None:
    """Read everything that Perseus reads: idle, under load, and with eight concurrent processes."""
    results.attempt("selection", lambda: _selection(machine, results))
    results.attempt("what it reports", lambda: _reports(machine, results))
    results.attempt("readings of an idle GPU", lambda: _readings(machine, results, "idle"))
    with full_load(machine):
        machine.timebase.sleep(machine.seconds(1.0))
        results.attempt("readings under load", lambda: _readings(machine, results, "under load"))
        results.attempt("refreshes of the counter", lambda: _refreshes(machine, results))
        results.attempt("default clocks", lambda: _default_clocks(machine, results))
        results.attempt("readings by several processes", lambda: _processes(machine, results))


def _selection(machine: Any, results: Results) -> None:
    gpu = machine.gpu
    results.add_fact("its UUID leads to its index", index_of_uuid(gpu.uuid) == gpu.index)
    for name, value in (("index", str(gpu.index)), ("UUID", gpu.uuid), ("abbreviated UUID", gpu.uuid[:12])):
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID"):
            found = index_of_cuda_device(0)
        results.add_fact(f"CUDA_VISIBLE_DEVICES as {name} leads to it", found == gpu.index)


def _reports(machine: Any, results: Results) -> None:
    gpu = machine.gpu
    clocks = gpu.supported_clocks_mhz()
    results.add("clocks that can be locked", len(clocks), at_least=2)
    results.add("lowest", clocks[0], "MHz")
    results.add("highest", clocks[-1], "MHz")
    results.add_fact("it has an energy counter", gpu.has_energy_counter)
    results.add("power of the idle GPU", gpu.power_w(), "W", at_least=1)
    state = gpu.state
    results.note(f"idle: {gpu.clock_mhz()} MHz, {', '.join(gpu.throttle_reasons()) or 'no reasons'}, {state}")
    for setting in gpu.administrator_settings:
        results.note(f"an administrator's setting: {setting}")


def _readings(machine: Any, results: Results, when: str) -> None:
    gpu = machine.gpu
    readings: dict[str, Callable[[], object]] = {
        "energy": gpu.energy_j, "clock": gpu.clock_mhz, "reasons": gpu.throttle_reasons, "power": gpu.power_w,
    }  # fmt: skip
    for name, read in readings.items():
        times_s = []
        for _ in range(100):
            began_s = machine.timebase.now_s()
            read()
            times_s.append(machine.timebase.now_s() - began_s)
            machine.timebase.sleep(0.002)
        add_times(results, f"reading the {name}, {when}", times_s)


def _refreshes(machine: Any, results: Results) -> None:
    period_s = counter_period_s(machine.gpu, machine.seconds(3.0), machine.timebase)
    if period_s is None:
        raise AssertionError("the energy counter was refreshed fewer than twice")
    results.add("refresh period of the energy counter", period_s * 1e3, "ms", at_most=500)


def _default_clocks(machine: Any, results: Results) -> None:
    """Clock and throttle reasons under load when the clock is not locked."""
    clocks, reasons = [], set()
    for _ in range(50):
        clocks.append(machine.gpu.clock_mhz())
        reasons |= set(machine.gpu.throttle_reasons())
        machine.timebase.sleep(0.02)
    results.add("default clock under load, median", statistics.median(clocks), "MHz")
    results.add("lowest seen", min(clocks), "MHz")
    results.note(f"reasons under load: {', '.join(sorted(reasons)) or 'none'}")


def _processes(machine: Any, results: Results) -> None:
    command = [sys.executable, "-c", _READER, str(machine.gpu.index), str(machine.seconds(3.0))]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(_PROCESSES)]
    end_s = time.monotonic() + 60
    try:
        printed = [reader.communicate(timeout=max(1.0, end_s - time.monotonic()))[0] for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    times_s = [time_s for text in printed for time_s in json.loads(text)]
    results.add("processes that read at once", len(printed))
    add_times(results, "reading the energy, all of them at once", times_s)
    slowest_s = max(percentile(json.loads(text), 0.99) for text in printed)
    results.add("99th percentile of the slowest process", slowest_s * 1e3, "ms")
