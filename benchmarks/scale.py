"""One server for many ranks: its processor time, memory, and delay of decisions.

    python benchmarks/scale.py                          # 64, 1 024 and 10 240 ranks, eight on a node
    python benchmarks/scale.py --ranks 10240
    python benchmarks/scale.py --ranks 10240 --flood    # also iterations that are faster than the server
    python benchmarks/scale.py --ranks 10240 --stages 64 --micro-batches 256

The server is the real process, with real encrypted sockets. The agents are emulated: each has the connection of a real
one, and sends what a client and an agent report about each iteration of each of its ranks, with noise, and the
operations if the server requests them. GPUs are simulated. When the server has kept a plan, iterations are sent as soon
as the server has processed the previous one, so the relevant figure is processor time per iteration. Then one pipeline
becomes slower, until other pipelines receive slower plans. All processes run on this machine. Another one listens as an
agent without ranks, and measures the longest time between two messages of the server, which sends heartbeats twice a
second.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event as EventOfProcesses
from pathlib import Path

import psutil
import zmq

from perseus_ds.agent.job_server import JobServerChild, Uplink
from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.run_events import Event, PlanChosen, PlanJudged
from perseus_ds.artifacts.run_records import RecordFollower
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Schedule, Span, encode_spans
from perseus_ds.protocol.job_messages import (
    ClockStatus,
    Follow,
    GpuFacts,
    JobDescription,
    Measured,
    Observed,
    RankFacts,
    RankReport,
    Report,
    Spans,
    encode,
)
from perseus_ds.protocol.messages import Connect, ServerStarted, StartServer

SIZES = (64, 1024, 10240)
NODE, PLANS = 8, 50
MOST_TENSOR_PARALLEL, FEWEST_PIPELINES = 8, 4
ITERATION_S, DEFAULT_J, PLANNED_J = 3.0, 900.0, 800.0
MEASURED, SLOW_PIPELINE, SLOWER = 20, 1, 1.2
KEY = 7
CLOCKS_MHZ = tuple(range(705, 1411, 15))
PASS_S = {Kind.FORWARD: 0.025, Kind.BACKWARD: 0.05, Kind.TAIL: 0.09}
"""Durations at the highest clock [s]."""
PATIENCE_S = 300.0
FLOOD_S, FASTER = 30.0, 1.5


def duration_s(kind: Kind, clock_mhz: int) -> float:
    """Return the duration of an instruction."""
    return PASS_S[kind] * (0.5 + 0.5 * CLOCKS_MHZ[-1] / clock_mhz)


def save_frontier(folder: Path, schedule: Schedule) -> Path:
    """Save plans of increasing time and decreasing energy, and return the path."""
    streams = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in schedule.instructions)
    draw = random.Random(1)
    clocks = tuple(tuple(draw.choice(CLOCKS_MHZ) for _ in stream) for stream in streams)
    stages = len(schedule.ranks)
    energy_j = [stages * (PLANNED_J - 5.0 * number) for number in range(PLANS)]
    plans = tuple(
        FrequencyPlan(streams, clocks, ITERATION_S * (1 + 0.01 * number), energy_j[number]) for number in range(PLANS)
    )
    baseline = FrequencyPlan(
        streams, tuple((CLOCKS_MHZ[-1],) * len(s) for s in streams), ITERATION_S, stages * DEFAULT_J
    )
    provenance = Provenance(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        stages=stages,
        blocking_power_w=80.0,
        solver="none",
        simulated=True,
    )
    times_s = {
        (stage, kind, clock_mhz): duration_s(kind, clock_mhz)
        for stage in range(stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for clock_mhz in CLOCKS_MHZ
    }
    return Frontier(plans, ITERATION_S, baseline, provenance, times_s).save(folder)


@dataclass(frozen=True)
class Job:
    """The emulated job.

    Attributes:
        ranks: Number of ranks.
        tensor_parallel: Number of ranks at each place of a pipeline.
        schedule: The operations of a pipeline.
        folder: Folder of its files.
    """

    ranks: int
    tensor_parallel: int
    schedule: Schedule
    folder: Path

    @classmethod
    def of(cls, ranks: int, stages: int, micro_batches: int, folder: Path) -> Job:
        """Return a job with several pipelines."""
        schedule = read_schedule(schedule_class("1f1b"), ranks=stages, micro_batches=micro_batches)
        return cls(ranks, min(MOST_TENSOR_PARALLEL, ranks // stages // FEWEST_PIPELINES), schedule, folder)

    @property
    def stages(self) -> int:
        return len(self.schedule.ranks)

    def pipeline_of(self, rank: int) -> int:
        """Return the data-parallel pipeline of a rank."""
        return rank // self.stages // self.tensor_parallel

    def describe(self) -> bytes:
        """Return its description, in run mode."""
        frontier, output_dir = save_frontier(self.folder, self.schedule), str(self.folder / "perseus")
        block = {"mode": "run", "device": "simulated", "output_dir": output_dir, "frontier": str(frontier)}
        of_ranks = [replace(self.schedule, ranks=(stream,)) for stream in self.schedule.ranks]
        own = [ScheduleStreams.of(of_rank).model_dump_json().encode() for of_rank in of_ranks]
        facts = []
        for rank in range(self.ranks):
            number, place = divmod(rank, self.stages)
            first = place + self.stages * (number % self.tensor_parallel)
            facts.append(
                RankFacts(
                    pipeline=tuple(range(self.stages * number, self.stages * (number + 1))),
                    copies=tuple(range(first, self.ranks, self.stages * self.tensor_parallel)),
                    key=KEY,
                    schedule=own[place],
                    gpu=GpuFacts(name="simulated GPU", simulated=True),
                    clocks_mhz=CLOCKS_MHZ,
                    node=str(rank // NODE),
                    has_monitor=rank == 0,
                )
            )
        return encode(JobDescription.of(parse_block(block).model_dump_json().encode(), facts))


class Agents:
    """The agents of all nodes.

    Attributes:
        follows: The last message with clocks that each rank has received. Empty at default clocks.
        followed_at: Time of the last such message [Unix seconds].
        iteration: Number of the last iteration that was sent.
        processed: Number of the last iteration that the server has processed.
        sent: Number of messages sent.
        longest_silence_s: Longest time between two messages of the server [s].
    """

    def __init__(self, job: Job, server: ServerStarted, longest_silence_s: Synchronized[float]) -> None:
        self.job = job
        self.longest_silence_s = longest_silence_s
        self.follows: dict[int, Follow] = {}
        self.followed_at = 0.0
        self.iteration = self.processed = self.sent = 0
        self._draw = random.Random(2)
        self._uplinks: list[Uplink] = []
        self._contents: dict[tuple[int, str, bool], bytes] = {}
        keys = server.server_key, server.public_key, server.secret_key
        for first in range(0, job.ranks, NODE):
            uplink = Uplink(Connect(first, server.address, *keys))
            for rank in range(first, min(first + NODE, job.ranks)):
                uplink.join(rank, lambda: self.iteration)
                uplink.send(rank, Measured(0.1, 0.0, 80.0))
            self._uplinks.append(uplink)

    def look(self) -> None:
        """Receive available messages, and send pending ones."""
        for number, uplink in enumerate(self._uplinks):
            for rank, message in uplink.exchange():
                if isinstance(message, Follow) and message.program.number == 0:  # others are for other orders
                    self.follows[rank], self.followed_at = message, time.time()
                elif isinstance(message, Observed):
                    self.processed = message.samples
            if uplink.has_become_silent():
                for rank in range(NODE * number, NODE * (number + 1)):
                    self.follows.pop(rank, None)

    def report(self, slowdown: float = 1.0) -> None:
        """Send the reports of the next iteration. One pipeline may take longer."""
        self.iteration += 1
        for rank in range(self.job.ranks):
            follow = self.follows.get(rank)
            serial = 0 if follow is None else follow.serial
            times = "none" if follow is None else follow.otherwise if self.iteration % follow.every else follow.times
            slow = slowdown if self.job.pipeline_of(rank) == SLOW_PIPELINE else 1.0
            time_s = ITERATION_S * slowdown * self._draw.gauss(1, 0.001)
            report = Report(
                self.iteration, 0, serial, KEY, time_s, issued=self.iteration, ended=time.time(),
                samples=self.iteration, computed_s=0.97 * ITERATION_S * slow, tail_s=0.03 * ITERATION_S,
            )  # fmt: skip
            energy_j = (DEFAULT_J if self.is_at_default_clocks(rank) else PLANNED_J) * self._draw.gauss(1, 0.01)
            uplink = self._uplinks[rank // NODE]
            if follow is not None and times in ("passes", "all"):
                uplink.send(rank, Spans(self.iteration, self._spans(follow, rank % self.job.stages, times)))
                self.sent += 1
            uplink.send(rank, RankReport(report, serial, 100.0 + self.iteration, energy_j, ClockStatus(changes=2)))
            self.sent += 1

    def is_at_default_clocks(self, rank: int) -> bool:
        """Return whether a rank has no clocks of a plan."""
        follow = self.follows.get(rank)
        return follow is None or follow.program.first_mhz is None

    def plan(self) -> int | None:
        """Return the plan of rank 0. None at default clocks."""
        return self.follows[0].plan if 0 in self.follows else None

    def _spans(self, follow: Follow, place: int, times: str) -> bytes:
        """Return the operations of an iteration as a client sends them."""
        key = place, times, follow.program.first_mhz is None
        if key not in self._contents:
            stream, instructions = self.job.schedule.ranks[place], self.job.schedule.instructions[place]
            clocks_mhz = follow.program.clocks_mhz or (CLOCKS_MHZ[-1],) * len(instructions)
            clock_of: dict[Instruction, int] = dict(zip(instructions, clocks_mhz, strict=True))
            spans, end_s = [], 0.0
            for operation in stream:
                taken_s = 0.0
                if isinstance(operation, Compute):
                    taken_s = duration_s(operation.instruction.kind, clock_of[operation.instruction])
                if isinstance(operation, Compute) or times == "all":
                    spans.append(Span(operation, end_s, end_s + taken_s * self._draw.gauss(1, 0.002)))
                end_s += taken_s
            self._contents[key] = encode_spans(spans, {operation: number for number, operation in enumerate(stream)})
        return self._contents[key]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Process messages until a condition is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, f"the server has not {what} within {PATIENCE_S:g} s"
            self.look()
            time.sleep(0.002)

    def iterate(self, slowdown: float = 1.0) -> None:
        """Send an iteration, and wait until the server has processed it."""
        self.report(slowdown)
        number = self.iteration
        self.wait_until(lambda: self.processed == number, f"processed iteration {number}")

    def close(self) -> None:
        """End all connections."""
        for uplink in self._uplinks:
            uplink.close()


class Events:
    """The events in the record of the job."""

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(folder)

    def new(self) -> list[Event]:
        """Return the events since the previous call."""
        return [record for _, records in self._follower.read() for record in records if isinstance(record, Event)]


@dataclass
class Usage:
    """Resources that the server's process has used during some iterations.

    Attributes:
        cpu_s: Processor time of all threads [s].
        main_s: Processor time of the thread that decides [s].
    """

    cpu_s: float = 0.0
    main_s: float = 0.0


@contextmanager
def measured(process: psutil.Process) -> Iterator[Usage]:
    """Return a context manager that measures the use of a process."""
    usage, before = Usage(), _times_s(process)
    yield usage
    usage.cpu_s, usage.main_s = (now_s - then_s for now_s, then_s in zip(_times_s(process), before, strict=True))


def _times_s(process: psutil.Process) -> tuple[float, float]:
    main = next(thread for thread in process.threads() if thread.id == process.pid)
    return sum(process.cpu_times()[:2]), main.user_time + main.system_time


def listen(connect: Connect, ends: EventOfProcesses, longest_s: Synchronized[float]) -> None:
    """Measure the longest time between two messages of the server, in a process of its own."""
    uplink, heard_s = Uplink(connect), math.nan
    while not ends.is_set():
        uplink.exchange()
        if uplink.is_heard and uplink.heard_s != heard_s:
            longest_s.value = max(longest_s.value, 0.0 if math.isnan(heard_s) else uplink.heard_s - heard_s)
            heard_s = uplink.heard_s
        time.sleep(0.01)
    uplink.close()


@contextmanager
def listening(started: ServerStarted) -> Iterator[Synchronized[float]]:
    """Listen to the server, and yield the longest time between two of its messages [s]."""
    processes = multiprocessing.get_context("spawn")
    ends, longest_s = processes.Event(), processes.Value("d", 0.0)
    connect = Connect(0, started.address, started.server_key, started.public_key, started.secret_key)
    process = processes.Process(target=listen, args=(connect, ends, longest_s))
    process.start()
    while not longest_s.value:  # it has not heard the server twice
        time.sleep(0.05)
    yield longest_s
    ends.set()
    process.join()


@contextmanager
def running(ranks: int, stages: int, micro_batches: int) -> Iterator[tuple[Agents, psutil.Process, float]]:
    """Run the server and its agents. Yields them with the time of the start [s]."""
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        job = Job.of(ranks, stages, micro_batches, Path(folder))
        description = job.describe()
        child = JobServerChild(StartServer("127.0.0.1", 0, len(description)), description)
        while (started := child.answer()) is None:
            time.sleep(0.01)
        assert not started.kind, started.error
        start_s = time.monotonic() - begin_s
        with listening(started) as longest_s:
            agents = Agents(job, started, longest_s)
            try:
                yield agents, psutil.Process(child.pid), start_s
            finally:
                agents.close()
                child.end()


def measure(ranks: int, stages: int, micro_batches: int, *, floods: bool) -> None:
    """Print the figures of one server for the given number of ranks."""
    with running(ranks, stages, micro_batches) as (agents, process, start_s):
        agents.wait_until(lambda: len(agents.follows) == ranks, "answered all ranks")
        events = Events(agents.job.folder / "perseus")
        while not any(isinstance(event, PlanJudged) and event.kept for event in events.new()):
            agents.iterate()
        kept_after = agents.iteration
        sent, begin_s = agents.sent, time.monotonic()
        with measured(process) as usage:
            for _ in range(MEASURED):
                agents.iterate()
        wall_s, messages = (time.monotonic() - begin_s) / MEASURED, (agents.sent - sent) / MEASURED
        cpu_s, main_s = usage.cpu_s / MEASURED, usage.main_s / MEASURED
        plan, slow_from = agents.plan(), agents.iteration
        with measured(process) as usage:
            while agents.plan() == plan:
                agents.iterate(SLOWER)
        noticed = agents.iteration - slow_from
        serial = agents.follows[0].serial
        agents.wait_until(lambda: all(each.serial >= serial for each in agents.follows.values()), "sent all programs")
        decided = [event for event in events.new() if isinstance(event, PlanChosen) and event.straggler is not None]
        assert decided, f"plans have changed from {plan} to {agents.plan()} without a straggler"
        print(
            f"{ranks:6} ranks, {-(-ranks // NODE):5} agents (emulated; GPUs simulated)\n"
            f"  processor time for an iteration {1e3 * cpu_s:.1f} ms, {100 * cpu_s / ITERATION_S:.1f} % of a core at "
            f"{ITERATION_S:g} s; of the thread that decides {1e3 * main_s:.1f} ms\n"
            f"  {messages:.0f} messages for an iteration, {messages / main_s:.0f} per second of that thread\n"
            f"  {process.memory_info().rss / 2**20:.0f} MiB; plan kept after {kept_after} iterations; "
            f"straggler noticed after {noticed}, for {1e3 * usage.cpu_s / noticed:.1f} ms each\n"
            f"  wall time: start {start_s:.1f} s, {1e3 * wall_s:.0f} ms for an iteration with the agents, "
            f"{1e3 * (agents.followed_at - decided[-1].time):.0f} ms from the decision to the last rank's program\n"
            f"  longest time between two messages of the server {agents.longest_silence_s.value:.2f} s",
            flush=True,
        )
        if floods:
            flood(agents, process, wall_s / FASTER)


def flood(agents: Agents, process: psutil.Process, interval_s: float) -> None:
    """Send iterations faster than the server processes them, and print what the ranks run."""
    begin_s = next_s = time.monotonic()
    print(f"  an iteration every {1e3 * interval_s:.0f} ms:")
    shown_s = begin_s
    while (now_s := time.monotonic()) < begin_s + FLOOD_S:
        if now_s >= next_s:
            agents.report()
            next_s = max(next_s + interval_s, now_s - interval_s)
        agents.look()
        if now_s > shown_s:
            shown_s += 3.0
            at_default = sum(map(agents.is_at_default_clocks, range(agents.job.ranks)))
            print(
                f"    after {now_s - begin_s:4.0f} s: {agents.iteration - agents.processed:4} iterations behind, "
                f"{at_default} ranks at default clocks, {process.memory_info().rss / 2**20:.0f} MiB",
                flush=True,
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--flood", action="store_true")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 60_000)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        measure(ranks, arguments.stages, arguments.micro_batches, floods=arguments.flood)


if __name__ == "__main__":
    main()
