"""Training on the GPU: the same bits and kernels as without Perseus, its overhead, predictions, and two stages."""

import json
import math
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import deepspeed
import torch
from gpu_checks.training import SETUPS, Setup, batches, bits_of, block_of, engine_of, training_on
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Failed
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import read_records
from perseus_ds.client import operations as engine_operations
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute

_DONE = {"observe": ("observe", 6), "profile": ("observe", 3), "run": ("run", 3)}
"""A phase, and the number of its iterations that suffices, by mode."""
_BF16 = SETUPS["bf16"]


def _iterations(output):
    return [record for record in read_records(output) if isinstance(record, IterationRecord)]


def _failures(output):
    return [record.error for record in read_records(output) if isinstance(record, Failed) and record.event == "failure"]


def untouched(machine, results):
    """Losses, weights, optimizer and random states have the same bits with and without Perseus."""
    with training_on(machine) as folder:
        for name in machine.setups:
            results.attempt(name, partial(_same_bits, machine, results, folder, name))


def _same_bits(machine, results, folder, name):
    setup, trained = SETUPS[name], {}
    for mode, (phase, least) in _DONE.items():
        block, losses, phases = block_of(machine, mode, folder), [], []
        with engine_of(machine, setup, block) as engine:
            data = batches(machine, setup)
            while phases.count(phase) < least and len(phases) < machine.most_iterations:
                phases.append(engine.perseus.phase)
                losses.append(repr(engine.train_batch(data).item()))
            trained[mode] = bits_of(engine, machine, losses)
        output = Path(block["output_dir"])
        changes = sum(record.clock_changes for record in _iterations(output))
        failures = _failures(output)
        results.add(f"{name}, {mode}: iterations in phase {phase}", phases.count(phase), at_least=least)
        results.add(f"{name}, {mode}: clock changes asked for", changes, at_least=int(mode != "observe"))
        results.add(f"{name}, {mode}: failures", len(failures), at_most=0)
        for error in failures:
            results.note(f"{name}, {mode}: {error}")
        if mode == "profile":
            results.add_fact(f"{name}: a profile was written", (output / "profile.csv").exists())
    counts = {len(bits["losses"]) for bits in trained.values()}
    plain, again = (_train_without(machine, setup, counts) for _ in range(2))
    for count in sorted(counts):
        _compare(results, f"{name}: {count} iterations without Perseus, twice", again[count], plain[count])
    for mode, bits in trained.items():
        _compare(results, f"{name}, {mode}", bits, plain[len(bits["losses"])])


def _train_without(machine, setup, counts):
    """Train a new engine without Perseus, and return its bits after some numbers of iterations."""
    losses, found = [], {}
    with engine_of(machine, setup, None) as engine:
        data = batches(machine, setup)
        for number in range(1, max(counts) + 1):
            losses.append(repr(engine.train_batch(data).item()))
            if number in counts:
                found[number] = bits_of(engine, machine, losses)
    return found


def _compare(results, what, ours, theirs):
    different = [name for name, bits in theirs.items() if ours[name] != bits]
    results.add_fact(f"{what}: the same bits", not different)
    if different:
        results.note(f"{what}: different are {', '.join(different)}")


def kernels(machine, results):
    """An iteration launches the same kernels with and without Perseus."""
    with (
        training_on(machine) as folder,
        engine_of(machine, _BF16, None) as plain,
        engine_of(machine, _BF16, block_of(machine, "observe", folder)) as ours,
    ):
        data = batches(machine, _BF16)
        for engine in (plain, ours) * 3:
            engine.train_batch(data)
        counts = []
        for engine in (plain, ours):
            machine.synchronize()
            with profile(activities=list(supported_activities())) as found:
                engine.train_batch(data)
                machine.synchronize()
            counts.append(sum(event.device_type == DeviceType.CUDA for event in found.events()))
    least = int(not machine.simulated)  # a profiler without permission to trace finds no kernels
    results.add("kernels and copies of an iteration without Perseus", counts[0], at_least=least)
    results.add("kernels and copies more with it", counts[1] - counts[0], at_least=0, at_most=0)


