"""A training job in virtual time, with clients, agents and a server on simulated GPUs.

All of them are real. The engine only takes time: like the real ones, it reports its iterations and operations to a
:class:`Session`.

A job of one rank runs on the thread of the test. In a pipeline, each rank is a thread of one :class:`VirtualTime`, and
ranks wait for each other in :class:`Meetings`. Messages are delivered immediately.
"""

import itertools
import json
import statistics
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from frontiers import save_mixed_plan
from pipelines import one_f_one_b

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import PlanJudged
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import RecordFollower
from perseus_ds.client.meeting import complete, key_of, measure_counter, measure_gpu
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.client.timers import CudaExecution, HostExecution
from perseus_ds.config import parse_block
from perseus_ds.engines import engine as engines
from perseus_ds.engines.engine import Engine, Session, SessionState
from perseus_ds.optimizer import optimize, with_alternatives
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Load, Other, Wait
from perseus_ds.policy.commands import parse_command
from perseus_ds.protocol.job_messages import JobDescription, Joined, RankFacts
from perseus_ds.server.job import Job
from perseus_ds.server.server import JobServer
from perseus_ds.simulation.device_models import COMPUTE_BOUND, MEMORY_BOUND
from perseus_ds.simulation.gpu import SimulatedGpu
from virtual.agent import clocks_of
from virtual.cuda import VirtualCuda, VirtualHost, wait_for_event
from virtual.gpu import OneAtATime
from virtual.meetings import Collectives, Meetings, RankLeftError
from virtual.time import VirtualTime

SLOWER = {"goal": {"max_slowdown": 0.2}}
"""A single stage has no slack: only a slower plan saves energy."""


