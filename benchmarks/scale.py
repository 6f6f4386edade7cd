"""What Perseus costs a job of many ranks: its real code on a modelled network, and on gloo.

    python benchmarks/scale.py                 # 64, 1 024 and 10 240 ranks on a modelled network
    python benchmarks/scale.py --real 32 64    # as many processes on gloo, here

On the modelled network all ranks pass on reports and answers by the real code, in one process. Rank 0 and a leaf are
whole: they go through the phases of run mode, with policy, stragglers and records. The others report what the leaf
reports, with noise, and one pipeline becomes slow. A message takes the latency and its bytes divided by the bandwidth;
a rank sends, and receives, one message after the other. Processor time is measured on this machine, by thread.

On gloo each process is a rank with the real exchange and no training; times are of this machine, which all share.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from scale_network import (  # type: ignore[import-not-found]
    BANDWIDTH_B_PER_S,
    LATENCY_S,
    ModelCommunicator,
    Network,
    wait_s,
)

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.rank_report import RankReport
from perseus_ds.artifacts.run_file import FILE_NAME, read_records
from perseus_ds.artifacts.run_records import ClockRefused, Started
from perseus_ds.device.clock_controller import ClockController
from perseus_ds.device.gpu.driver_call import DriverCall
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.moments import PassedMoment
from perseus_ds.device.timers import FinishedIteration, HostExecution, Span
from perseus_ds.distributed import Communicator, PipelineTopology
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Schedule, read_schedule, schedule_class
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.mode_driver import ModeDriver
from perseus_ds.runtime.phases import IterationMeasurement
from perseus_ds.runtime.recorder import IterationContext, Recorder
from perseus_ds.runtime.report_exchange import ReportExchange

SIZES = (64, 1024, 10240)
STAGES, TENSOR, MICRO_BATCHES, PLANS = 8, 8, 32, 50
ITERATION_S = 3.0
LIKELY_ITERATION_S = 10.0
UNTIL_RUN, MEASURED, LEAF = 60, 24, 1
REAL_ITERATION_S = 0.1
SLOW_PIPELINE, SLOWER = 1, 1.2
DEFAULT_J, PLANNED_J = 900.0, 800.0
STORE = "rank 0: set-up, processor time with the key-value store [s]"


class RealRank:
    """A rank on the modelled network that decides, reports and records by the real code.

    Attributes:
        training_s: Processor time of its training thread in each iteration [s].
        reported: Its last report, as numbers.
        driver: Of its mode.
    """

    def __init__(self, communicator: ModelCommunicator, folder: Path, schedule: Schedule) -> None:
        block = {"mode": "run", "device": "simulated", "output_dir": str(folder), "frontier": str(folder / "frontier")}
        config = parse_block({**block, "cache": False})
        gpu = SimulatedGpu.named("a100-sxm")
        timers = HostExecution()
        clocks = ClockController(gpu, _raise, lambda refusal: None, timers.use_device)
        self._rank = Rank(communicator, gpu, DriverCall(3.0), clocks, timers, torch.device("cpu"))
        info = ProfileInfo(
            simulated=True,
            gpu=gpu.name,
            stages=STAGES,
            pipeline_ranks=STAGES,
            schedule=schedule.name,
            micro_batches=MICRO_BATCHES,
            data_parallel=communicator.topology.data_parallel,
        )
        job = Job(config, schedule, info)
        self.recorder = Recorder(communicator, folder, simulated=True)
        self.control = JobControl(config.policy, communicator.topology.data_parallel, self._status)
        self.training_s: list[float] = []
        self.driver = ModeDriver(job, self._rank, self.recorder, self.control, passes=None, on_error=_raise)
        self.recorder.start(job.started(communicator, gpu.name))
        self._spans = [
            Span(Compute(instruction), 0.01 * number, 0.01 * number + 0.009)
            for number, instruction in enumerate(schedule.instructions[communicator.topology.pipeline_rank])
        ]

    def iterate(self, slow: float) -> None:
        """End an iteration, and report it."""
        end_s = ITERATION_S * slow
        finished = FinishedIteration(PassedMoment(0.0), PassedMoment(end_s), lambda: end_s, lambda: self._spans)
        energy_j = energy_of(self.driver.next.phase)
        seen = IterationMeasurement(finished, lambda: energy_j, lambda: True, (0.0, end_s), {}, False)
        own = RankReport(math.nan, math.nan, 12, 0, False, 1200.0, 1200.0)
        began_s = time.thread_time()
        self.driver.end_iteration(seen, own, 1)
        self.training_s.append(time.thread_time() - began_s)

    def close(self) -> None:
        """End its threads."""
        self.recorder.close()
        self._rank.clocks.close()
        self._rank.driver.close()

    def _status(self) -> dict[str, Any]:
        facts, last = self.recorder.facts().model_dump(mode="json"), self.recorder.last
        now = {"phase": self.driver.next.phase, "next": dict(self.driver.next.status)}
        return facts | now | {"last": last.model_dump() if last else {}}


def energy_of(phase: str) -> float:
    """Return the energy of a GPU in an iteration of a phase [J]."""
    return PLANNED_J if phase == "run" else DEFAULT_J


def _raise(error: Exception) -> None:
    raise error


def topology_of(rank: int, ranks: int, stages: int = STAGES, tensor: int = TENSOR) -> PipelineTopology:
    """Return the place of a rank as DeepSpeed numbers them: by stage, then by pipeline, then by tensor parallelism."""
    pipelines = ranks // (stages * tensor)
    in_stage = pipelines * tensor
    within = rank % in_stage
    return PipelineTopology(
        rank,
        tuple(stage * in_stage + within for stage in range(stages)),
        within // tensor,
        pipelines,
        tuple(range(rank - rank % tensor, rank - rank % tensor + tensor)),
    )


def save_frontier(folder: Path, schedule: Schedule) -> None:
    """Save plans of every length from the fastest on."""
    streams = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in schedule.instructions)
    times = [1 + 0.01 * number for number in range(PLANS)]
    plans = tuple(
        FrequencyPlan(
            streams,
            tuple((1410 - 15 * number,) * len(s) for s in streams),
            ITERATION_S * time_,
            7200 * (1 - (time_ - 1) / 3),
        )
        for number, time_ in enumerate(times)
    )
    provenance = Provenance(
        schedule=schedule.name,
        micro_batches=MICRO_BATCHES,
        stages=STAGES,
        blocking_power_w=80.0,
        solver="none",
        simulated=True,
    )
    times_s = {(i.stage, i.kind, 1410 - 15 * n): 0.009 for stream in streams for i in stream for n in range(PLANS)}
    Frontier(plans, ITERATION_S, plans[0], provenance, times_s).save(folder / "frontier")


def modelled(ranks: int, until_run: int = UNTIL_RUN, measured: int = MEASURED) -> dict[str, float]:
    """Return figures of a job on the modelled network, of its last iterations."""
    network = Network(range(ranks))
    pipeline_of_rank = np.array([topology_of(rank, ranks).data_parallel_rank for rank in range(ranks)])
    log: list[Any] = []
    schedule = read_schedule(schedule_class("1f1b"), ranks=STAGES, micro_batches=MICRO_BATCHES)
    with tempfile.TemporaryDirectory() as name:
        save_frontier(Path(name), schedule)
        began_s = time.thread_time()
        whole = {
            rank: RealRank(
                ModelCommunicator(network, topology_of(rank, ranks), pipeline_of_rank if rank == 0 else None, log),
                Path(name),
                schedule,
            )
            for rank in (0, LEAF)
        }
        built_s, built = time.thread_time() - began_s, len(log)
        others = [rank for rank in range(ranks) if rank not in whole]
        draw = np.random.default_rng(0)
        slow = SLOWER if pipeline_of_rank.max() > 0 else 1.0
        rounds_s, recorded, phases, waits = [], [], [], []
        for number in range(until_run + measured):
            energy_j = energy_of(whole[0].driver.next.phase)
            network.begin_round()
            for rank, real in whole.items():
                network.rank = rank
                real.iterate(slow)
            if number == until_run:
                whole[LEAF].recorder.own_event(ClockRefused(rank=LEAF, clock_mhz=1410, reached_mhz=1200))
            reports = _reports(pipeline_of_rank[others], slow, energy_j, draw)
            for rank, report in zip(others, reports.tolist(), strict=True):
                network.exchange(rank, report)
            rounds_s.append(network.finish_round())
            phases.append(whole[0].driver.next.phase)
            waits.append(len(log))
            whole[0].recorder._writer.flush(60)  # type: ignore[union-attr]
            recorded.append((Path(name) / FILE_NAME).stat().st_size)
        told = sum(isinstance(record, ClockRefused) for record in read_records(Path(name)))
        status = len(json_of(whole[0].control))
        records_s = time.clock_gettime(
            time.pthread_getcpuclockid(whole[0].recorder._writer._thread.ident)  # type: ignore[union-attr,arg-type]
        )
        first, leaf = whole[0], whole[LEAF]
        for real in whole.values():
            real.close()
        last = slice(-measured, None)
        assert phases[last] == ["run"] * measured, phases
        plan = first.driver.next.plan
        assert plan == leaf.driver.next.plan, "both decide alike"
        assert bool(plan) is (slow > 1), "both follow the slow pipeline"
        assert told == 1, "the leaf's event is recorded"
        assert waits[-1] == waits[-measured - 1], "no iteration under plans waits for all ranks"
        return {
            "rank 0: training thread [ms]": 1e3 * statistics.median(first.training_s[last]),
            "rank 0: torch's threads [ms]": 1e3 * statistics.median(network.callbacks_s[0][last]),
            "rank 0: thread of records [ms]": 1e3 * records_s / (until_run + measured),
            "leaf: training thread [ms]": 1e3 * statistics.median(leaf.training_s[last]),
            "rank 0: sent and received [bytes]": statistics.median(network.bytes_of[0][last]),
            "leaf: sent and received [bytes]": statistics.median(network.bytes_of[LEAF][last]),
            "leaf: sent and received with an event to tell [bytes]": max(network.bytes_of[LEAF][last]),
            "leaf: messages": statistics.median(network.messages_of[LEAF][last]),
            "from the last report to the last answer, network [ms]": 1e3 * statistics.median(rounds_s[last]),
            "set-up: processor time on rank 0 and a leaf [s]": built_s,
            "set-up: collectives that wait for all ranks": built,
            "from then until a plan is kept: collectives that wait for all ranks": waits[-1] - built,
            "each of them, by its messages one after the other [ms]": 1e3 * wait_s(ranks),
            "run.jsonl [bytes an iteration]": (recorded[-1] - recorded[-measured - 1]) / measured,
            "control status [bytes]": status,
        }


def json_of(control: JobControl) -> str:
    """Return the answer to ``control status``."""
    return json.dumps(control.carry_out(parse_order({"command": "status"})))


def _reports(pipelines: Any, slow: float, energy_j: float, draw: Any) -> Any:
    """Return reports of ranks of some pipelines as numbers: alike, with noise, and one pipeline is slow."""
    like = RankReport(
        ITERATION_S * slow, energy_j, 12, 0, False, 1200.0, 1200.0, computed_s=2.7, tail_s=0.05, drift=0.01
    )
    rows = np.tile(like.as_numbers(), (len(pipelines), 1))
    rows[:, 1] *= draw.normal(1, 0.01, len(pipelines))
    rows[:, 7] *= draw.normal(1, 0.002, len(pipelines)) * np.where(pipelines == SLOW_PIPELINE, slow, 1.0)
    return rows


def alone(ranks: int) -> dict[str, float]:
    """Return what grows when this process is rank 0 of so many ranks, of which the others are only modelled.

    It trains long enough for a record with figures by rank.
    """
    pipeline_of_rank = np.array([topology_of(rank, ranks).data_parallel_rank for rank in range(ranks)])
    before = _resident_mb()
    network = Network(range(ranks), present=[0])
    communicator = ModelCommunicator(network, topology_of(0, ranks), pipeline_of_rank, [])
    exchange = ReportExchange(communicator)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(communicator, Path(folder), simulated=True)
        recorder.start(Started())
        for number in range(1, 201):
            network.begin_round()
            exchange.send(RankReport(ITERATION_S, 800.123456, 12, 0, False, 1200.0, 1200.0), [1.2] * ranks)
            network.finish_round()
            exchange.received()
            assert exchange.ranks is not None
            recorder.add(IterationContext(number, number, "run", plan=1), exchange.ranks)
            assert recorder.last is not None  # is written long before the next one ends
        status = len(recorder.facts().model_dump_json())
        recorder.close()
        lines = [len(line) for line in (Path(folder) / FILE_NAME).read_text().splitlines()]
    by_rank = max(lines) - statistics.median(lines)
    return {
        "rank 0: memory [MB]": _resident_mb() - before,
        "run.jsonl, figures by rank [bytes an iteration]": by_rank / math.ceil(ranks / 64),
        "control status, clocks by rank known [bytes]": status,
    }


def _resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def real(ranks: int, iterations: int = 100) -> dict[str, float]:
    """Return figures of so many processes on gloo."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = [
        context.Process(target=_one_of, args=(rank, ranks, iterations, address, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=600) for _ in range(2))
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)
    return {**found[0], **found[LEAF]}


