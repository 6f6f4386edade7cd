"""A pipeline of several ranks in virtual time: the real runtime on simulated GPUs, without an engine.

Each rank is a thread of one :class:`VirtualTime`, so an hour of training passes in a minute, and always alike.
"""

import threading
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch
from pipelines import one_f_one_b
from virtual_time import VirtualTime

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.run_file import read_records
from perseus_ds.artifacts.run_records import IterationRecord
from perseus_ds.device.gpu.device_models import COMPUTE_BOUND, MEMORY_BOUND
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.gpu.simulated_conditions import OneAtATime
from perseus_ds.device.timers import HostExecution
from perseus_ds.distributed import PipelineTopology
from perseus_ds.errors import PerseusError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.operations import Compute, Exchange
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime


class Meetings:
    """What threads bring to the meetings of a name; each is over when all have come."""

    def __init__(self, time):
        self._changed = time.condition()
        self._brought = {}

    def bring(self, name, who, value):
        """Come to a meeting without waiting for the others."""
        with self._changed:
            self._brought.setdefault(name, {})[who] = value
            self._changed.notify_all()

    def wait(self, name, size):
        """Wait until so many have come; return what they brought, by name."""
        with self._changed:
            while len(self._brought.get(name, ())) < size:
                self._changed.wait()
            return self._brought[name]


class VirtualCommunicator:
    """What ``Communicator`` does, among threads of a virtual time."""

    is_connected = True

    def __init__(self, meetings, topology):
        self._meetings = meetings
        self._calls = self._exchanges = 0
        self.topology = topology
        self.world_size = topology.pipeline_ranks

    @property
    def is_first(self):
        return self.topology.rank == 0

    @property
    def pipeline_of_rank(self):
        return np.zeros(self.world_size if self.is_first else 0, int)

    def start_exchange(self, numbers, answers, width):
        self._exchanges += 1
        exchange = "exchange", self._exchanges
        self._meetings.bring(exchange, self.topology.rank, (numbers, answers))
        return _Pending(self._meetings, exchange, self)

    def _all_gather(self, value):
        self._calls += 1
        self._meetings.bring(self._calls, self.topology.rank, value)
        return [value for _, value in sorted(self._meetings.wait(self._calls, self.world_size).items())]

    pipeline_gather = _all_gather

    def gather(self, value):
        values = self._all_gather(value)
        return values if self.is_first else []

    def from_first(self, make):
        made = None
        if self.is_first:
            try:
                made = make()
            except (PerseusError, OSError) as error:
                made = error
        made = self._all_gather(made)[0]
        if isinstance(made, Exception):
            raise made
        return made

    def together(self, check):
        problem = None
        try:
            check()
        except PerseusError as error:
            problem = error
        found = self.first_of(problem)
        if found is not None:
            raise found

    def first_of(self, value):
        return next((found for found in self._all_gather(value) if found is not None), None)

    def agree(self, value, combined):
        return combined(self._all_gather(value))

    def all_max(self, value):
        return max(self._all_gather(value))

    def all_sum(self, value):
        return sum(self._all_gather(value))

    def stage_max(self, value):
        return value

    def barrier(self):
        self._all_gather(None)

    pipeline_barrier = barrier


class _Pending:
    """An exchange: rank 0's answers are made once, when the first rank asks for its own."""

    def __init__(self, meetings, name, communicator):
        self._meetings, self._name = meetings, name
        self._rank, self._size = communicator.topology.rank, communicator.world_size

    def result(self):
        brought = self._meetings.wait(self._name, self._size)
        if "answers" not in brought:
            numbers = [brought[rank][0] for rank in range(self._size)]
            brought["answers"] = brought[0][1](np.array(numbers, dtype=float))
        return brought["answers"][self._rank]

    def is_there_within(self, timeout_s):
        return False


class _Neighbours:
    """``torch.distributed`` as the measurement of blocking power uses it."""

    def __init__(self, meetings):
        self._meetings = meetings
        self._rank = threading.local()
        self._counts = {}

    def use(self, rank):
        self._rank.number = rank

    def send(self, tensor, target):
        self._meetings.bring(self._name("sent", self._rank.number, target), "sender", None)

    def recv(self, tensor, source):
        self._meetings.wait(self._name("received", source, self._rank.number), 1)

    def _name(self, side, source, target):
        key = side, source, target
        self._counts[key] = self._counts.get(key, 0) + 1
        return "blocking", source, target, self._counts[key]


