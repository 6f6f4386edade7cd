"""A pipeline of several ranks in virtual time: the real runtime on simulated GPUs, without an engine.

Each rank is a thread of one :class:`VirtualTime`, so an hour of training passes in a minute, and always alike.
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from pipelines import one_f_one_b
from virtual_communicator import Meetings, Neighbours, RankLeftError, VirtualCommunicator
from virtual_time import VirtualTime

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.run_file import read_records
from perseus_ds.artifacts.run_records import IterationRecord
from perseus_ds.device.gpu.device_models import COMPUTE_BOUND, MEMORY_BOUND
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.gpu.simulated_conditions import OneAtATime
from perseus_ds.device.timers import HostExecution
from perseus_ds.distributed import PipelineTopology
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.operations import Compute, Exchange
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime


class VirtualPipeline:
    """Iterations of a 1F1B pipeline.

    Attributes:
        time: The time it lives in.
        gpus: Simulated, one of each rank.
        runtimes: Of each rank.
        taken: Of every iteration its phase, its time [s] and the energy that all GPUs really used [J].
        slowdowns: How many times as long each stage takes; a test may change it at any time.
        shape: Number of the shape of the inputs; a test may change it between iterations.
    """

    def __init__(
        self,
        folder,
        *,
        stages_s,
        tail_s=0.01,
        micro_batches=8,
        transfer_s=0.0,
        gpu=None,
        device="a100-sxm",
        gpu_class=SimulatedGpu,
        **block,
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
            gpu_class: Of the simulated GPUs.
            block: The rest of the ``perseus`` block.
        """
        self.time = VirtualTime()
        self.folder = folder
        self.taken = []
        self.slowdowns = [1.0] * len(stages_s)
        self.shape = 1.0
        self.runtimes = [None] * len(stages_s)
        self._stages_s, self._tail_s, self._transfer_s = stages_s, tail_s, transfer_s
        self.schedule = one_f_one_b(ranks=len(stages_s), micro_batches=micro_batches)
        settings = {"counter_period_s": 0.1, "lock_latency_s": 0.015, **(gpu or {})}
        if "lock-contention" in settings.get("conditions", ()):
            settings["driver_queue"] = OneAtATime(self.time)
        self.gpus = [
            gpu_class.named(device, timebase=self.time, seed=rank, **settings) for rank in range(len(stages_s))
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
        self._start()

    def train(self, iterations):
        """Run iterations; return their phases."""
        begin = len(self.taken)
        self._everywhere(lambda rank: [self._iterate(rank) for _ in range(iterations)])
        return [phase for phase, _, _ in self.taken[begin:]]

    def restart(self):
        """End the job as at a checkpoint, start it again in the same folder, and resume it."""
        states = [runtime.state() for runtime in self.runtimes]
        self._close()
        self._start()
        self._everywhere(lambda rank: self.runtimes[rank].restore(states[rank]))

    def close(self):
        """End the job; return its iterations."""
        self._close()
        return [record for record in read_records(self.folder) if isinstance(record, IterationRecord)]

    def _start(self):
        self._meetings = Meetings(self.time)
        self._neighbours = Neighbours(self._meetings)
        self._everywhere(self._begin)

    def _close(self):
        self._everywhere(lambda rank: self.runtimes[rank].close())

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
                is_forward = isinstance(operation, Compute) and operation.instruction.kind is Kind.FORWARD
                with runtime.operation(operation, self.shape if is_forward else 0.0):
                    if isinstance(operation, Compute):
                        self._compute(gpu, rank, operation.instruction.kind)
                    elif isinstance(operation, Exchange):
                        self._exchange(gpu, rank, number, operation)
            self._meet(("end", number), rank)
        if rank == 0:
            used_j = sum(g.true_energy_j for g in self.gpus) - begin_j
            self.taken.append((phase, self.time.now_s() - begin_s, used_j))

    def _compute(self, gpu, rank, kind):
        forward_s = self._stages_s[rank] * self.slowdowns[rank] * self.shape
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
            except RankLeftError:
                pass
            except BaseException as error:
                problems.append(error)
                self._meetings.leave()

        threads = [self.time.thread(lambda rank=rank: on(rank), f"rank-{rank}") for rank in range(len(self.gpus))]
        with ExitStack() as patches:
            patches.enter_context(patch("perseus_ds.profiler.blocking.dist", self._neighbours))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if problems:
            raise problems[0]