class VirtualJob:
    """A job of one rank, or of a pipeline of ranks, which runs 1F1B by default.

    A test may change all attributes but the last two.

    Attributes:
        work_s: Time of each kind of instruction at the top clock, by stage [s].
        slowdowns: Factor on the times of each rank.
        tokens: Tokens in the inputs of a micro-batch, by pipeline, which the engine reports.
        wait_s: Time for which the GPU is idle before each pass [s].
        schedule: The schedule that the ranks execute.
        devices: The :class:`VirtualHost` or :class:`VirtualCuda` of each rank.
        taken: Phase, time [s] and energy [J] that all GPUs really used, for every iteration.
        read: How many times the schedule of an iteration was read after the start.
        sessions: The session of each rank. Ranks are threads here and processes in a real job, so a session does not
            know those of other ranks.
    """

    def __init__(
        self,
        folder,
        *,
        stages_s=(0.1,),
        tail_s=0.01,
        work_s=None,
        wait_s=0.0,
        other_s=0.0,
        load_s=0.0,
        transfer_s=0.0,
        micro_batches=3,
        pipelines=1,
        schedule=None,
        gpu=None,
        device="a100-sxm",
        gpu_class=SimulatedGpu,
        cuda=False,
        graph_tail_s=None,
        **block,
    ):
        """Start the job. :meth:`train` runs its first iteration.

        Args:
            stages_s: Time of each stage's forward at the top clock; its backward takes twice that [s].
            tail_s: Time of the tail at the top clock [s].
            work_s: Times by kind, instead of both, for a job of one rank [s].
            other_s: Time of an unknown command [s].
            load_s: Time of loading a micro-batch [s].
            transfer_s: Time of a transfer [s].
            pipelines: Data-parallel pipelines, whose ranks wait for each other at the end of an iteration.
            schedule: Schedule to execute; it may have several stages per rank and overlapping transfers.
            gpu: Settings of the simulated GPUs.
            cuda: Whether passes are only launched, on a stand-in for CUDA.
            graph_tail_s: Time of the part of the tail that is, with all passes, in a graph of that stand-in, which is
                captured after two iterations and replayed [s]. None for no graph.
            block: Other keys of the ``perseus`` block.
        """
        self.time = VirtualTime()
        self.folder = folder
        halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        self.work_s = [
            work_s or {Kind.FORWARD: s, Kind.BACKWARD: 2 * s, **dict.fromkeys(halves, s), Kind.TAIL: tail_s}
            for s in stages_s
        ]
        self.schedule = schedule or one_f_one_b(ranks=len(stages_s), micro_batches=micro_batches)
        ranks = pipelines * len(self.schedule.ranks)
        self.slowdowns = [1.0] * ranks
        self.tokens = [0] * pipelines
        self.worker = WorkerAtOnce
        self.taken = []
        self.read = 0
        self.sessions = []
        self.wait_s, self._transfer_s = wait_s, transfer_s
        self._idle_s = {Other: other_s, Load: load_s}
        settings = {"counter_period_s": 0.1, "lock_latency_s": 0.015, **(gpu or {})}
        if "lock-contention" in settings.get("conditions", ()):
            settings["driver_turn"] = OneAtATime(self.time)
        self.gpus = [gpu_class.named(device, timebase=self.time, seed=rank, **settings) for rank in range(ranks)]
        self._launches, self._graph_tail_s = cuda or graph_tail_s is not None, graph_tail_s
        self.devices = [(VirtualCuda if self._launches else VirtualHost)(self.time, gpu) for gpu in self.gpus]
        self._config = parse_block({"device": "simulated", "output_dir": str(folder), "cache": False, **block})
        self._records, self._follower = [], RecordFollower(folder)
        self._start()

    # Of rank 0.
    runtime = property(lambda self: self.sessions[0].runtime)
    gpu = property(lambda self: self.gpus[0])
    cuda = property(lambda self: self.devices[0])

    @property
    def runtimes(self):
        return [session.runtime for session in self.sessions]

    @property
    def phase(self):
        """Phase of the next iterations, as decided by the server."""
        return self.server.next.phase

    @property
    def under_way(self):
        """Number of iterations that begin before a decision on the last report takes effect."""
        return 2 if self._launches else 1

    @property
    def is_under_a_plan(self):
        """True if the next iterations run under a plan and no rank has fallen back."""
        return self.server.next.is_planned and not any(map(self.has_fallen_back, range(len(self.gpus))))

    def has_fallen_back(self, rank):
        return self.agent_link(rank).actor.health.has_failed

    def agent_link(self, rank):
        return self._clocks[rank]._link

    def agent(self, rank):
        return self.agent_link(rank).agent

    def train(self, iterations=1):
        """Run iterations and return their phases."""
        begin = len(self.taken)
        self._on_all_ranks(lambda rank: [self._iterate(rank) for _ in range(iterations)])
        return [phase for phase, _, _ in self.taken[begin:]]

    def train_until(self, phase, most=80):
        """Run iterations until the next one has this phase, and return the phases before."""
        return self.train_while(lambda: self.phase != phase, most)

    def train_while(self, is_so, most=300):
        """Run iterations while a condition holds, and return their phases."""
        phases = []
        while is_so():
            assert len(phases) < most, phases
            phases += self.train()
        return phases

    def train_until_compared(self, times=1):
        """Run iterations until plans have been compared ``times`` times, and return the comparisons."""
        self.train_while(lambda: len(self.events(PlanJudged)) < times)
        return self.events(PlanJudged)

    def late_under_plans(self, by_s=0.05):
        """Make passes take longer under plans than when they were profiled."""
        idle, work = self.idle, self.work

        def work_late(rank, instruction):
            if self.sessions[rank].phase == "run":
                idle(rank, by_s)
            work(rank, instruction)

        self.work = work_late

    def work(self, rank, instruction):
        kind, work_s = instruction.kind, self.work_s[instruction.stage]
        workload = MEMORY_BOUND if kind is Kind.TAIL else COMPUTE_BOUND
        kinds = (Kind.FORWARD, Kind.BACKWARD) if kind is Kind.FORWARD_BACKWARD else (kind,)
        seconds = sum(work_s[kind] for kind in kinds) * self.slowdowns[rank]
        self.devices[rank].launch(seconds, workload)

    def idle(self, rank, seconds):
        self.devices[rank].idle(seconds)

    def read_order(self, rank, schedule):
        """Return the operations of a rank, as read once the job has started."""
        self.read += rank == 0
        return replace(schedule, ranks=(schedule.ranks[self._place(rank)[1]],))

    def settle(self):
        """Wait for all devices."""
        for device in self.devices:
            device.synchronize()

    def records(self):
        """Return all records so far."""
        self.server.recorder.flush()
        for _, found in self._follower.read():
            self._records += found
        return self._records

    def events(self, kind):
        """Return all records of a kind so far."""
        return [record for record in self.records() if isinstance(record, kind)]

    def control(self, **command):
        """Have the server execute a command of ``perseus-ds control``, and return the answer."""
        self.server.recorder.flush()
        return self.server.control.carry_out(parse_command(command))

    def restart(self, steps=None):
        """End the job, start it again in the same folder from its saved state, and return that state.

        Args:
            steps: Number of steps that the engine reports; by default it reports none.
        """
        state = json.loads(json.dumps(self.server.state()))
        self.close()
        self._start(state, steps)
        return state

    def renew(self):
        """Replace the server, as if it had been killed, while ranks continue to train."""
        self.server.recorder.flush()
        state = json.loads(json.dumps(self.server.state()))
        self._epoch += 1
        self.server = self._make_server(epoch=self._epoch, state=state)
        self.server.start()
        for rank, runtime in enumerate(self.runtimes):
            self.agent(rank).forget_server()
            self._to_server(rank, Joined(runtime.clocks.memory.iteration))

    def close(self):
        """Wait for the devices, end the job, and return its iterations."""
        self.settle()
        self._on_all_ranks(lambda rank: self.sessions[rank].close())
        return [record for record in self.records() if isinstance(record, IterationRecord)]

    def _start(self, state=None, steps=None):
        self._meetings = Meetings(self.time)
        self._collectives = Collectives(self._meetings, len(self.gpus))
        self._captured = {}
        self._iterations = [0] * len(self.gpus)
        self._done = [0] * len(self.gpus)
        self.sessions = [self._session(rank, steps) for rank in range(len(self.gpus))]
        facts = tuple(self._facts(rank) for rank in range(len(self.gpus)))
        self._description, self._epoch = JobDescription.of(self._config.model_dump_json().encode(), facts), 0
        self.server = self._make_server(state=state)
        self._clocks = [
            clocks_of(gpu, self.time, self.devices[rank] if self._launches else None, partial(self._to_server, rank))
            for rank, gpu in enumerate(self.gpus)
        ]
        self._on_all_ranks(self._begin)

    def _make_server(self, **keys):
        return JobServer(
            Job.of(self._description),
            self._send,
            timebase=self.time,
            worker=lambda *request: self.worker(*request),  # noqa: PLW0108  # a test may replace it later
            **keys,
        )

    def _session(self, rank, steps):
        # A session surrounds the graphs of its process, which are those of this rank's stream.
        with patch.object(torch.cuda, "CUDAGraph", self.devices[rank].CUDAGraph):
            session = Session(VirtualEngine(self, rank, steps), self._config)
        engines._SESSIONS.discard(session)
        return session

    def _facts(self, rank):
        own = replace(self.schedule, name="1f1b", ranks=(self.schedule.ranks[self._place(rank)[1]],))
        facts = self.sessions[rank]._facts(self.schedule.micro_batches)
        return complete(facts, self._config, own, self.gpus[rank])

    def _to_server(self, rank, message):
        self.server.receive(rank, message)
        self.server.tick()

    def _send(self, rank, message):
        self.agent(rank).receive_from_server(message)

    def _begin(self, rank):
        _, place = self._place(rank)
        clocks, ranks = self._clocks[rank], len(self.schedule.ranks)
        if rank == 0:
            self.server.start()
        welcome = self.server.welcome()
        if welcome.measures_power:
            measured = measure_gpu(
                clocks,
                lambda seconds: self._load(rank, seconds),
                torch.device("cpu"),
                pipeline_rank=place,
                pipeline_ranks=ranks,
                timebase=self.time,
            )
            clocks.send(measured)
        elif welcome.measures_counter:
            clocks.send(measure_counter(clocks, self.time))
        self._to_server(rank, Joined())
        self.sessions[rank].runtime = PerseusRuntime(
            clocks,
            self._timers(rank),
            replace(self.schedule, ranks=(self.schedule.ranks[place],)),
            key=key_of(self.schedule.micro_batches),
            is_rank_0=rank == 0,
            timebase=self.time,
        )
        self.sessions[rank].state = SessionState.BETWEEN

    def _load(self, rank, seconds):
        self.devices[rank].launch(seconds)
        self.devices[rank].synchronize()

    def _timers(self, rank):
        if self._launches:
            return CudaExecution(torch.device("cuda", 0), self.devices[rank], wait_for_event)
        return HostExecution(self.time)

    def _iterate(self, rank):
        session = self.sessions[rank]
        begin_s = self.time.now_s()
        begin_j = sum(gpu.true_energy_j for gpu in self.gpus) if rank == 0 else 0.0
        self._iterations[rank] += 1
        operations = self.schedule.ranks[self._place(rank)[1]]
        if self._graph_tail_s is not None and self._iterations[rank] > 2:
            self._replay(rank, operations)
        else:
            with self._iteration(rank):
                self._run(rank, operations)
        end = "end", self._iterations[rank]
        self._meetings.bring(end, rank, None)
        self._meetings.wait(end, len(self.gpus))
        phase = session.phase
        session.end_iteration()
        if self._launches:
            self._hold_host(rank)
        if rank == 0:
            used_j = sum(gpu.true_energy_j for gpu in self.gpus) - begin_j
            self.taken.append((phase, self.time.now_s() - begin_s, used_j))

    def _iteration(self, rank):
        schedule = self.schedule
        return self.sessions[rank].iteration(schedule.micro_batches, read=lambda: self.read_order(rank, schedule))

    def _run(self, rank, operations):
        around = self.sessions[rank].operation
        for operation in operations:
            kind = operation.instruction.kind if isinstance(operation, Compute) else None
            if self.wait_s and kind in (Kind.FORWARD, Kind.BACKWARD):
                self.idle(rank, self.wait_s)
            if kind is Kind.FORWARD and operation.instruction.stage == 0:
                self.sessions[rank].add_tokens(self.tokens[self._place(rank)[0]])
            with around(operation):
                if kind is not None:
                    self.work(rank, operation.instruction)
                if idle_s := self._idle_s.get(type(operation)):
                    self.idle(rank, idle_s)
                if isinstance(operation, Exchange | Launch):
                    self._launch(rank, operation)
                if isinstance(operation, Exchange | Wait):
                    self._await(rank, operation)

    def _hold_host(self, rank):
        """Wait for the iteration before the last launched one, since launch queues are finite."""
        done, launched = self._done, self._iterations[rank]

        def count():
            done[rank] += 1

        self.devices[rank].enqueue(count)
        self.devices[rank].wait_until(lambda: done[rank] >= launched - 1)

    def _replay(self, rank, operations):
        """Replay a graph of a rank's passes, captured in the first call, and execute the rest of the tail."""
        *passes, tail = operations
        if rank not in self._captured:
            cuda, number = self.devices[rank], itertools.count()
            self._captured[rank] = graph = cuda.CUDAGraph()
            with cuda.graph(graph), self._iteration(rank):
                self._run(rank, passes)
                self.sessions[rank].begin_tail(tail.instruction.stage)
                cuda.enqueue(lambda: self._reduce(rank, next(number)))
        self._captured[rank].replay()
        self.work(rank, tail.instruction)

    def _reduce(self, rank, number):
        """Keep the device busy until all ranks arrive, and for the tail's part in the graph."""
        self._meetings.bring(("reduce", number), rank, None)
        self._meetings.wait(("reduce", number), len(self.gpus))
        self.time.sleep(self._graph_tail_s)

    def _place(self, rank):
        """Return the pipeline of a rank and its rank in the pipeline."""
        return divmod(rank, len(self.schedule.ranks))

    def _launch(self, rank, operation):
        launched = self.time.now_s(), self.gpus[rank].transfer_delay_s
        for transfer in operation.transfers:
            self._meetings.bring((self._iterations[rank], self._place(rank)[0], transfer), rank, launched)

    def _await(self, rank, operation):
        for transfer in operation.transfers:
            sides = self._meetings.wait((self._iterations[rank], self._place(rank)[0], transfer), 2).values()
            launched_s, delay_s = map(max, zip(*sides, strict=True))
            self.time.sleep(max(0.0, launched_s + delay_s + self._transfer_s - self.time.now_s()))

    def _on_all_ranks(self, run):
        """Run a function on all ranks concurrently, and raise the first error of a rank."""
        problems = []

        def on(rank):
            self._collectives.use(rank)
            try:
                run(rank)
            except RankLeftError:
                pass
            except BaseException as error:
                problems.append(error)
                self._meetings.leave()

        threads = [self.time.thread(lambda rank=rank: on(rank), f"rank-{rank}") for rank in range(len(self.gpus))]
        with patch("perseus_ds.client.meeting.dist", self._collectives):
            if len(self.gpus) == 1:
                run(0)
                return
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if problems:
            raise problems[0]


