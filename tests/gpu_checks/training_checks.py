"""Training on the GPU under Perseus has the same bits and the same kernels as without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.results import Results
from gpu_checks.training import DONE, SETUPS, Setup, batches, block_of, engine_of, train, train_without, training_on
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from perseus_ds.artifacts.run_records import Failed, IterationRecord, read_records

_MODES = ("observe", "profile", "run")


def untouched(machine: Any, results: Results) -> None:
    """Losses, weights, optimizer and random states have the same bits with and without Perseus."""
    with training_on(machine) as folder:
        for name, setup in SETUPS.items():
            if name in machine.setups:
                results.attempt(name, partial(_same_bits, machine, results, folder, name, setup))


def _same_bits(machine: Any, results: Results, folder: Path, name: str, setup: Setup) -> None:
    trained = {mode: train(machine, setup, block_of(machine, mode, folder)) for mode in _MODES}
    counts = {len(found.phases) for found in trained.values()}
    plain, again = (train_without(machine, setup, counts) for _ in range(2))
    for count in sorted(counts):
        _compare(results, f"{name}: {count} iterations without Perseus, twice", again[count], plain[count])
    for mode, found in trained.items():
        _compare(results, f"{name}, {mode}", found.bits, plain[len(found.phases)])
        phase, least = DONE[mode]
        results.add(f"{name}, {mode}: iterations in phase {phase}", found.phases.count(phase), at_least=least)
        least = int(mode != "observe")
        results.add(f"{name}, {mode}: clock changes asked for", found.changes, at_least=least)
        results.add(f"{name}, {mode}: failures", len(found.failures), at_most=0)
        for error in found.failures:
            results.note(f"{name}, {mode}: {error}")
    results.add_fact(f"{name}: a profile was written", trained["profile"].has_profile)


def _compare(results: Results, what: str, ours: dict[str, object], theirs: dict[str, object]) -> None:
    different = [name for name, bits in theirs.items() if ours[name] != bits]
    results.add_fact(f"{what}: the same bits", not different)
    if different:
        results.note(f"{what}: different are {', '.join(different)}")


def kernels(machine: Any, results: Results) -> None:
    """An iteration launches the same kernels with and without Perseus."""
    setup = SETUPS["bf16"]
    with (
        training_on(machine) as folder,
        engine_of(machine, setup, None) as plain,
        engine_of(machine, setup, block_of(machine, "observe", folder)) as ours,
    ):
        data = batches(machine, setup)
        for engine in (plain, ours) * 3:
            engine.train_batch(data)
        without = _count(machine, lambda: plain.train_batch(data))
        within = _count(machine, lambda: ours.train_batch(data))
        least = int(not machine.simulated)  # a profiler without permission to trace finds no kernels
        results.add("kernels and copies of an iteration without Perseus", without, at_least=least)
        results.add("kernels and copies more with it", within - without, at_least=0, at_most=0)


def _count(machine: Any, function: Callable[[], object]) -> int:
    """Return the number of kernels and copies that a function launches on the GPU."""
    machine.synchronize()
    with profile(activities=list(supported_activities())) as found:
        function()
        machine.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in found.events())


def alarms(machine: Any, results: Results) -> None:
    """Train at full load for three minutes, in which the driver must not be reported as slow."""
    setup, now_s = SETUPS["bf16"], machine.timebase.now_s
    with training_on(machine) as folder:
        block = block_of(machine, "run", folder)
        with engine_of(machine, setup, block) as engine:
            data = batches(machine, setup)
            engine.train_batch(data)
            begin_s = now_s()
            while now_s() - begin_s < machine.seconds(180.0):
                engine.train_batch(data)
            trained_s = now_s() - begin_s
        records = list(read_records(Path(block["output_dir"])))
    iterations = [record for record in records if isinstance(record, IterationRecord)]
    results.add("time at full load", trained_s, "s")
    results.add("iterations", len(iterations), at_least=1)
    failures = [record for record in records if isinstance(record, Failed)]
    results.add("failures, such as of a driver taken for slow", len(failures), at_most=0)
    results.add("iterations after a failure", sum(bool(one.failed_ranks) for one in iterations), at_most=0)
