"""Overhead of Perseus: per instruction on the training thread, and per iteration of DeepSpeed.

    python benchmarks/overhead.py                  # with Zeus's client if `zeus` is importable; about eight minutes

Clocks are set through the real NVML binding on the tests' stub driver, whose calls take 15 ms like those of a real
driver. Zeus's client path is ``PipelineFrequencyOptimizer.on_instruction_begin`` with its ``FrequencyController``
process and queue, but without the ``torch.cuda.synchronize()`` at every instruction, because there is no GPU. For the
same reason, our marks are written by the CPU. Marks written by a GPU would take 3 µs (docs/evidence.md).

Per instruction: the clock changes at every instruction, including early requests. The result is the processor time of
the training thread, because iterations of instructions without passes are too short for the agent to follow.

Iterations of DeepSpeed: the clock changes as often as in plans, which hold each clock for at least twice the driver's
latency. A pass takes a fixed time, as on an accelerator. For half of it the host computes in Python, like a host that
launches kernels, and then it waits for the rest. Each process measures both modes, alternating with iterations of the
same engine without Perseus. The results of each process are printed when it ends, then the means over processes with
their standard errors.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MICRO_BATCHES, ITERATIONS = 64, 60
ENGINE_MICRO_BATCHES = 10
# Time of a pass [s], processes, and turns in each of them. Passes of large models take 20 to 300 ms.
ENGINES = {"0.2 s": (0.01, 5, 12), "2 s": (0.1, 2, 3)}
PARTS = ("instruction", "agent", *ENGINES)
_ITERATIONS_OF_TURN = 3
# Before, a job measures the refresh period of its energy counter once, which delays training by about 0.4 s.
_WARM_UP = 15
MODES = ("observe", "run")
CLOCKS_MHZ = (1410, 1200)
AGENT_PASSES, AGENT_CHANGES = 20, 4
# Ranks of a node, and processes that keep cores busy.
AGENT_CASES = (8, 0), (8, 2), (1, 2)
AGENT_SKIPPED_S, AGENT_MEASURED_S = 5.0, 20.0
INSTRUCTION_S = 0.05
LATENCY_S = 0.015
LAYERS = 4
# Delay with which time.sleep returns, which is almost never exceeded [s].
_SLEEPS_LATE_S = 0.0004


def main() -> None:
    """Measure each part in separate processes, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument(
        "--processes", type=int, help="instead of five for iterations of 0.2 s and two for those of 2 s"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure; the last two are iterations"
    )
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child]()))
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from stub_nvml.controller import StubNvml, build  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        stub_library = build(Path(folder))
        stub = StubNvml(stub_library, Path(folder) / "state", 1)
        stub.gpus[0].lock_latency_s = LATENCY_S
        child = partial(run, folder=Path(folder), environment=stub.environment)
        if "instruction" in arguments.only:
            report_instruction(child)
        if "agent" in arguments.only:
            report_agent(stub_library, Path(folder))
        for name, (pass_s, processes, _) in ENGINES.items():
            if name not in arguments.only:
                continue
            passes = f"{2 * ENGINE_MICRO_BATCHES} passes of {1e3 * pass_s:.0f} ms"
            say(f"Iterations of DeepSpeed's pipeline engine, one stage, {passes}:")
            report_engines(name, child, arguments.processes or processes)


def say(text: str) -> None:
    """Print a text without buffering."""
    print(text, flush=True)


def report_instruction(child: Callable[[str], Any]) -> None:
    """Measure and print the processor time per instruction."""
    say("Processor time of the training thread per instruction (begin and end, the clock changes every time):")
    (ours_s, fastest_s), zeus = child("perseus"), child("zeus")
    figures = f"{ours_s * 1e6:6.1f} µs, {fastest_s * 1e6:.1f} in the fastest iteration"
    say(f"  perseus-ds  {figures}; marks by the CPU")
    if zeus is None:
        say("  zeus        skipped: its pipeline optimizer cannot be imported (pip install zeus[pfo])")
    else:
        say(f"  zeus        {zeus[0] * 1e6:6.1f} µs, without its synchronize\n  ratio       {ours_s / zeus[0]:6.2f}")


