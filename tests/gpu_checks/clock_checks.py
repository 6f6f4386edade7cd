"""Spans of operations by events of CUDA, and how soon after an event a clock is asked for."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from gpu_checks.results import Results, add_times, percentile

from perseus_ds.clocks.controller import ClockController, short_switch_interval
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_PASS = Compute(Instruction(0, Kind.FORWARD, 0))
_LENGTHS_S = (0.002, 0.005, 0.003, 0.004)
_OPERATIONS = 1000
_REQUESTS = 300
_BETWEEN_S = 0.02
_EARLY_S = 0.012


def spans(machine: Any, results: Results) -> None:
    """Spans of kernels of known length, a thousand launched ahead; waits on another stream."""
    _calibrate(machine)
    execution, now_s = machine.execution(), machine.timebase.now_s
    lengths_s = [_LENGTHS_S[number % len(_LENGTHS_S)] for number in range(_OPERATIONS)]
    began_s = now_s()
    execution.start_iteration()
    for length_s in lengths_s:
        execution.begin(_PASS)
        machine.sleep(length_s)
        execution.end(_PASS)
    finished = execution.finish_iteration()
    launched_s = now_s()
    measured_s = [span.time_s for span in finished.spans()]
    ended_s = now_s()
    ratios = [measured / length for measured, length in zip(measured_s, lengths_s, strict=True)]
    results.add("operations", len(measured_s))
    results.add("how far the host was ahead of the GPU", ended_s - launched_s, "s")
    results.add("span to length, median", statistics.median(ratios), at_least=0.99, at_most=1.01)
    results.add("span to length, 1st percentile", percentile(ratios, 0.01), at_least=0.99)
    results.add("span to length, 99th percentile", percentile(ratios, 0.99), at_most=1.01)
    results.add("sum of spans to the host's time", sum(measured_s) / (ended_s - began_s), at_least=0.98, at_most=1.001)
    results.attempt("other stream", lambda: _other_stream(machine, results))
    results.attempt("host 4 s ahead", lambda: _far_ahead(machine, results))


def _far_ahead(machine: Any, results: Results) -> None:
    execution, now_s, length_s = machine.execution(), machine.timebase.now_s, 0.04
    execution.start_iteration()
    for _ in range(100):
        execution.begin(_PASS)
        machine.sleep(length_s)
        ended = execution.end(_PASS)
    finished, launched_s = execution.finish_iteration(), now_s()
    ended.synchronize()
    ended_s = now_s()
    results.add("how far the host was ahead, longer kernels", ended_s - launched_s, "s", at_least=3.5)
    results.add("end by its event, after the host's", (ended.passed_s() - ended_s) * 1e3, "ms", at_least=-5, at_most=1)
    ratios = [span.time_s / length_s for span in finished.spans()]
    results.add("span to length then, median", statistics.median(ratios), at_least=0.99, at_most=1.01)


def _other_stream(machine: Any, results: Results) -> None:
    execution, length_s = machine.execution(), 0.02
    execution.start_iteration()
    beside = machine.start_beside(10 * length_s)
    execution.begin(_PASS)
    machine.sleep(length_s)
    execution.end(_PASS)
    machine.wait_for(beside)
    execution.begin(_PASS)
    machine.sleep(length_s)
    execution.end(_PASS)
    during, after = execution.finish_iteration().spans()
    results.add("span while another stream is busy, to its length", during.time_s / length_s, at_most=1.02)
    results.add("span after a wait for another stream, to its length", after.time_s / length_s, at_most=1.02)
    results.add("that wait, between the spans", (after.start_s - during.end_s) / length_s, "lengths", at_least=8)


def requests(machine: Any, results: Results) -> None:
    """From the event at the end of a pass to the call that would lock a clock; early raises."""
    for name, occupy, at_most_ms in (
        ("launching", machine.launch_for, 2),
        ("in pure Python", machine.count_for, 2),
        ("waiting in a full launch queue", machine.fill_queue_for, None),
        ("waiting there with Triton's kernels", machine.fill_queue_with_triton_for, None),
    ):
        what = f"from event to request, main thread {name}"
        part = partial(_delays, machine, results, what, occupy, at_most_ms)
        results.attempt(what, part)
    results.attempt("early raises", lambda: _early_raises(machine, results))


def _delays(
    machine: Any, results: Results, what: str, occupy: Callable[[float], None], at_most_ms: float | None
) -> None:
    clocks_mhz = machine.gpu.supported_clocks_mhz()[-2:]

    def launch(clocks: ClockController, execution: Any) -> None:
        for number in range(_REQUESTS):
            execution.begin(_PASS)
            machine.sleep(_BETWEEN_S)
            clocks.request(clocks_mhz[number % 2], execution.end(_PASS))

    asked_s, passes = _asked(machine, launch, occupy)
    results.add(f"{what}: requests made", len(asked_s), at_least=_REQUESTS, at_most=_REQUESTS)
    add_times(
        results, what, [at - ended for at, (_, ended) in zip(asked_s, passes, strict=True)], p99_at_most_ms=at_most_ms
    )


def memory(machine: Any, results: Results) -> None:
    """GPU memory that the clocks' thread and the events of a long iteration take."""
    _calibrate(machine)
    before = machine.free_bytes()
    execution = machine.execution()
    clocks = ClockController(machine.gpu, lambda error: None, on_start=execution.use_device, timebase=machine.timebase)
    with closing(clocks):
        execution.start_iteration()
        for _ in range(_OPERATIONS):
            clocks.call(lambda: None, execution.begin(_PASS))
            execution.end(_PASS)
        execution.finish_iteration().end.synchronize()
        taken = before - machine.free_bytes()
    results.add("GPU memory taken", taken / 2**20, "MiB", at_most=16)


