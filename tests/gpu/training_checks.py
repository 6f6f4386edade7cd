"""Training on the GPU under Perseus: bit for bit what it is without, in no more memory, and without kernels of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu.results import Results
from gpu.training import SETUPS, Setup, Trained, batches, block_of, make_engine, train, training_on
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from perseus_ds.engine.replay import Replay

_MODES = ("observe", "profile", "run")


def untouched(machine: Any, results: Results) -> None:
    """Losses, weights, optimizer state and random numbers, with and without Perseus, are the same bits."""
    with training_on(machine) as folder:
        for name, setup in SETUPS.items():
            if name in machine.setups:
                results.attempt(name, lambda name=name, setup=setup: _same_bits(machine, results, folder, name, setup))


def _same_bits(machine: Any, results: Results, folder: Path, name: str, setup: Setup) -> None:
    plain = train(machine, setup, None, machine.iterations)
    _compare(
        results, f"{name}: a second training without Perseus", train(machine, setup, None, machine.iterations), plain
    )
    for mode in _MODES:
        found = train(machine, setup, block_of(machine, mode, folder), machine.iterations)
        _compare(results, f"{name}, {mode}", found, plain)
        if mode == "run":
            results.add(f"{name}: iterations under a plan", found.phases.count("run"), at_least=1)
        if mode == "profile":
            results.add_fact(f"{name}: a profile was measured", "observe" in found.phases)
        if found.changes is not None:
            results.add(f"{name}, {mode}: clock changes asked for", found.changes)


def _compare(results: Results, what: str, ours: Trained, theirs: Trained) -> None:
    different = [name for name, bits in theirs.bits.items() if ours.bits[name] != bits]
    results.add_fact(f"{what}: the same bits", not different)
    if different:
        results.note(f"{what}: different are {', '.join(different)}")


def memory(machine: Any, results: Results) -> None:
    """Peak memory while passes are repeated, against training's; and a GPU that runs out of it meanwhile."""
    with training_on(machine) as folder:
        setup = SETUPS["bf16"]
        results.attempt("peak", lambda: _peak(machine, results, folder, setup))
        plain = train(machine, setup, None, machine.iterations)
        for call in (1, 6):
            what = f"out of memory in repeated pass {call}"
            results.attempt(what, lambda what=what, call=call: _no_memory(machine, results, folder, what, call, plain))


def _peak(machine: Any, results: Results, folder: Path, setup: Setup) -> None:
    engine, data = make_engine(machine, setup, block_of(machine, "profile", folder)), batches(machine, setup)
    training_bytes, profiling_bytes = [], []
    for _ in range(machine.iterations):
        machine.forget_peak()
        before = engine.perseus.phase
        engine.train_batch(data)
        profiles = before == "warm-up" and engine.perseus.phase == "observe"
        (profiling_bytes if profiles else training_bytes).append(machine.peak_bytes())
    engine.destroy()
    peak_bytes = max(training_bytes[1:])
    results.add("peak memory of training", peak_bytes / 2**20, "MiB")
    results.add("peak while passes are repeated, to that", profiling_bytes[0] / peak_bytes, at_most=1.02)


def _no_memory(machine: Any, results: Results, folder: Path, what: str, call: int, plain: Trained) -> None:
    run, calls = Replay.run, []

    def run_or_fail(replay: Replay, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            machine.run_out_of_memory()
        run(replay, *arguments)

    with patch.object(Replay, "run", run_or_fail):
        found = train(machine, SETUPS["bf16"], block_of(machine, "profile", folder), machine.iterations)
    results.add_fact(f"{what}: it was reached", len(calls) >= call)
    _compare(results, what, found, plain)


def kernels(machine: Any, results: Results) -> None:
    """Collectives of Perseus launch no kernel; an iteration launches the same ones with and without it."""
    with training_on(machine) as folder:
        setup = SETUPS["bf16"]
        plain, plain_data = make_engine(machine, setup, None), batches(machine, setup)
        ours, data = make_engine(machine, setup, block_of(machine, "observe", folder)), batches(machine, setup)
        for _ in range(3):
            plain.train_batch(plain_data)
            ours.train_batch(data)
        communicator = ours.perseus.runtime._communicator

        def collectives() -> None:
            communicator.barrier()
            communicator.all_gather("text")
            communicator.gather("text")
            communicator.all_max(1.0)
            communicator.stage_max(1.0)
            communicator.from_first(lambda: 1)
            communicator.all_gather_numbers([1.0])
            communicator.start_all_gather([1.0]).result()

        results.add("kernels and copies by collectives", len(_on_the_gpu(machine, collectives)), at_most=0)
        without = _on_the_gpu(machine, lambda: plain.train_batch(plain_data))
        within = _on_the_gpu(machine, lambda: ours.train_batch(data))
        results.add("kernels and copies of an iteration without Perseus", len(without))
        results.add("kernels and copies more with it", len(within) - len(without), at_least=0, at_most=0)
        ours.destroy()
        plain.destroy()


def _on_the_gpu(machine: Any, function: Callable[[], object]) -> list[str]:
    """Return the names of what a function makes the GPU do."""
    machine.synchronize()
    with profile(activities=list(supported_activities())) as found:
        function()
        machine.synchronize()
    return [event.name for event in found.events() if event.device_type == DeviceType.CUDA]


def alarms(machine: Any, results: Results) -> None:
    """Train at full load for five minutes; nobody may take the driver for slow."""
    with training_on(machine) as folder:
        setup, now_s = SETUPS["bf16"], machine.timebase.now_s
        engine, data = make_engine(machine, setup, block_of(machine, "run", folder)), batches(machine, setup)
        engine.train_batch(data)
        rank, supervision = engine.perseus.runtime._rank, engine.perseus.runtime._supervision
        begin_s, longest_s, hung = now_s(), 0.0, 0
        iterations = failed = 0
        while now_s() - begin_s < machine.seconds(300.0):
            engine.train_batch(data)
            iterations += 1
            longest_s = max(longest_s, rank.clocks.failing_s, rank.driver.failing_s)
            hung += supervision.driver_hangs()
            failed += engine.perseus.runtime._failed
        results.add("time at full load", now_s() - begin_s, "s")
        results.add("iterations", iterations, at_least=1)
        results.add("longest wait for the driver seen", longest_s, "s")
        results.add("iterations in which the driver was taken for slow", hung, at_most=0)
        results.add("iterations after a failure", failed, at_most=0)
        engine.destroy()