class VirtualPipeline:
    """Iterations of a 1F1B pipeline.

    Attributes:
        time: The time it lives in.
        gpus: Simulated, one of each rank.
        runtimes: Of each rank.
        taken: Of every iteration its phase, its time [s] and the energy that all GPUs really used [J].
    """

    def __init__(
        self, folder, *, stages_s, tail_s=0.01, micro_batches=8, transfer_s=0.0, gpu=None, device="a100-sxm", **block
    ):
        """Begin the job; its first iteration is run by :meth:`train`.

        Args:
            folder: For its files.
            stages_s: Time of each stage's forward at the top clock; its backward takes twice that [s].
            tail_s: Time of the tail at the top clock [s].
            micro_batches: Of an iteration.
            transfer_s: Time of a transfer [s].
            gpu: Settings of the simulated GPUs.
            device: Their model.
            block: The rest of the ``perseus`` block.
        """
        self.time = VirtualTime()
        self.folder = folder
        self.taken = []
        self.runtimes = [None] * len(stages_s)
        self._stages_s, self._tail_s, self._transfer_s = stages_s, tail_s, transfer_s
        self._meetings = Meetings(self.time)
        self._neighbours = _Neighbours(self._meetings)
        self.schedule = one_f_one_b(ranks=len(stages_s), micro_batches=micro_batches)
        settings = {"counter_period_s": 0.1, "lock_latency_s": 0.015, **(gpu or {})}
        if "lock-contention" in settings.get("conditions", ()):
            settings["driver_queue"] = OneAtATime(self.time)
        self.gpus = [
            SimulatedGpu.named(device, timebase=self.time, seed=rank, **settings) for rank in range(len(stages_s))
        ]
        config = parse_block({"device": "simulated", "output_dir": str(folder), "cache": False, **block})
        info = ProfileInfo(
            simulated=True,
            gpu=self.gpus[0].name,
            stages=len(stages_s),
            pipeline_ranks=len(stages_s),
            schedule="1f1b",
            micro_batches=micro_batches,
        )
        self._job = Job(config, self.schedule, info)
        self._iterations = 0
        self._everywhere(self._begin)

    def train(self, iterations):
        """Run iterations; return their phases."""
        begin = len(self.taken)
        self._everywhere(lambda rank: [self._iterate(rank) for _ in range(iterations)])
        return [phase for phase, _, _ in self.taken[begin:]]

    def close(self):
        """End the job; return its iterations."""
        self._everywhere(lambda rank: self.runtimes[rank].close())
        return [record for record in read_records(self.folder) if isinstance(record, IterationRecord)]

    def _begin(self, rank):
        topology = PipelineTopology(rank, tuple(range(len(self.gpus))))
        self.runtimes[rank] = PerseusRuntime(
            self._job,
            communicator=VirtualCommunicator(self._meetings, topology),
            gpu=self.gpus[rank],
            timers=HostExecution(self.time),
            device=torch.device("cpu"),
            timebase=self.time,
        )

    def _iterate(self, rank):
        runtime, gpu = self.runtimes[rank], self.gpus[rank]
        begin_s = self.time.now_s()
        begin_j = sum(g.true_energy_j for g in self.gpus) if rank == 0 else 0.0
        with runtime.iteration():
            phase = runtime.next.phase
            number = runtime._control.steps
            for operation in self.schedule.ranks[rank]:
                with runtime.operation(operation):
                    if isinstance(operation, Compute):
                        self._compute(gpu, rank, operation.instruction.kind)
                    elif isinstance(operation, Exchange):
                        self._exchange(gpu, rank, number, operation)
            self._meet(("end", number), rank)
        if rank == 0:
            used_j = sum(g.true_energy_j for g in self.gpus) - begin_j
            self.taken.append((phase, self.time.now_s() - begin_s, used_j))

    def _compute(self, gpu, rank, kind):
        forward_s = self._stages_s[rank]
        work_s = {Kind.FORWARD: forward_s, Kind.BACKWARD: 2 * forward_s, Kind.TAIL: self._tail_s}
        gpu.begin_work(MEMORY_BOUND if kind is Kind.TAIL else COMPUTE_BOUND)
        gpu.finish_work(work_s[kind])

    def _exchange(self, gpu, rank, number, operation):
        for transfer in operation.transfers:
            delays = self._meet((number, transfer), rank, gpu.transfer_delay_s, 2)
            self.time.sleep(self._transfer_s + max(delays))

    def _meet(self, name, rank, value=None, size=None):
        self._meetings.bring(name, rank, value)
        return self._meetings.wait(name, size or len(self.gpus)).values()

    def _everywhere(self, run):
        """Run a function on all ranks at once; raise what one of them raises."""
        problems = []

        def on(rank):
            self._neighbours.use(rank)
            try:
                run(rank)
            except BaseException as error:
                problems.append(error)

        threads = [self.time.thread(lambda rank=rank: on(rank), f"rank-{rank}") for rank in range(len(self.gpus))]
        with ExitStack() as patches:
            patches.enter_context(patch("perseus_ds.profiler.blocking.dist", self._neighbours))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if problems:
            raise problems[0]
