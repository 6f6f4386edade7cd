"""Cost of Perseus in a job with many ranks.

    python benchmarks/scale.py                         # rank 0 and a leaf of 64, 1 024 and 10 240 ranks
    python benchmarks/scale.py --clients 64 1024       # a store with as many connections

Rank 0 and a leaf go through the phases of run mode, with policy, stragglers and records, and exchange their reports by
a real store. The other ranks are one more client of it, which brings for each of them what the leaf reports, with
noise, and one pipeline becomes slow. Processor time is measured by thread.

With ``--clients``, each rank has a connection of its own, and one thread does the exchange of all of them, so that what
the store and its clients take is measured whole. Times are of this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pickle
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import ProfileInfo
from perseus_ds.artifacts.run_records import FILE_NAME, ClockRefused, read_records
from perseus_ds.clocks.events import PassedEvent
from perseus_ds.clocks.timers import FinishedIteration, HostExecution
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Schedule
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.reports import JobReport, RankReport, RankReports
from perseus_ds.protocol.layout import IterationEnergy
from perseus_ds.ranks import Communicator, Connection, Pending, PipelineTopology, StoreChannel
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.iterations import IterationMeasurement
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.mode_driver import ModeDriver
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.timebase import REAL_TIME

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from virtual.agent import clocks_of  # type: ignore[import-not-found]  # noqa: E402

SIZES = (64, 1024, 10240)
STAGES, TENSOR, MICRO_BATCHES, PLANS = 8, 8, 32, 50
ITERATION_S = 3.0
UNTIL_RUN, MEASURED, LEAF = 90, 24, 1
SLOW_PIPELINE, SLOWER = 1, 1.2
DEFAULT_J, PLANNED_J = 900.0, 800.0
FIELDS = [field.name for field in dataclasses.fields(RankReport)]
REPORT = len(FIELDS)


class RealRank:
    """A rank that decides, reports and records by the real code.

    Attributes:
        training_s: Processor time of its training thread in each iteration [s].
        reported: Its last report, as numbers.
        driver: Of its mode.
    """

    def __init__(self, communicator: Communicator, folder: Path, schedule: Schedule) -> None:
        block = {"mode": "run", "device": "simulated", "output_dir": str(folder), "frontier": str(folder / "frontier")}
        config = parse_block({**block, "cache": False})
        gpu = SimulatedGpu.named("a100-sxm")
        clocks = clocks_of(gpu, REAL_TIME)
        self._rank = RankContext(communicator, gpu, clocks, HostExecution(), torch.device("cpu"))
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
        self.driver = ModeDriver(job, self._rank, self.recorder, self.control, on_error=_raise)
        self.recorder.start(job.started(communicator, gpu.name))
        self._marks = [
            (Compute(instruction), PassedEvent(0.01 * number), PassedEvent(0.01 * number + 0.009))
            for number, instruction in enumerate(schedule.instructions[communicator.topology.pipeline_rank])
        ]

    def iterate(self, slow: float) -> None:
        """Begin an iteration, end it, and report it."""
        end_s = ITERATION_S * slow
        self.driver.begin(None, None)
        finished = FinishedIteration(PassedEvent(0.0), PassedEvent(end_s), self._marks)
        recorded = IterationEnergy(0.0, energy_of(self.driver.next.phase))
        seen = IterationMeasurement(finished, lambda waits=False: recorded, (0.0, end_s), {}, failed=False)
        own = {"clock_changes": 12, "asked_mhz": 1200.0, "reached_mhz": 1200.0}
        began_s = time.thread_time()
        self.driver.end_iteration(seen, own, 1)
        self.training_s.append(time.thread_time() - began_s)

    def close(self) -> None:
        """End its threads, once all ranks have reported the last iteration."""
        self.driver.close()
        self.recorder.close()
        self._rank.clocks.close()

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
    """Return the position of a rank in DeepSpeed's numbering: by stage, pipeline, then tensor parallelism."""
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