def report_agent(library: Path, folder: Path) -> None:
    """Measure and print the processor time of an agent, and the lateness of its clock requests."""
    from stub_nvml.controller import StubNvml

    say(f"The agent of a node, iterations of 0.2 s with {AGENT_PASSES} passes and {AGENT_CHANGES} changes:")
    for number, loops in AGENT_CASES:
        name = f"ranks: {number}, busy loops: {loops}"
        stub = StubNvml(library, folder / f"{number}-{loops}", number)
        environment = {**os.environ, **stub.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", f"rank {rank} of {number}"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(number)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            while rank.stdout.readline() not in ("ready\n", ""):  # DeepSpeed prints lines before
                pass
        (agent,) = stub.agents()
        time.sleep(AGENT_SKIPPED_S)
        before_s, switches, began_s = _used_s(agent), _wake_ups(agent), time.perf_counter()
        time.sleep(AGENT_MEASURED_S)
        elapsed_s = time.perf_counter() - began_s
        of_loop, of_drivers = ((after - at) / elapsed_s for after, at in zip(_used_s(agent), before_s, strict=True))
        wakes = (_wake_ups(agent) - switches) / elapsed_s
        ends = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
        for loop in busy:
            loop.kill()
        late_s = [
            late_s
            for gpu, ends_s in zip(stub.gpus, ends, strict=True)
            for late_s in _late_s(gpu.change_times_s(), ends_s)
        ]
        quantiles = [1e3 * value for value in (statistics.median(late_s), sorted(late_s)[int(0.99 * len(late_s))])]
        shown = f"late by {quantiles[0]:.2f} ms at the median, {quantiles[1]:.2f} ms at the 99th percentile"
        used = f"{of_loop:.2%} of a core, and {of_drivers:.2%} in the threads that call drivers"
        say(f"  {name:24} {used}, {wakes:.0f} wake-ups a second; {len(late_s)} clocks requested, {shown}")


def _used_s(agent: Any) -> tuple[float, float]:
    """Return the processor time of an agent's loop, and that of its threads that call drivers [s]."""
    used_s = {thread.id: thread.user_time + thread.system_time for thread in agent.threads()}
    return used_s.pop(agent.pid), sum(used_s.values())


def _wake_ups(process: Any) -> int:
    """Return how many times the threads of a process have waited."""
    waits = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
        waits += int(line.split()[1])
    return waits


def _late_s(changes_s: list[float], ends_s: list[float]) -> list[float]:
    """Return the time from the end of a pass to each clock request [s]."""
    after = [bisect.bisect_right(ends_s, change_s) - 1 for change_s in changes_s]
    return [change_s - ends_s[n] for change_s, n in zip(changes_s, after, strict=True) if 0 <= n < len(ends_s) - 1]


def rank(number: int, ranks: int) -> list[float]:
    """Run a rank that marks its passes, and return the ends of passes before clock changes [s]."""
    held = AGENT_PASSES // AGENT_CHANGES
    runtime, passes = _runtime(number, ranks, micro_batches=AGENT_PASSES // 2, held=held)
    print("ready", flush=True)
    ends_s: list[float] = []
    end_s = time.perf_counter() + AGENT_SKIPPED_S + AGENT_MEASURED_S + 1
    while time.perf_counter() < end_s:
        with runtime.iteration():
            for position, instruction in enumerate(passes, 1):
                with runtime.instruction(instruction):
                    time.sleep(0.2 / AGENT_PASSES)
                if position % held == 0:
                    ends_s.append(time.perf_counter())
    runtime.close()
    return ends_s


def report_engines(name: str, child: Callable[[str], Any], processes: int) -> None:
    """Measure and print the overhead per iteration of DeepSpeed, for each process and over all."""
    say("  process  mode     plain       added             plain again  processor time of the training thread")
    added: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(processes):
        figures = iter(child(name))
        for mode in MODES:
            plain_s, added_s, error_s, again_s, cpu_s = (next(figures) for _ in range(5))
            added[mode].append(added_s / plain_s)
            shown = f"{1e3 * plain_s:7.1f} ms  {added_s / plain_s:+.2%} ± {error_s / plain_s:.2%}"
            say(f"  {number + 1:7}  {mode:7} {shown}   {again_s / plain_s:+.2%}       {cpu_s / plain_s:+.2%}")
    for mode, found in added.items():
        error = f"{statistics.stdev(found) / len(found) ** 0.5:.2%}" if len(found) > 1 else "unknown"
        say(f"  {mode}: {statistics.mean(found):+.2%} ± {error} over {len(found)} processes")


def run(name: str, folder: Path, environment: dict[str, str]) -> list[float] | None:
    """Run one part in a separate process, and return its figures. None if it cannot run."""
    command = [sys.executable, __file__, "--child", name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        if name == "zeus" and "No module named" in done.stderr:
            return None
        raise SystemExit(done.stderr[-3000:])
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def perseus() -> list[float]:
    """Return the median and least processor time of the training thread per instruction [s]."""
    runtime, instructions = _runtime(instruction_s=INSTRUCTION_S)

    def iteration() -> None:
        with runtime.iteration():
            began_s = time.thread_time()
            for instruction in instructions:
                with runtime.instruction(instruction):
                    pass
            times_s.append((time.thread_time() - began_s) / len(instructions))

    times_s: list[float] = []
    _repeat(iteration)
    runtime.close()
    return [statistics.median(times_s), min(times_s)]


def _runtime(number: int = 0, ranks: int = 1, **plan: Any) -> tuple[Any, Any]:
    """Return Perseus under a plan, in a job with one pipeline per rank, and the passes of the rank."""
    import torch.distributed as dist

    from perseus_ds.client.runtime import PerseusRuntime

    os.environ.update(LOCAL_RANK=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT="29518")
    dist.init_process_group("gloo", rank=number, world_size=ranks)
    schedule, frontier = _plan(**plan)
    blocks = [{"mode": "run", "device": "nvml", "frontier": frontier, "output_dir": tempfile.mkdtemp()}]
    dist.broadcast_object_list(blocks)  # the same on all ranks
    runtime = PerseusRuntime.for_loop(blocks[0], schedule, pipeline=(number,))
    return runtime, schedule.instructions[0][:-1]


def _plan(instruction_s: float | None = None, micro_batches: int = MICRO_BATCHES, held: int = 1) -> tuple[Any, str]:
    """Return a schedule and a plan for it.

    Args:
        instruction_s: Time of an instruction [s]. Without it, every change is made, regardless of how short it is.
        micro_batches: Number of micro-batches per iteration.
        held: Number of consecutive instructions at one clock.
    """
    from perseus_ds.artifacts.frontier import Frontier, Provenance
    from perseus_ds.artifacts.plan import FrequencyPlan
    from perseus_ds.pipeline.commands import read_schedule, schedule_class
    from perseus_ds.pipeline.instruction import Kind

    schedule = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=micro_batches)
    stream = tuple(i for i in schedule.instructions[0] if i.kind is not Kind.TAIL)
    clocks = tuple(CLOCKS_MHZ[position // held % 2] for position in range(len(stream)))
    plan = FrequencyPlan((stream,), (clocks,), 1.0, 100.0)
    provenance = Provenance(schedule="1f1b", micro_batches=micro_batches, stages=1, blocking_power_w=80, solver="none")
    times_s = {(i.stage, i.kind, clock): instruction_s for i in stream for clock in CLOCKS_MHZ if instruction_s}
    return schedule, str(Frontier((plan,), 1.0, plan, provenance, times_s).save(tempfile.mkdtemp()))


def zeus() -> list[float]:
    """Return the same as :func:`perseus` for Zeus's client path, without its synchronisation [s]."""
    from zeus.optimizer.pipeline_frequency import optimizer as module
    from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController

    module.sync_execution = lambda *arguments, **keywords: None
    client = module.PipelineFrequencyOptimizer.__new__(module.PipelineFrequencyOptimizer)
    names = ["forward", "backward"] * MICRO_BATCHES
    client.device_id = 0
    client.freq_schedule = [(name, CLOCKS_MHZ[position % 2]) for position, name in enumerate(names)]
    client.freq_schedule_iter = iter(client.freq_schedule)
    client.frequency_controller = FrequencyController(0)
    times_s: list[float] = []

    def iteration() -> None:
        client.on_step_begin()
        began_s = time.thread_time()
        for name in names:
            client.on_instruction_begin(name)
            client.on_instruction_end(name)
        times_s.append((time.thread_time() - began_s) / len(names))
        client.on_step_end()

    _repeat(iteration)
    client.frequency_controller._proc.kill()  # its queue holds minutes of clocks
    client.frequency_controller._q.cancel_join_thread()
    return [statistics.median(times_s), min(times_s)]


def _repeat(iteration: Callable[[], None]) -> None:
    for _ in range(ITERATIONS):
        iteration()
        time.sleep(0.02)


def engines(pass_s: float, turns: int) -> list[float]:
    """Return five figures for each mode [s].

    They are the time per iteration of DeepSpeed alone, the time that Perseus adds, its standard error, the time that a
    second turn without Perseus adds, and the processor time that Perseus adds on the training thread.

    The class of one engine alternates between DeepSpeed's own and that with Perseus. A turn with Perseus is compared
    with the turns before and after it. The first iteration of each turn is omitted, and so are the extreme turns, a
    tenth at each end.
    """
    import torch

    import perseus_ds

    held = max(1, math.ceil(2 * LATENCY_S / pass_s))
    _, frontier = _plan(micro_batches=ENGINE_MICRO_BATCHES, held=held)
    engine = _engine(None, pass_s, ENGINE_MICRO_BATCHES)
    plain = type(engine)
    data = iter(lambda: (torch.zeros(1, 8), torch.zeros(1, 8)), None)
    found: list[float] = []
    for mode in MODES:
        block = {"mode": mode, "device": "nvml", "output_dir": tempfile.mkdtemp()}
        perseus_ds.attach(engine, {**block, "frontier": frontier} if mode == "run" else block)
        found += _compared(engine, type(engine), plain, data, turns)
        perseus_ds.detach(engine)
    return found


def _compared(engine: Any, with_perseus: type, plain: type, data: Any, turns: int) -> list[float]:
    """Return the five figures of a mode."""
    engine.__class__ = with_perseus
    for _ in range(_WARM_UP):
        engine.train_batch(data)
    before = first = _turn(engine, plain, data)
    added, again = [], []
    for _ in range(turns):
        ours, after = (_turn(engine, c, data) for c in (with_perseus, plain))
        added.append([o - (b + a) / 2 for o, b, a in zip(ours, before, after, strict=True)])
        again.append(after[0] - before[0])
        before = after
    engine.__class__ = with_perseus
    time_s, error_s = _mean([seconds for seconds, _ in added])
    return [first[0], time_s, error_s, _mean(again)[0], _mean([cpu for _, cpu in added])[0]]


def _mean(values: list[float]) -> tuple[float, float]:
    """Return the mean without a tenth of the values at each end, and its standard error."""
    left_out = len(values) // 10
    kept = sorted(values)[left_out : len(values) - left_out]
    return statistics.mean(kept), statistics.stdev(kept) / len(kept) ** 0.5


def _turn(engine: Any, engine_class: type, data: Any) -> tuple[float, float]:
    """Return mean time and processor time of this thread per iteration with a class of the engine [s]."""
    engine.__class__ = engine_class
    times = [_timed(engine, data) for _ in range(_ITERATIONS_OF_TURN)][1:]
    return statistics.mean(time for time, _ in times), statistics.mean(cpu for _, cpu in times)


def _timed(engine: Any, data: Any) -> tuple[float, float]:
    """Return time and processor time of this thread for one iteration [s]."""
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    engine.train_batch(data)
    return time.perf_counter() - began_s, time.thread_time() - began_cpu_s


def _engine(block: dict[str, Any] | None, pass_s: float, micro_batches: int) -> Any:
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    import perseus_ds

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    layers = [LayerSpec(_working_layer(), _waiting(pass_s / LAYERS)) for _ in range(LAYERS)]
    module = PipelineModule(layers=layers, num_stages=1, loss_fn=torch.nn.MSELoss())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if block is not None:
        config["perseus"] = block
    built, *_ = perseus_ds.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return built


def _waiting(duration_s: float) -> Callable[[], object]:
    """Return a function of a given duration [s], which computes for half of it and waits for the rest."""

    def work() -> None:
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + duration_s / 2:
            pass
        time.sleep(duration_s / 2 - _SLEEPS_LATE_S)
        while time.perf_counter() < began_s + duration_s:
            pass

    return work


def _working_layer() -> type:
    """Return a class of layers that call a function in each pass and multiply by a weight."""
    import torch

    class Multiplied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, weight: Any, work: Any) -> Any:
            ctx.save_for_backward(inputs, weight)
            ctx.work = work
            work()
            return inputs * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            ctx.work()
            inputs, weight = ctx.saved_tensors
            return gradient * weight, (gradient * inputs).sum().view(1), None

    class WorkingLayer(torch.nn.Module):
        def __init__(self, work: Callable[[], object]) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self._work = work

        def forward(self, inputs: Any) -> Any:
            return Multiplied.apply(inputs, self.weight, self._work)  # type: ignore[no-untyped-call]

    return WorkingLayer


CHILDREN: dict[str, Callable[[], list[float]]] = {
    "perseus": perseus,
    "zeus": zeus,
    **{f"rank {place} of {ranks}": partial(rank, place, ranks) for ranks, _ in AGENT_CASES for place in range(ranks)},
    **{name: partial(engines, pass_s, turns) for name, (pass_s, _, turns) in ENGINES.items()},
}


if __name__ == "__main__":
    main()
