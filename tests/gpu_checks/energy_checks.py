"""NVML's readings and their times, the energy counter with known loads, and passes at full and at partial duty."""

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from unittest.mock import patch

from gpu_checks.machine import full_load
from gpu_checks.results import percentile

from perseus_ds.gpu.energy_counter import CounterLog, answer_to_a_step, counter_period_s
from perseus_ds.gpu.nvml import index_of_cuda_device, index_of_uuid
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

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


def nvml(machine, results):
    """Read everything that Perseus reads: idle, under load, and with eight concurrent processes."""
    results.attempt("selection", partial(_selection, machine.gpu, results))
    results.attempt("what it reports", partial(_reports, machine.gpu, results))
    results.attempt("readings of an idle GPU", partial(_readings, machine, results, "idle"))
    with full_load(machine):
        machine.timebase.sleep(machine.seconds(1.0))
        results.attempt("readings under load", partial(_readings, machine, results, "under load"))
        results.attempt("refreshes of the counter", partial(_refreshes, machine, results))
        results.attempt("default clocks", partial(_default_clocks, machine, results))
        results.attempt("readings by several processes", partial(_processes, machine, results))


def _selection(gpu, results):
    results.add_fact("its UUID leads to its index", index_of_uuid(gpu.uuid) == gpu.index)
    for name, value in (("index", str(gpu.index)), ("UUID", gpu.uuid), ("abbreviated UUID", gpu.uuid[:12])):
        with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID"):
            results.add_fact(f"CUDA_VISIBLE_DEVICES as {name} leads to it", index_of_cuda_device(0) == gpu.index)


def _reports(gpu, results):
    clocks = gpu.supported_clocks_mhz()
    results.add("clocks that can be locked", len(clocks), at_least=2)
    results.add("lowest", clocks[0], "MHz")
    results.add("highest", clocks[-1], "MHz")
    results.add_fact("it has an energy counter", gpu.has_energy_counter)
    results.add("power of the idle GPU", gpu.power_w(), "W", at_least=1)
    results.note(f"idle: {gpu.clock_mhz()} MHz, {', '.join(gpu.throttle_reasons()) or 'no reasons'}, {gpu.state}")
    for setting in gpu.administrator_settings:
        results.note(f"an administrator's setting: {setting}")


def _readings(machine, results, when):
    gpu, now_s = machine.gpu, machine.timebase.now_s
    readings = {
        "energy": gpu.energy_j, "clock": gpu.clock_mhz, "reasons": gpu.throttle_reasons, "power": gpu.power_w,
    }  # fmt: skip
    for name, read in readings.items():
        times_s = []
        for _ in range(100):
            began_s = now_s()
            read()
            times_s.append(now_s() - began_s)
            machine.timebase.sleep(0.002)
        results.add_times(f"reading the {name}, {when}", times_s)


def _refreshes(machine, results):
    period_s = counter_period_s(machine.gpu, machine.seconds(3.0), machine.timebase)
    assert period_s is not None, "the energy counter was refreshed fewer than twice"
    results.add("refresh period of the energy counter", period_s * 1e3, "ms", at_most=500)


def _default_clocks(machine, results):
    """Clock and throttle reasons under load when the clock is not locked."""
    clocks, reasons = [], set()
    for _ in range(50):
        clocks.append(machine.gpu.clock_mhz())
        reasons |= set(machine.gpu.throttle_reasons())
        machine.timebase.sleep(0.02)
    results.add("default clock under load, median", statistics.median(clocks), "MHz")
    results.add("lowest seen", min(clocks), "MHz")
    results.note(f"reasons under load: {', '.join(sorted(reasons)) or 'none'}")


