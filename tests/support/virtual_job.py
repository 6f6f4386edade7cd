"""A training job in virtual time: the real runtime on simulated GPUs, without an engine.

An hour of training passes in a minute, and always alike. :class:`VirtualJob` is a job of one rank, in the thread of the
test. :class:`VirtualPipeline` is a pipeline of ranks, each of which is a thread of one :class:`VirtualTime`; they meet
in :class:`Meetings`, by which they also exchange what real ranks exchange by rank 0's store. Phases can be driven
without a runtime: :func:`drive`.
"""

import itertools
import threading
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch
from pipelines import one_f_one_b
from virtual_cuda import CudaOnGpu
from virtual_time import OneAtATime, VirtualTime

from perseus_ds.artifacts.profile import ProfileInfo, StageProfile
from perseus_ds.artifacts.run_records import IterationRecord, PlanJudged, read_records
from perseus_ds.clocks.events import PassedEvent
from perseus_ds.clocks.timers import CudaExecution, FinishedIteration, HostExecution
from perseus_ds.gpu.device_models import COMPUTE_BOUND, MEMORY_BOUND
from perseus_ds.gpu.simulated import SimulatedGpu
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.worker import OptimizeResult
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Exchange
from perseus_ds.policy.reports import JobReport, RankReport, RankReports
from perseus_ds.ranks import Communicator, PipelineTopology
from perseus_ds.runtime.config import parse_block
from perseus_ds.runtime.iterations import IterationMeasurement
from perseus_ds.runtime.job import Job
from perseus_ds.runtime.runtime import PerseusRuntime


class RankLeftError(BaseException):
    """Another rank has ended with an error, so what this one waits for does not come; no code of the job handles it."""


class OrderError(BaseException):
    """Ranks call different collectives of one group at once, which on gloo mixes up what they send, or never ends."""


class Meetings:
    """What threads bring to the meetings of a name; each is over when all have come.

    Attributes:
        waits: How many times a rank had to wait for an answer.
    """

    def __init__(self, time):
        self._time = time
        self._changed = time.condition()
        self._brought = {}
        self._taken = Counter()
        self._is_left = False
        self.waits = 0

    def bring(self, name, who, value):
        """Come to a meeting without waiting for the others."""
        with self._changed:
            self._brought.setdefault(name, {})[who] = value
            self._changed.notify_all()

    def leave(self):
        """Tell all who wait that a rank does not come any more."""
        with self._changed:
            self._is_left = True
            self._changed.notify_all()

    def wait(self, name, size):
        """Wait until so many have come, each of whom waits once; return what they brought, by name."""
        with self._changed:
            while not self._are_there(name, size):
                self._changed.wait()
            self._taken[name] += 1
            if self._taken[name] < size:
                return self._brought[name]
            del self._taken[name]
            return self._brought.pop(name)

    def count_wait(self, name, size):
        """Count a rank that begins to wait for what is not there."""
        with self._changed:
            self.waits += not self._are_there(name, size)

    def wait_within(self, name, size, timeout_s):
        """Wait for them for some time; return whether they have come."""
        end_s = self._time.now_s() + timeout_s
        with self._changed:
            while not self._are_there(name, size) and (rest_s := end_s - self._time.now_s()) > 0:
                self._changed.wait(rest_s)
            return self._are_there(name, size)

    def _are_there(self, name, size):
        if len(self._brought.get(name, ())) >= size:
            return True
        if self._is_left:
            raise RankLeftError
        return False


class VirtualCommunicator(Communicator):
    """A communicator whose ranks are threads of a virtual time."""

    is_connected = True

    def __init__(self, meetings, topology):
        super().__init__(topology, VirtualChannel(meetings, topology.rank, topology.pipeline_ranks))


class VirtualChannel:
    """What ``StoreChannel`` does, among threads of a virtual time.

    Collectives are matched by their order; where ranks begin different ones, it is an error.
    """

    def __init__(self, meetings, rank, world_size, name=()):
        self.rank, self.world_size = rank, world_size
        self._meetings, self._name = meetings, name
        self._begun = self._channels = 0

    def exchange(self, numbers, content, reduce, among=()):
        def answer(brought):
            reduce = brought[0][2]
            return [
                reduce(np.array([numbers for numbers, *_ in brought], float), [content for _, content, _ in brought])
            ]

        return self._begin(f"exchange of {len(numbers)} among {among or 'all'}", (numbers, content, reduce), answer)

    def another(self):
        self._channels += 1
        return VirtualChannel(self._meetings, self.rank, self.world_size, (*self._name, self._channels))

    def _begin(self, kind, value, answer):
        self._begun += 1
        name = ("collective", *self._name, self._begun)
        self._meetings.bring(name, self.rank, (kind, value))
        return _Collective(self._meetings, name, self.rank, self.world_size, answer)