def alarms(machine, results):
    """Train at full load for three minutes, in which the driver must not be reported as slow."""
    now_s = machine.timebase.now_s
    with training_on(machine) as folder:
        block = block_of(machine, "run", folder)
        with engine_of(machine, _BF16, block) as engine:
            data = batches(machine, _BF16)
            engine.train_batch(data)
            begin_s = now_s()
            while now_s() - begin_s < machine.seconds(180.0):
                engine.train_batch(data)
            trained_s = now_s() - begin_s
        iterations, failures = _iterations(Path(block["output_dir"])), _failures(Path(block["output_dir"]))
    results.add("time at full load", trained_s, "s")
    results.add("iterations", len(iterations), at_least=1)
    results.add("failures, such as of a driver taken for slow", len(failures), at_most=0)
    results.add("iterations after a failure", sum(bool(one.failed_ranks) for one in iterations), at_most=0)


_KEPT, _FEWEST = 20, 5


def closure(machine, results):
    """Compare a profile's prediction for default clocks with 30 s of training."""
    now_s = machine.timebase.now_s
    with training_on(machine) as folder:
        block = block_of(machine, "profile", folder)
        output = Path(block["output_dir"])
        with ExitStack() as opened, engine_of(machine, _BF16, block) as engine:
            data = batches(machine, _BF16)
            for _ in range(machine.most_iterations):
                engine.train_batch(data)
                if engine.perseus.phase == "observe":
                    break
            assert (output / "profile.csv").exists(), "no profile was written; see what the job printed"
            finished = opened.enter_context(_kept_iterations(engine.perseus.runtime.timers))
            begin_s = now_s()
            while now_s() - begin_s < machine.seconds(30.0) or len(finished) < _FEWEST:
                engine.train_batch(data)
            spans = [span for iteration in finished for span in iteration.spans()]
        measured, profiled = StageProfile.load(output / "measured.csv"), StageProfile.load(output / "profile.csv")
        records = [record for record in _iterations(output) if record.phase == "observe"][2:]
    limits = {"at_least": 0.98, "at_most": 1.02}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        of_kind = [s for s in spans if isinstance(s.operation, Compute) and s.operation.instruction.kind is kind]
        time_s = statistics.median(span.time_s for span in of_kind)
        results.add(f"a {kind} in training, median", time_s * 1e3, "ms")
        results.add(f"a profiled {kind} to that", measured.at_highest_clock(0, kind).time_s / time_s, **limits)
    schedule = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=machine.size[3])
    predicted = problem_for(schedule, profiled).baseline
    time_s = statistics.fmean(record.time_s for record in records)
    energy_j = statistics.fmean(record.energy_j for record in records if record.energy_j is not None)
    results.add("iterations measured", len(records), at_least=1)
    results.add("time of an iteration", time_s * 1e3, "ms")
    results.add("predicted to measured time", predicted.time_s / time_s, **limits)
    results.add("energy of an iteration", energy_j, "J")
    results.add("predicted to measured energy", predicted.energy_j / energy_j, **limits)


@contextmanager
def _kept_iterations(timers):
    """Context manager of a list that receives the last iterations, with the times of all their passes."""
    kept, finish = [], timers.finish_iteration

    def finish_and_keep():
        kept.append(finish())
        del kept[:-_KEPT]
        return kept[-1]

    timers.finish_iteration = finish_and_keep
    with patch.object(engine_operations, "times_of", lambda follow, iteration: "passes"):
        yield kept


def overhead(machine, results):
    """Alternate iterations of 0.2 s and of 1 s with Perseus, and in two engines without it."""
    with training_on(machine) as folder:
        data = batches(machine, _BF16)
        with engine_of(machine, _BF16, None) as engine:
            least_s = min(_timed_s(machine, engine, data) for _ in range(5))
        for goal_s, turns, at_most in ((0.2, 40, 1.005), (1.0, 15, 1.002)):
            micro_batches = max(2, round(machine.seconds(goal_s) / least_s * machine.size[3]))
            size = (*machine.size[:3], micro_batches)
            for mode in ("observe", "run"):
                what, block = f"{mode}, iterations of {goal_s:g} s", block_of(machine, mode, folder, micro_batches)
                results.attempt(what, partial(_turns, machine, results, what, block, size, turns, at_most))


