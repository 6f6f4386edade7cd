"""One server for many ranks: its processor time, memory, and delay of decisions.

    python benchmarks/scale.py                   # 64, 1 024 and 10 240 ranks, eight on a node
    python benchmarks/scale.py --ranks 10240

The server is the real process, with real encrypted sockets. The agents are emulated: each has the connection of a real
one, and sends the report of a client and an agent about each iteration for each of its ranks, with noise. After some
iterations one pipeline becomes slower, and the time until other pipelines receive slower plans is measured. Iterations
are sent as soon as the server has recorded the previous one, so the relevant figure is processor time per iteration.
All processes run on this machine.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path

import psutil

from perseus_ds.agent.job_server import JobServerChild
from perseus_ds.agent.uplink import Uplink
from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.config import parse_block
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol.description import JobDescription, RankFacts, encode
from perseus_ds.protocol.job_messages import Follow, Measured, RankReport, Report
from perseus_ds.protocol.messages import Connect, ServerStarted, StartServer

SIZES = (64, 1024, 10240)
NODE, STAGES, TENSOR, MICRO_BATCHES, PLANS = 8, 8, 8, 32, 50
ITERATION_S, DEFAULT_J, PLANNED_J = 3.0, 900.0, 800.0
WARM, MEASURED, SLOW_PIPELINE, SLOWER = 20, 20, 1, 1.2
CLOCKS_MHZ = tuple(range(705, 1411, 15))


def save_frontier(folder: Path, schedule: Schedule) -> Path:
    """Save plans of increasing time and decreasing energy, and return the path."""
    streams = tuple(tuple(i for i in stream if i.kind is not Kind.TAIL) for stream in schedule.instructions)
    draw = random.Random(1)
    clocks = tuple(tuple(draw.choice(CLOCKS_MHZ) for _ in stream) for stream in streams)
    energy_j = [STAGES * (PLANNED_J - 5.0 * number) for number in range(PLANS)]
    plans = tuple(
        FrequencyPlan(streams, clocks, ITERATION_S * (1 + 0.01 * number), energy_j[number]) for number in range(PLANS)
    )
    baseline = FrequencyPlan(
        streams, tuple((CLOCKS_MHZ[-1],) * len(s) for s in streams), ITERATION_S, STAGES * DEFAULT_J
    )
    provenance = Provenance(
        schedule=schedule.name, micro_batches=MICRO_BATCHES, stages=STAGES, blocking_power_w=80.0, solver="none",
        simulated=True,
    )  # fmt: skip
    return Frontier(plans, ITERATION_S, baseline, provenance).save(folder)


def describe(folder: Path, ranks: int) -> bytes:
    """Return the description of a job in run mode."""
    schedule = read_schedule(schedule_class("1f1b"), ranks=STAGES, micro_batches=MICRO_BATCHES)
    frontier = save_frontier(folder, schedule)
    block = {"mode": "run", "device": "simulated", "output_dir": str(folder / "perseus"), "frontier": str(frontier)}
    own = [
        ScheduleStreams.of(Schedule(schedule.name, MICRO_BATCHES, (stream,))).model_dump_json().encode()
        for stream in schedule.ranks
    ]
    facts = []
    for rank in range(ranks):
        pipeline, place = divmod(rank, STAGES)
        copies = tuple(range(place + STAGES * (pipeline % TENSOR), ranks, STAGES * TENSOR))
        facts.append(
            RankFacts(
                pipeline=tuple(range(STAGES * pipeline, STAGES * (pipeline + 1))),
                copies=copies,
                schedule=own[place],
                gpu="simulated GPU",
                clocks_mhz=CLOCKS_MHZ,
                simulated=True,
                node=str(rank // NODE),
            )
        )
    return encode(JobDescription.of(parse_block(block).model_dump_json().encode(), facts))


class Agents:
    """The agents of all nodes.

    Attributes:
        plans: The last plan that each rank has received.
        received: Number of messages received.
    """

    def __init__(self, server: ServerStarted, ranks: int) -> None:
        self.plans: dict[int, int | None] = {}
        self.serials = [0] * ranks
        self.received = 0
        self._ranks = ranks
        self._draw = random.Random(2)
        self._uplinks = []
        self._follows: dict[int, Follow] = {}
        keys = server.server_key, server.public_key, server.secret_key
        for first in range(0, ranks, NODE):
            uplink = Uplink(Connect(first, server.address, *keys))
            for rank in range(first, min(first + NODE, ranks)):
                uplink.join(rank, lambda: 0)
                uplink.send(rank, Measured(0.1, 0.0, 80.0))
            self._uplinks.append(uplink)

    def look(self) -> None:
        """Receive available messages, and send pending ones."""
        for uplink in self._uplinks:
            for rank, message in uplink.look():
                self.received += 1
                if isinstance(message, Follow):
                    self.plans[rank], self._follows[rank] = message.plan, message

    def report(self, iteration: int, slowdown: float = 1.0) -> None:
        """Send the reports of an iteration. One pipeline may take longer."""
        for rank in range(self._ranks):
            follow = self._follows.get(rank)
            serial = 0 if follow is None else follow.serial
            under_plan = follow is not None and follow.plan is not None
            slow = slowdown if rank // STAGES // TENSOR == SLOW_PIPELINE else 1.0
            time_s = ITERATION_S * slowdown * self._draw.gauss(1, 0.001)
            report = Report(
                iteration, 0, serial, 7, time_s, issued=iteration, ended=time.time(),
                computed_s=0.97 * ITERATION_S * slow, tail_s=0.03 * ITERATION_S,
            )  # fmt: skip
            energy_j = (PLANNED_J if under_plan else DEFAULT_J) * self._draw.gauss(1, 0.01)
            self._uplinks[rank // NODE].send(rank, RankReport(report, serial, 100.0 + iteration, energy_j, 2.0))

    def close(self) -> None:
        """End all connections."""
        for uplink in self._uplinks:
            uplink.close()


def measure(ranks: int) -> None:
    """Print the figures of one server for the given number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        description = describe(Path(folder), ranks)
        child = JobServerChild(StartServer("127.0.0.1", 0, len(description)), description)
        while (started := child.answer()) is None:
            time.sleep(0.01)
        assert not started.kind, started.error
        start_s = time.monotonic() - begin_s
        agents = Agents(started, ranks)
        try:
            run(agents, child, folder, ranks, start_s)
        finally:
            agents.close()
            child.end()