class RankOfMany(Communicator):
    """A rank of a job in which one client of the store stands for all other ranks."""

    is_connected = True

    def __init__(self, topology: PipelineTopology, channel: StoreChannel) -> None:
        super().__init__(topology, channel)
        if self.is_rank_0:
            places = [topology_of(rank, self.world_size).data_parallel_rank for rank in range(self.world_size)]
            self.pipeline_of_rank = np.array(places)

    def pipeline_gather(self, value: Any) -> list[Any]:
        return [value] * self.topology.pipeline_ranks


class LeafChannel(StoreChannel):
    """Channel of the leaf, which also sends the values of all other ranks except rank 0.

    Attributes:
        exchanges: How many were begun.
        energy_j: That each of the other GPUs reports.
    """

    def __init__(self, connection: Connection, slow: float) -> None:
        super().__init__(connection)
        self.exchanges = 0
        self.energy_j = DEFAULT_J
        self._store_of_others = connection.open()
        self._brought: queue.SimpleQueue[tuple[Sequence[float], Any]] = queue.SimpleQueue()
        self._others = [rank for rank in range(self.world_size) if rank not in {0, LEAF}]
        self._slow = [
            slow if topology_of(rank, self.world_size).data_parallel_rank == SLOW_PIPELINE else 1.0
            for rank in self._others
        ]
        threading.Thread(target=self._bring, args=[slow], daemon=True).start()

    def exchange(self, numbers: Sequence[float], value: Any, reduce: Any, among: Sequence[int] = ()) -> Pending[Any]:
        self.exchanges += 1
        self._brought.put((numbers, value))
        return super().exchange(numbers, value, reduce, among)

    def _bring(self, slow: float) -> None:
        draw = np.random.default_rng(0)
        number = 0
        while True:
            numbers, value = self._brought.get()
            number += 1
            rows = np.tile(np.array(numbers, np.float64), (len(self._others), 1))
            if len(numbers) == REPORT:
                like = RankReport(ITERATION_S * slow, self.energy_j, 12, 0, False, 1200.0, 1200.0, 2.7, 0.05, 0.01)
                rows[:] = like.as_numbers()
                rows[:, FIELDS.index("energy_j")] *= draw.normal(1, 0.01, len(rows))
                rows[:, FIELDS.index("computed_s")] *= draw.normal(1, 0.002, len(rows)) * self._slow
                value = None
            keys = [f"perseus/0-{self.world_size - 1}/{number}/{rank}" for rank in self._others]
            for key, row in zip(keys, rows, strict=True):
                sealed = b"" if value is None else self._connection.seal(key, value)
                self._store_of_others.set(key, row.tobytes() + sealed)


def rank_0_and_a_leaf(ranks: int, until_run: int = UNTIL_RUN, measured: int = MEASURED) -> dict[str, float]:
    """Return figures of the last iterations of a job in which one client stands for all other ranks."""
    slow = SLOWER if ranks > STAGES * TENSOR else 1.0
    schedule = read_schedule(schedule_class("1f1b"), ranks=STAGES, micro_batches=MICRO_BATCHES)
    address = serve(ranks)
    leaf_channel = LeafChannel(Connection(LEAF, ranks, address), slow)
    channels = {0: StoreChannel(Connection(0, ranks, address)), LEAF: leaf_channel}
    phases, exchanges, recorded = [], [], []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as threads:
        save_frontier(Path(name), schedule)

        def begin(rank: int) -> RealRank:
            return RealRank(RankOfMany(topology_of(rank, ranks), channels[rank]), Path(name), schedule)

        began_s = time.perf_counter()
        first, leaf = threads.map(begin, (0, LEAF))
        built_s, built = time.perf_counter() - began_s, leaf_channel.exchanges
        for number in range(until_run + measured):
            leaf_channel.energy_j = energy_of(first.driver.next.phase)
            list(threads.map(lambda real: real.iterate(slow), (first, leaf)))
            if number == until_run:
                leaf.recorder.own_event(ClockRefused(rank=LEAF, clock_mhz=1410, reached_mhz=1200))
            phases.append(first.driver.next.phase)
            exchanges.append(leaf_channel.exchanges)
            assert first.recorder.last is not None or number == 0
            recorded.append((Path(name) / FILE_NAME).stat().st_size)
        told = sum(isinstance(record, ClockRefused) for record in read_records(Path(name)))
        status = len(json_of(first.control))
        plan = first.driver.next.plan
        last = slice(-measured, None)
        assert phases[last] == ["run"] * measured, phases
        assert plan == leaf.driver.next.plan, "both decide alike"
        assert bool(plan) is (slow > 1), "both follow the slow pipeline"
        assert told == 1, "the leaf's event is recorded"
        assert exchanges[-1] - exchanges[-measured] == measured - 1, "nothing but reports is exchanged under a plan"
        list(threads.map(RealRank.close, (first, leaf)))
    return {
        "rank 0: training thread [ms]": 1e3 * statistics.median(first.training_s[last]),
        "leaf: training thread [ms]": 1e3 * statistics.median(leaf.training_s[last]),
        "leaf: numbers sent [bytes]": 8.0 * REPORT,
        "set-up [s]": built_s,
        "set-up: collectives that wait for all ranks": built,
        "from then until a plan is kept: collectives that wait for all ranks": exchanges[-1] - built - len(phases),
        "run.jsonl [bytes an iteration]": (recorded[-1] - recorded[-measured]) / (measured - 1),
        "control status [bytes]": status,
    }