class _Collective:
    """A collective under way; the answer is made once, as by rank 0, when the first rank has what all have brought."""

    def __init__(self, meetings, name, rank, size, answer):
        self._meetings, self._name, self._rank, self._size = meetings, name, rank, size
        self._answer = answer
        self._result = None

    def result(self):
        if self._result is None:
            self._meetings.count_wait(self._name, self._size)
            brought = self._meetings.wait(self._name, self._size)
            if "result" not in brought:
                of_ranks = [brought[rank] for rank in range(self._size)]
                if len({kind for kind, _ in of_ranks}) > 1:
                    raise OrderError(f"{self._name}, by rank: {of_ranks}")
                brought["result"] = self._answer([value for _, value in of_ranks])
            self._result = brought["result"]
        return self._result[0]

    def is_over_within(self, timeout_s):
        return self._meetings.wait_within(self._name, self._size, timeout_s)


class Neighbours:
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


class LoneCommunicator(Communicator):
    """A communicator whose channel has no other ranks, whatever the topology says."""

    is_connected = True

    def __init__(self, topology=None):
        super().__init__(topology or PipelineTopology(0, (0,)), VirtualChannel(Meetings(VirtualTime()), 0, 1))


def seen(*, time_s=1.0, energy_j=100.0, start_s=0.0, spans=(), clock_mhz=None, failed=False, reports=None):
    """An iteration as a phase receives it."""
    begin, end = PassedEvent(start_s), PassedEvent(start_s + time_s)
    finished = FinishedIteration(begin, end, lambda: time_s, lambda: list(spans))
    times_s = (start_s, start_s + time_s)
    return IterationMeasurement(finished, lambda: energy_j, lambda: True, times_s, clock_mhz or {}, failed, reports)


def reports_of(*fields, pipelines=None):
    """The reports of as many ranks as there are fields, as rank 0 has them."""
    numbers = [RankReport(**{"time_s": 1.0, "energy_j": 100.0, **field}).as_numbers() for field in fields]
    return RankReports(np.array(numbers), None if pipelines is None else np.array(pipelines))


def told_of(*fields):
    """What all ranks are told of such reports."""
    return JobReport.of(reports_of(*fields))


def drive(phase, measure, most=100):
    """Run a phase to its end, each iteration reported by this rank alone; return what it wanted, and what it returned.

    Args:
        phase: The generator.
        measure: Returns what is seen of an iteration, given what was wanted of it and its number.
        most: Iterations after which a phase that has not ended is stopped.
    """
    wanted = [next(phase)]
    for number in range(most):
        reports = told_of({**wanted[-1].reported, **wanted[-1].reported_later()})
        iteration = measure(wanted[-1], number)
        try:
            wanted.append(phase.send(seen(**{"reports": reports, **iteration})))
        except StopIteration as end:
            return wanted, end.value
    phase.close()
    return wanted, None


class WorkerAtOnce:
    """What ``OptimizeWorker`` does.

    Attributes:
        problem: Why it fails; a test may set it.
    """

    problem = None

    def __init__(self, request, log_path):
        self._request = request
        self._result = None
        self.stopped = False

    def remaining_s(self):
        return None

    def poll(self):
        if self.problem is not None:
            return OptimizeResult(ok=False, error=self.problem)
        if self._result is None:
            request = self._request
            frontier = optimize(
                request.schedule.to_schedule(),
                StageProfile.load(request.profile),
                plans=20,
                switch_cost_j=request.switch_cost_j,
                switch_cost_s=request.switch_cost_s,
                least_dwell_s=request.least_dwell_s,
            )
            self._result = OptimizeResult(ok=True, frontier=frontier.save(request.out))
        return self._result

    def stop(self):
        self.stopped = True


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

    def __init__(self, folder, *, work_s=None, wait_s=0.0, micro_batches=3, gpu=None, cuda=False, **block):
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


def train_until_compared(job, times=1, most=300):
    """Run iterations until plans have been compared with default clocks so often; return the comparisons."""
    for _ in range(most):
        compared = events(job, PlanJudged)
        if len(compared) >= times:
            return compared
        job.train_one()
    raise AssertionError("no plan was compared")


def late_under_plans(job, by_s=0.05):
    """Make the GPU take longer under plans than it did when it was profiled."""
    work = job.work

    def work_late(kind):
        if job.runtime.next.phase == "run":
            job.idle(by_s)
        work(kind)

    job.work = work_late


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
            settings["driver_turn"] = OneAtATime(self.time)
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
        self.meetings = Meetings(self.time)
        self._neighbours = Neighbours(self.meetings)
        self._everywhere(self._begin)

    def _close(self):
        self._everywhere(lambda rank: self.runtimes[rank].close())

    def _begin(self, rank):
        topology = PipelineTopology(rank, tuple(range(len(self.gpus))))
        self.runtimes[rank] = PerseusRuntime(
            self._job,
            communicator=VirtualCommunicator(self.meetings, topology),
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
        self.meetings.bring(name, rank, value)
        return self.meetings.wait(name, size or len(self.gpus)).values()

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
                self.meetings.leave()

        threads = [self.time.thread(lambda rank=rank: on(rank), f"rank-{rank}") for rank in range(len(self.gpus))]
        with ExitStack() as patches:
            patches.enter_context(patch("perseus_ds.profiler.blocking.dist", self._neighbours))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if problems:
            raise problems[0]
