"""Compares predicted with measured iterations, and measures the overhead of Perseus."""

from __future__ import annotations

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.results import Results
from gpu_checks.training import SETUPS, batches, block_of, engine_of, train_until_profiled, training_on

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_records import IterationRecord, read_records
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Span

_KEPT = 20
_FEWEST = 5
# Ratio of the standard errors of a median and of a mean, for a normal distribution.
_MEDIAN_TO_MEAN = 1.2533


def closure(machine: Any, results: Results) -> None:
    """Compare a profile's prediction for default clocks with 30 s of training."""
    setup, now_s = SETUPS["bf16"], machine.timebase.now_s
    with training_on(machine) as folder:
        block = block_of(machine, "profile", folder)
        with engine_of(machine, setup, block) as engine:
            data = batches(machine, setup)
            train_until_profiled(machine, engine, data, Path(block["output_dir"]))
            finished = _kept_iterations(engine.perseus.runtime.timers)
            begin_s = now_s()
            while now_s() - begin_s < machine.seconds(30.0) or len(finished) < _FEWEST:
                engine.train_batch(data)
            spans = [iteration.spans() for iteration in finished[-_KEPT:]]
        output = Path(block["output_dir"])
        _passes(results, StageProfile.load(output / "measured.csv"), spans)
        _energy_and_time(machine, results, output)


def _energy_and_time(machine: Any, results: Results, output: Path) -> None:
    schedule = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=machine.size[3])
    predicted = problem_for(schedule, StageProfile.load(output / "profile.csv")).baseline()
    records = [r for r in read_records(output) if isinstance(r, IterationRecord) and r.phase == "observe"][2:]
    time_s = statistics.fmean(record.time_s for record in records)
    energies_j = [record.energy_j for record in records if record.energy_j is not None]
    results.add("iterations measured", len(records), at_least=1)
    results.add("time of an iteration", time_s * 1e3, "ms")
    results.add("predicted to measured time", predicted.time_s / time_s, at_least=0.98, at_most=1.02)
    results.add("energy of an iteration", statistics.fmean(energies_j), "J")
    ratio = predicted.energy_j / statistics.fmean(energies_j)
    results.add("predicted to measured energy", ratio, at_least=0.98, at_most=1.02)


def _passes(results: Results, profile: StageProfile, iterations: list[list[Span]]) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        times_s = [s.time_s for spans in iterations for s in spans if _kind(s) is kind]
        profiled_s = profile.at_highest_clock(0, kind).time_s
        results.add(f"a {kind} in training, median", statistics.median(times_s) * 1e3, "ms")
        results.add(f"a profiled {kind} to that", profiled_s / statistics.median(times_s), at_least=0.98, at_most=1.02)


def _kind(span: Span) -> Kind | None:
    return span.operation.instruction.kind if isinstance(span.operation, Compute) else None


def _kept_iterations(timers: Any) -> list[Any]:
    """Return a list that receives the last iterations that end from now on."""
    kept: list[Any] = []
    finish = timers.finish_iteration

    def finish_and_keep() -> Any:
        kept.append(finish())
        del kept[:-_KEPT]
        return kept[-1]

    timers.finish_iteration, timers.needs_all = finish_and_keep, True
    return kept


def overhead(machine: Any, results: Results) -> None:
    """Alternate iterations of 0.2 s and of 1 s with Perseus, and in two engines without it."""
    with training_on(machine) as folder:
        for goal_s, turns, at_most in ((0.2, 40, 1.005), (1.0, 15, 1.002)):
            micro_batches = _micro_batches(machine, goal_s)
            size = (*machine.size[:3], micro_batches)
            for mode in ("observe", "run"):
                what = f"{mode}, iterations of {goal_s:g} s"
                compared = {"what": what, "mode": mode, "size": size, "turns": turns, "at_most": at_most}
                results.attempt(what, partial(_turns, machine, results, folder, **compared))


def _micro_batches(machine: Any, goal_s: float) -> int:
    """Return the number of micro-batches for an iteration of about this duration."""
    setup = SETUPS["bf16"]
    data = batches(machine, setup)
    with engine_of(machine, setup, None) as engine:
        times_s = [_timed_s(machine, engine, data) for _ in range(5)]
    return max(2, round(machine.seconds(goal_s) / min(times_s) * machine.size[3]))


def _turns(
    machine: Any,
    results: Results,
    folder: Path,
    *,
    what: str,
    mode: str,
    size: tuple[int, ...],
    turns: int,
    at_most: float,
) -> None:
    setup = SETUPS["bf16"]
    data, block = batches(machine, setup, size), block_of(machine, mode, folder, micro_batches=size[3])
    with (
        engine_of(machine, setup, None, size) as plain,
        engine_of(machine, setup, block, size) as ours,
        engine_of(machine, setup, None, size) as second,
    ):
        engines = plain, ours, second
        times_s = [[_timed_s(machine, engine, data) for engine in engines] for _ in range(machine.turns(turns))][3:]
    again = statistics.median(turn[2] / turn[0] for turn in times_s)
    ratios = [turn[1] / turn[0] for turn in times_s]
    error = _MEDIAN_TO_MEAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
    results.add(f"{what}: time without Perseus, median", statistics.median(t[0] for t in times_s) * 1e3, "ms")
    results.add(f"{what}: a second engine without Perseus to the first", again)
    results.add(f"{what}: standard error of the next figure", error)
    limit = at_most + abs(again - 1) + 2 * error
    results.add(f"{what}: with Perseus to without", statistics.median(ratios), at_most=limit)


def _timed_s(machine: Any, engine: Any, data: Any) -> float:
    machine.synchronize()
    began_s = machine.timebase.now_s()
    engine.train_batch(data)
    machine.synchronize()
    return machine.timebase.now_s() - began_s