def _turns(machine, results, what, block, size, turns, at_most):
    data = batches(machine, _BF16, size)
    with (
        engine_of(machine, _BF16, None, size) as plain,
        engine_of(machine, _BF16, block, size) as ours,
        engine_of(machine, _BF16, None, size) as second,
    ):
        engines = plain, ours, second
        times_s = [[_timed_s(machine, engine, data) for engine in engines] for _ in range(machine.turns(turns))][3:]
    again = statistics.median(turn[2] / turn[0] for turn in times_s)
    ratios = [turn[1] / turn[0] for turn in times_s]
    # The standard error of a median is 1.2533 times that of a mean, for a normal distribution.
    error = 1.2533 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    results.add(f"{what}: time without Perseus, median", statistics.median(t[0] for t in times_s) * 1e3, "ms")
    results.add(f"{what}: a second engine without Perseus to the first", again)
    results.add(f"{what}: standard error of the next figure", error)
    limit = at_most + abs(again - 1) + 2 * error
    results.add(f"{what}: with Perseus to without", statistics.median(ratios), at_most=limit)


def _timed_s(machine, engine, data):
    machine.synchronize()
    began_s = machine.timebase.now_s()
    engine.train_batch(data)
    machine.synchronize()
    return machine.timebase.now_s() - began_s


_RANKS = 2
_RANK = "import sys; from gpu_checks.training_checks import train_one_rank; train_one_rank(*sys.argv[1:])"


def stages(machine, results):
    """Losses and weights of two stages on one GPU have the same bits with and without Perseus.

    Transfers are by gloo through the host's memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = {"profile": _train_stages(machine, Path(folder), "profile", machine.most_iterations)}
        iterations = len(found["profile"][0]["losses"])
        for mode in ("observe", "plain"):
            found[mode] = _train_stages(machine, Path(folder), mode, iterations)
    for mode in ("observe", "profile"):
        for rank in range(_RANKS):
            same = found[mode][rank]["bits"] == found["plain"][rank]["bits"]
            results.add_fact(f"{mode}: stage {rank} has the same bits", same)
        results.add(f"{mode}: iterations in phase observe", found[mode][0]["observed"], at_least=1)
    transfers_s = found["profile"][0]["transfers_s"]
    results.add("transfers between the stages, measured", len(transfers_s), at_least=2)
    results.add("longest of them", max(transfers_s, default=0.0) * 1e3, "ms")


def _train_stages(machine, parent, mode, iterations):
    """Train in a mode, or ``plain``, for some iterations or until there is a profile, and return the ranks' reports."""
    folder = parent / mode
    folder.mkdir()
    place = {"WORLD_SIZE": str(_RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(_RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    machine_name = f"{type(machine).__module__}:{type(machine).__name__}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(folder), mode, str(iterations), machine_name],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        printed = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        assert not rank.returncode, f"{mode}: a rank failed: {text[-1500:]}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(_RANKS)]


def train_one_rank(folder, mode, iterations, machine_name):
    """Train as one rank of the job, and write its report."""
    machine, setup, rank = pkgutil.resolve_name(machine_name)(), Setup(), int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    _transfer_through_host()
    output = Path(folder) / "perseus"
    block = None if mode == "plain" else {**block_of(machine, mode, Path(folder)), "output_dir": str(output)}
    losses, phases = [], []
    with engine_of(machine, setup, block, machine.stage_size, stages=_RANKS) as engine:
        data = batches(machine, setup, machine.stage_size)
        while len(losses) < int(iterations) and not (mode == "profile" and phases.count("observe") == 2):
            phases.append("" if block is None else engine.perseus.phase)
            losses.append(repr(engine.train_batch(data).item()))
        bits = bits_of(engine, machine, losses)
    found = {
        "bits": {name: repr(value) for name, value in bits.items()},
        "losses": losses,
        "observed": phases.count("observe"),
    }
    if mode == "profile" and rank == 0:
        transfers = StageProfile.load(output / "profile.csv").info.transfers
        found["transfers_s"] = [transfer.time_s for transfer in transfers]
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _transfer_through_host():
    """Make all sends and receives use the host's memory, since gloo cannot send from a GPU.

    DeepSpeed's engine and the measurement of blocking power look these functions up at each use.
    """
    send, receive = torch.distributed.send, torch.distributed.recv

    def send_from_host(tensor, *arguments, **named):
        return send(tensor.detach().cpu(), *arguments, **named)

    def receive_on_host(tensor, *arguments, **named):
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = receive(on_host, *arguments, **named)
        tensor.data.copy_(on_host)
        return source

    torch.distributed.send, torch.distributed.recv = send_from_host, receive_on_host