def _processes(machine, results):
    command = [sys.executable, "-c", _READER, str(machine.gpu.index), str(machine.seconds(3.0))]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(_PROCESSES)]
    end_s = time.monotonic() + 60
    try:
        texts = [reader.communicate(timeout=max(1.0, end_s - time.monotonic()))[0] for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    times_s = [json.loads(text) for text in texts]
    results.add("processes that read at once", len(times_s))
    results.add_times("reading the energy, all of them at once", [each for one in times_s for each in one])
    slowest_s = max(percentile(one, 0.99) for one in times_s)
    results.add("99th percentile of the slowest process", slowest_s * 1e3, "ms")


_PASS = Compute(Instruction(0, Kind.FORWARD, 0))
_PERIODS_S = (0.02, 0.05, 0.1, 0.2)
_DUTY = 0.6
_PASS_S = 0.02


def counter(machine, results):
    """Compare the counter's energy of alternating load and rest with that of steady powers."""
    with CounterLog(machine.gpu, machine.timebase) as log:
        busy_w, reasons = steady_load(machine, log)
        is_capped = "sw_power_cap" in reasons
        rest_w = _mean_power_w(machine, log, settle_s=0.5)
        results.add("power at full load", busy_w, "W")
        results.add("power at rest, right after", rest_w, "W")
        for period_s in _PERIODS_S:
            ratio = _energy_ratio(machine, log, period_s, busy_w, rest_w)
            name = f"energy of waves of {period_s * 1e3:g} ms to that of steady powers"
            results.add(name, ratio, **({} if is_capped else {"at_least": 0.97, "at_most": 1.03}))
    if is_capped:
        results.note("The steady load reaches the power limit, and waves of it do not: their powers differ.")


def step(machine, results):
    """Time that the energy counter takes to settle after the end of a full load."""
    with CounterLog(machine.gpu, machine.timebase) as log, full_load(machine):
        busy_w = _mean_power_w(machine, log, settle_s=1.5)
    ended_s = machine.timebase.now_s()
    with CounterLog(machine.gpu, machine.timebase) as log:
        machine.timebase.sleep(3.0)
    answer = answer_to_a_step(log.changes, busy_w, ended_s)
    results.add("power at full load", busy_w, "W")
    results.add("refresh period of the energy counter", answer.period_s * 1e3, "ms", at_least=1)
    results.add("settled after the end of the load", answer.settle_s * 1e3, "ms")


def steady_load(machine, log):
    """Return the power of a steady light load [W], and what limits its clock.

    At the power limit, waves of the load would draw more.
    """
    with full_load(machine, machine.compute_lightly):
        return _mean_power_w(machine, log, settle_s=1.5), machine.gpu.throttle_reasons()


def _mean_power_w(machine, log, settle_s):
    machine.timebase.sleep(machine.seconds(settle_s))
    begin_s = machine.timebase.now_s()
    machine.timebase.sleep(machine.seconds(4.0))
    return log.power_w(begin_s, machine.timebase.now_s())


def _energy_ratio(machine, log, period_s, busy_w, rest_w):
    """Return the ratio of the counter's energy to the energy by powers and times."""
    execution, timebase, busy = machine.execution(), machine.timebase, []
    begin_s = timebase.now_s()
    while timebase.now_s() - begin_s < machine.seconds(5.0):
        origin_s = timebase.now_s()
        execution.start_iteration()  # the GPU is idle, so this event passes immediately
        execution.begin(_PASS)
        machine.compute_lightly(period_s / 2)
        execution.end(_PASS)
        (span,) = execution.finish_iteration().spans()
        busy.append((origin_s + span.start_s, origin_s + span.end_s))
        timebase.sleep(period_s / 2)
    readings = log.readings(begin_s, timebase.now_s())
    (first_s, first_j), (last_s, last_j) = readings[0], readings[-1]
    busy_s = sum(max(0.0, min(end, last_s) - max(begin, first_s)) for begin, end in busy)
    return (last_j - first_j) / (rest_w * (last_s - first_s) + (busy_w - rest_w) * busy_s)


def duty(machine, results):
    """Times of the same passes with and without pauses, which differ at the power limit."""
    with CounterLog(machine.gpu, machine.timebase) as log:
        full_s, partial_s = (_pass_s(machine, results, log, share) for share in (1.0, _DUTY))
    results.add(f"time of a pass at {_DUTY:.0%} duty to that at 100 %", partial_s / full_s)
    results.note("A ratio below 1 means that passes which are repeated without a pause are slower than in training.")


def _pass_s(machine, results, log, share):
    execution, timebase, times_s, reasons = machine.execution(), machine.timebase, [], set()
    begin_s = timebase.now_s()
    while timebase.now_s() - begin_s < machine.seconds(8.0):
        execution.start_iteration()
        execution.begin(_PASS)
        machine.compute(_PASS_S)
        ended = execution.end(_PASS)
        finished = execution.finish_iteration()
        ended.synchronize()
        reasons |= set(machine.gpu.throttle_reasons())
        times_s.append(finished.spans()[0].time_s)
        timebase.sleep(times_s[-1] * (1 / share - 1))
    pass_s = statistics.median(times_s[len(times_s) // 2 :])  # once the board has warmed up
    results.add(f"time of a pass at {share:.0%} duty, median", pass_s * 1e3, "ms")
    results.add(f"power at {share:.0%} duty", log.power_w(begin_s, timebase.now_s()), "W")
    results.note(f"reasons at {share:.0%} duty: {', '.join(sorted(reasons)) or 'none'}")
    return pass_s