def with_clients(ranks: int, exchanges: int = 5) -> dict[str, float]:
    """Return what exchanges of reports take, where each rank is a client of one store."""
    address = serve(ranks)
    with ThreadPoolExecutor(64) as threads:  # a client waits until the name of its host is looked up
        stores = list(threads.map(lambda rank: Connection(rank, ranks, address).open(), range(ranks)))
    report = np.array(RankReport(ITERATION_S, 800.0).as_numbers()).tobytes()
    wall_s, cpu_s, reduced_s = [], [], []
    for number in range(exchanges):
        keys, answer_key = [f"{number}/{rank}" for rank in range(ranks)], f"{number}/answer"
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for key, store in zip(keys, stores, strict=True):
            store.set(key, report)
        began_reducing_s = time.thread_time()
        numbers = np.frombuffer(b"".join(stores[0].multi_get(keys))).reshape(ranks, REPORT)
        answer = pickle.dumps(JobReport.of(RankReports(numbers)))
        reduced_s.append(time.thread_time() - began_reducing_s)
        stores[0].set(answer_key, answer)
        for key, store in zip(keys, stores, strict=True):
            assert store is stores[0] or store.get(answer_key) == answer
            store.delete_key(key)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    return {
        "an exchange, all its ranks one after the other [s]": statistics.median(wall_s),
        "processor time of it, store and clients [s]": statistics.median(cpu_s),
        "of it on rank 0's thread of Perseus, to read and to reduce [ms]": 1e3 * statistics.median(reduced_s),
        "the same for each rank [us]": 1e6 * statistics.median(cpu_s) / ranks,
    }


def serve(ranks: int) -> tuple[str, int]:
    """Return the address of a store that this process serves."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    Connection(0, ranks, ("127.0.0.1", server.port)).serve(server)
    return "127.0.0.1", server.port


def json_of(control: JobControl) -> str:
    """Return the answer to ``control status``."""
    return json.dumps(control.carry_out(parse_order({"command": "status"})))


def main() -> None:
    """Print the figures, and how they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="ranks, most of them one client")
    parser.add_argument("--clients", type=int, nargs="+", default=[], help="clients of one store")
    arguments = parser.parse_args()
    if arguments.clients:
        _print({ranks: with_clients(ranks) for ranks in arguments.clients})
    else:
        _print({ranks: rank_0_and_a_leaf(ranks) for ranks in arguments.ranks})


def _print(found: dict[int, dict[str, float]]) -> None:
    sizes = sorted(found)
    print(f"{'ranks':60s}" + "".join(f"{size:>12d}" for size in sizes) + "     growth")
    for name in found[sizes[0]]:
        values = [found[size][name] for size in sizes]
        growth = values[-1] / values[0] if values[0] else math.nan
        print(f"{name:60s}" + "".join(f"{value:12.4g}" for value in values) + f"   x {growth:.3g}")


if __name__ == "__main__":
    main()
