"""A training job of one rank in virtual time: the real runtime on a simulated GPU, without an engine."""

import itertools

import torch
from lone_communicator import LoneCommunicator
from pipelines import one_f_one_b
from virtual_cuda import CudaOnGpu
from virtual_time import VirtualTime

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.artifacts.run_file import read_records
from perseus_ds.artifacts.run_records import IterationRecord
from perseus_ds.device.gpu.device_models import COMPUTE_BOUND, MEMORY_BOUND
from perseus_ds.device.gpu.simulated import SimulatedGpu
from perseus_ds.device.timers import CudaExecution, HostExecution
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime

SLOWER = {"policy": {"name": "slowdown", "max_slowdown": 0.2}}


class VirtualJob:
    """Iterations of one stage, each pass of which takes a given time at the top clock.

    Attributes:
        time: The time it lives in.
        gpu: Simulated.
        work_s: Time of each kind at the top clock; a test may change it [s].
        wait_s: Time in which the GPU waits, after each pass [s].
        cuda: The stand-in for CUDA, on which passes are only launched; None where they are over when they return.
        shapes: What tells the shapes of the inputs from others, of all forwards or of each; a test may change it.
        runtime: The real one.
    """

    def __init__(self, folder, *, work_s=None, wait_s=0.0, micro_batches=3, gpu=None, passes=None, cuda=False, **block):
        self.time = VirtualTime()
        settings = {"counter_period_s": 0.1, "lock_latency_s": 0.015, **(gpu or {})}
        self.gpu = SimulatedGpu.named("a100-sxm", timebase=self.time, **settings)
        self.cuda = CudaOnGpu(self.time, self.gpu) if cuda else None
        self.work_s = work_s or {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2, Kind.TAIL: 0.01}
        self.wait_s = wait_s
        self.shapes = 1.0
        self.schedule = one_f_one_b(ranks=1, micro_batches=micro_batches)
        config = parse_block({"device": "simulated", "output_dir": str(folder), "cache": False, **block})
        info = ProfileInfo(simulated=True, gpu=self.gpu.name, stages=1, schedule="1f1b", micro_batches=micro_batches)
        self.folder = folder
        self.runtime = PerseusRuntime(
            Job(config, self.schedule, info),
            communicator=LoneCommunicator(),
            gpu=self.gpu,
            timers=self._timers(),
            device=torch.device("cpu"),
            passes=passes,
            timebase=self.time,
        )

    def train(self, iterations=1):
        """Run iterations; return the phase of each."""
        return [self.train_one() for _ in range(iterations)]

    def train_one(self):
        """Run an iteration; return its phase, which is known when its inputs are."""
        shapes = iter(self.shapes if isinstance(self.shapes, list) else itertools.repeat(self.shapes))
        with self.runtime.iteration():
            for instruction in self.schedule.instructions[0]:
                inputs = next(shapes) if instruction.kind is Kind.FORWARD else 0.0
                with self.runtime.instruction(instruction, inputs):
                    self.work(instruction.kind)
                self.idle(self.wait_s if instruction.kind is not Kind.TAIL else 0.0)
            return self.runtime.next.phase

    def train_until(self, phase, most=80):
        """Run iterations until the next one is of a phase; return the phases of those before."""
        phases = []
        while self.runtime.next.phase != phase:
            assert len(phases) < most, phases
            phases += self.train()
        return phases

    def work(self, kind):
        """Compute a pass."""
        workload, seconds = MEMORY_BOUND if kind is Kind.TAIL else COMPUTE_BOUND, self.work_s[kind]
        if self.cuda is not None:
            self.cuda.launch(workload, seconds)
        else:
            self.gpu.begin_work(workload)
            self.gpu.finish_work(seconds)

    def idle(self, seconds):
        """Let the device wait."""
        if self.cuda is not None:
            self.cuda.enqueue(lambda: self.time.sleep(seconds))
        else:
            self.time.sleep(seconds)

    def _timers(self):
        if self.cuda is None:
            return HostExecution(self.time)
        return CudaExecution(torch.device("cuda", 0), self.cuda, self.time, relax_capture=lambda: True)

    def settle(self):
        """Wait until the device is done."""
        if self.cuda is not None:
            self.cuda.synchronize()

    def close(self):
        """End the job once the device is done; return its iterations."""
        self.settle()
        self.runtime.close()
        return [record for record in read_records(self.folder) if isinstance(record, IterationRecord)]


def events(job, kind):
    """The events of a kind in a job's records, all of which are written first."""
    rank_0 = job.runtimes[0] if hasattr(job, "runtimes") else job.runtime
    rank_0._recorder._writer.flush()
    return [record for record in read_records(job.folder) if isinstance(record, kind)]


def in_order(phases):
    """Phases without repetitions."""
    return [phase for number, phase in enumerate(phases) if number == 0 or phases[number - 1] != phase]


def late_under_plans(job, by_s=0.03):
    """Make the GPU take longer under plans than it did when it was profiled."""
    work = job.work

    def work_late(kind):
        if job.runtime.next.phase == "run":
            job.idle(by_s)
        work(kind)

    job.work = work_late