class VirtualEngine(Engine):
    """The engine of a rank of a virtual job, which executes its iterations."""

    model = "virtual"

    def __init__(self, job, rank, steps):
        self._job = job
        self._rank = rank
        self._steps = steps

    def facts(self):
        pipeline, place = self._job._place(self._rank)
        ranks = len(self._job.schedule.ranks)
        return RankFacts(
            pipeline=tuple(range(pipeline * ranks, (pipeline + 1) * ranks)),
            copies=tuple(range(place, len(self._job.gpus), ranks)),
            steps=self._steps,
        )

    def device(self):
        return torch.device("cpu")

    def read(self):
        return self._job.read_order(self._rank, self._job.schedule)

    def surround(self, session):
        """Do nothing, because the job calls its sessions itself."""

    def release(self):
        """Do nothing."""


class WorkerAtOnce:
    """Does the work of ``OptimizeWorker`` in this process, unless a test sets an error."""

    error = ""

    def __init__(self, request, log_path):
        self._request = request
        self._is_done = False

    def remaining_s(self):
        return None

    def has_ended(self):
        if not (self.error or self._is_done):
            request = self._request
            profile = StageProfile.load(request.profile)
            frontier = optimize(request.schedule, profile, request.settings, plans=20)
            with_alternatives(frontier, request.schedule, profile).save(request.out)
            self._is_done = True
        return True

    def stop(self):
        pass


def in_order(phases):
    """Return the phases without consecutive repetitions."""
    return [phase for phase, _ in itertools.groupby(phases)]


def predicted_over_used(folder, schedule, stages_s, **keys):
    """Profile a job, run a plan of random clocks, and return relative errors of time and energy."""
    jobs = {"schedule": schedule, "stages_s": stages_s, "tail_s": 0.001, **keys}
    profiling = VirtualJob(folder / "profile", mode="profile", profile={"min_clock_mhz": 900, "warm_up": 5}, **jobs)
    profiling.train_until("observe")
    profiling.close()
    plan = save_mixed_plan(folder / "frontier", schedule, StageProfile.load(folder / "profile"))
    running = VirtualJob(folder / "run", mode="run", frontier=str(folder / "frontier"), **jobs)
    running.train(10)
    running.close()
    time_s, energy_j = (statistics.median(taken[number] for taken in running.taken) for number in (1, 2))
    return plan.time_s / time_s - 1, plan.energy_j / energy_j - 1