def run(agents: Agents, child: JobServerChild, folder: str, ranks: int, start_s: float) -> None:
    """Send iterations, and print the figures."""
    process = psutil.Process(child.pid)
    wait_until(agents, lambda: len(agents.plans) == ranks)
    records = Path(folder) / "perseus" / "run.jsonl"
    iteration = 0

    def send(slowdown: float = 1.0) -> None:
        nonlocal iteration
        iteration += 1
        agents.report(iteration, slowdown)
        deadline_s = time.monotonic() + 60
        while f'"iteration":{iteration},' not in tail(records) and time.monotonic() < deadline_s:
            agents.look()

    for _ in range(WARM):
        send()
    before_s, messages = sum(process.cpu_times()[:2]), agents.received
    for _ in range(MEASURED):
        send()
    cpu_s = (sum(process.cpu_times()[:2]) - before_s) / MEASURED
    kept = dict(agents.plans)
    slow_from, noticed = iteration, None
    for _ in range(30):
        send(SLOWER)
        if any(agents.plans[rank] != plan for rank, plan in kept.items() if plan is not None):
            noticed = iteration - slow_from
            break
    decided_s = time.monotonic()
    changed = [rank for rank in agents.plans if agents.plans[rank] != kept[rank]]
    wait_until(agents, lambda: all(agents.plans[rank] is not None for rank in changed))
    last_s = time.monotonic() - decided_s
    print(
        f"{ranks:6} ranks, {-(-ranks // NODE):5} agents: start {start_s:5.1f} s, {1e3 * cpu_s:7.1f} ms of processor "
        f"time an iteration ({100 * cpu_s / ITERATION_S:.1f} % of a core at {ITERATION_S:g} s), "
        f"{process.memory_info().rss / 2**20:6.0f} MiB, {ranks / cpu_s:8.0f} reports/s at most, "
        f"straggler noticed after {noticed} iterations, last agent {1e3 * last_s:.0f} ms later, "
        f"{agents.received - messages} messages received (agents are emulated, GPUs simulated)",
        flush=True,
    )


def tail(path: Path) -> str:
    """Return the end of a file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        return file.read().decode(errors="replace")


def wait_until(agents: Agents, condition: object) -> None:
    """Process the agents' messages until a condition is true, for at most two minutes."""
    assert callable(condition)
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "the server does not answer"
        agents.look()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for ranks in parser.parse_args().ranks:
        measure(ranks)


if __name__ == "__main__":
    main()