def _early_raises(machine: Any, results: Results) -> None:
    low_mhz, high_mhz = machine.gpu.supported_clocks_mhz()[-2:]

    def launch(clocks: ClockController, execution: Any) -> None:
        for _ in range(_REQUESTS // 2):
            begun = execution.begin(_PASS)  # at the lower clock
            machine.sleep(_BETWEEN_S)
            clocks.request_early(high_mhz, begun, _EARLY_S)
            clocks.request(high_mhz, execution.end(_PASS))
            execution.begin(_PASS)
            machine.sleep(_BETWEEN_S)
            clocks.request(low_mhz, execution.end(_PASS))

    asked_s, passes = _asked(machine, launch, machine.launch_for)
    results.add("early raises: requests made", len(asked_s), at_least=_REQUESTS, at_most=_REQUESTS)
    late_s = [at - (begun + _EARLY_S) for at, (begun, _) in zip(asked_s[::2], passes[::2], strict=True)]
    results.add("early raises, earliest", min(late_s) * 1e3, "ms after due", at_least=-2)
    add_times(results, "early raises, after due", late_s, p99_at_most_ms=2)


def _asked(
    machine: Any, launch: Callable[[ClockController, Any], None], occupy: Callable[[float], None]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Return when clocks were asked for, and when each pass began and ended, on the host's clock [s].

    The GPU is idle when the iteration begins, so that its first event passes as soon as it is recorded.
    """
    _calibrate(machine)
    occupy(0.01)  # kernels are loaded before, not while, the GPU is busy
    execution, errors = machine.execution(), []
    clocks = ClockController(machine.gpu, errors.append, on_start=execution.use_device, timebase=machine.timebase)
    with short_switch_interval(), closing(clocks):  # as in a job
        machine.synchronize()
        asked_before = len(machine.gpu.changes)
        origin_s = machine.timebase.now_s()
        execution.start_iteration()
        launch(clocks, execution)
        finished = execution.finish_iteration()
        occupy(_REQUESTS * _BETWEEN_S + 0.2)
        passes = [(origin_s + span.start_s, origin_s + span.end_s) for span in finished.spans()]
        machine.timebase.sleep(0.1)  # for the last request
        asked_s = [change.at_s for change in machine.gpu.changes[asked_before:]]
    if errors:
        raise errors[0]
    return asked_s, passes


def _calibrate(machine: Any) -> None:
    """Have what :meth:`sleep` needs to know measured before, not while, something is timed."""
    machine.sleep(0.001)
    machine.synchronize()
