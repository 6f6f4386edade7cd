"""The energy counter with known loads, and times of passes at full and at partial duty."""

from __future__ import annotations

import statistics
from typing import Any

from gpu_checks.machine import full_load
from gpu_checks.results import Results

from perseus_ds.gpu.energy_counter import CounterLog, answer_to_a_step
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_PASS = Compute(Instruction(0, Kind.FORWARD, 0))
_PERIODS_S = (0.02, 0.05, 0.1, 0.2)
_DUTY = 0.6
_PASS_S = 0.02


def counter(machine: Any, results: Results) -> None:
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


def step(machine: Any, results: Results) -> None:
    """Time that the energy counter takes to settle after the end of a full load."""
    with CounterLog(machine.gpu, machine.timebase) as log, full_load(machine):
        busy_w = _mean_power_w(machine, log, settle_s=1.5)
    answer = answer_to_a_step(machine.gpu, busy_w, machine.timebase)
    results.add("power at full load", busy_w, "W")
    results.add("refresh period of the energy counter", (answer.period_s or 0.0) * 1e3, "ms", at_least=1)
    results.add("settled after the end of the load", answer.settle_s * 1e3, "ms")


def steady_load(machine: Any, log: CounterLog) -> tuple[float, list[str]]:
    """Return the power of a steady light load [W], and what limits its clock.

    At the power limit, waves of the load would draw more.
    """
    with full_load(machine, machine.compute_lightly):
        return _mean_power_w(machine, log, settle_s=1.5), machine.gpu.throttle_reasons()


def _mean_power_w(machine: Any, log: CounterLog, settle_s: float) -> float:
    machine.timebase.sleep(machine.seconds(settle_s))
    begin_s = machine.timebase.now_s()
    machine.timebase.sleep(machine.seconds(4.0))
    return log.power_w(begin_s, machine.timebase.now_s())


def _energy_ratio(machine: Any, log: CounterLog, period_s: float, busy_w: float, rest_w: float) -> float:
    """Return the ratio of the counter's energy to the energy by powers and times."""
    execution, timebase = machine.execution(), machine.timebase
    busy: list[tuple[float, float]] = []
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


def duty(machine: Any, results: Results) -> None:
    """Times of the same passes with and without pauses, which differ at the power limit."""
    times_s = {}
    with CounterLog(machine.gpu, machine.timebase) as log:
        for share in (1.0, _DUTY):
            times_s[share] = _pass_s(machine, results, log, share)
    results.add(f"time of a pass at {_DUTY:.0%} duty to that at 100 %", times_s[_DUTY] / times_s[1.0])
    results.note("A ratio below 1 means that passes which are repeated without a pause are slower than in training.")


def _pass_s(machine: Any, results: Results, log: CounterLog, share: float) -> float:
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
    second_half = times_s[len(times_s) // 2 :]  # once the board has warmed up
    results.add(f"time of a pass at {share:.0%} duty, median", statistics.median(second_half) * 1e3, "ms")
    results.add(f"power at {share:.0%} duty", log.power_w(begin_s, timebase.now_s()), "W")
    results.note(f"reasons at {share:.0%} duty: {', '.join(sorted(reasons)) or 'none'}")
    return statistics.median(second_half)