def _one_of(rank: int, ranks: int, iterations: int, address: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    communicator = Communicator(topology_of(rank, ranks, tensor=1))
    who = {0: "rank 0", LEAF: "leaf"}.get(rank, "")
    figures = {
        f"{who}: set-up [s]": time.perf_counter() - began_s,
        STORE if rank == 0 else f"{who}: set-up, processor time [s]": time.process_time() - began_cpu_s,
    }
    exchange, ready_s = ReportExchange(communicator), time.process_time()
    training_s, waited_s = [], []
    if rank in (LEAF, ranks - 1):
        communicator.messages.add(b"an event")
    for _ in range(iterations):
        time.sleep(REAL_ITERATION_S)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        exchange.received()
        waited_s.append(time.perf_counter() - began_s)
        report = RankReport(1.0, 10.0, event_bytes=communicator.messages.size)
        exchange.send(report, [1.0] * (ranks // STAGES) if rank == 0 else ())
        training_s.append(time.thread_time() - began_cpu_s)
    told = exchange.received()
    assert told is not None
    assert told.energy_j == 10.0 * ranks
    assert len(communicator.messages.take_all()) == (2 if rank == 0 else 0)
    figures[f"{who}: training thread [ms]"] = 1e3 * statistics.median(training_s)
    figures[f"{who}: waited [ms], median"] = 1e3 * statistics.median(waited_s)
    figures[f"{who}: processor time of all threads [ms an iteration]"] = (
        1e3 * (time.process_time() - ready_s) / iterations
    )
    communicator.barrier()
    if who:
        results.put((rank, figures))
    dist.barrier()


def main() -> None:
    """Print the figures, and how they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, nargs="+", default=[], help="processes on gloo")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="ranks on the modelled network")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(alone(arguments.alone)))
        return
    if arguments.real:
        measured = {ranks: real(ranks) for ranks in arguments.real}
        _print(measured)
        if len(measured) > 1:
            (fewest, first), *_, (most, last) = sorted(measured.items())
            each_s = (last[STORE] - first[STORE]) / (most - fewest)
            print(f"by a straight line, the store takes {each_s * SIZES[-1]:.1f} s to connect {SIZES[-1]} ranks")
        return
    found = {}
    for ranks in arguments.ranks:
        found[ranks] = modelled(ranks)
        child = [sys.executable, __file__, "--alone", str(ranks)]
        printed = subprocess.run(child, check=True, capture_output=True, text=True).stdout
        found[ranks] |= json.loads(printed.splitlines()[-1])
        bytes_each = found[ranks]["run.jsonl [bytes an iteration]"]
        bytes_each += found[ranks]["run.jsonl, figures by rank [bytes an iteration]"]
        found[ranks][f"run.jsonl [MB a day, {LIKELY_ITERATION_S:.0f} s an iteration]"] = (
            bytes_each * 86400 / LIKELY_ITERATION_S / 1e6
        )
    print(f"latency {LATENCY_S * 1e6:.0f} us, bandwidth {BANDWIDTH_B_PER_S * 8e-9:.0f} Gbit/s, {STAGES} stages")
    _print(found)


def _print(found: dict[int, dict[str, float]]) -> None:
    sizes = sorted(found)
    print(f"{'ranks':60s}" + "".join(f"{size:>12d}" for size in sizes) + "     growth")
    for name in found[sizes[0]]:
        values = [found[size][name] for size in sizes]
        growth = values[-1] / values[0] if values[0] else math.nan
        print(f"{name:60s}" + "".join(f"{value:12.4g}" for value in values) + f"   x {growth:.3g}")


if __name__ == "__main__":
    main()
