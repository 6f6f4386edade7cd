"""The jobs of ``fleet.py``: a machine, what an iteration of it depends on, and the job in virtual time.

GPUs are SIMULATED. Only the public attributes of :class:`virtual.job.VirtualJob`, the ``perseus`` block and the orders
of ``perseus-ds control`` are used, so that any implementation of the server can be evaluated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from pipelines import one_f_one_b as _one_f_one_b  # type: ignore[import-not-found]  # noqa: E402
from virtual.gpu import FaultyGpu  # type: ignore[import-not-found]  # noqa: E402
from virtual.job import VirtualJob  # type: ignore[import-not-found]  # noqa: E402
from virtual.time import VirtualTime  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.pipeline.instruction import Instruction, Kind  # noqa: E402
from perseus_ds.pipeline.schedule import Schedule  # noqa: E402
from perseus_ds.simulation.device_models import COMPUTE_BOUND, DEVICES, MEMORY_BOUND, DeviceModel, Workload  # noqa: E402

LATENCY_S = 0.015
"""Time from the request of a clock until the GPU runs at it [s]."""
HOT_MHZ = 1275.0
"""Highest clock of a GPU that heat limits [MHz]."""
SLOW_SHARE, SLOW_CHANGE_S = 0.02, 1.0
"""Share of the clock changes of a slow driver that take long, and their duration [s]."""
MODULE_W = 150.0
"""What a counter of a whole module counts in addition to its GPU [W]."""

BEGIN_S = VirtualTime().now_s()
"""Begin of virtual time [s]."""

one_f_one_b = cache(_one_f_one_b)


@dataclass(frozen=True)
class Goal:
    """What the user allows or demands.

    Attributes:
        max_slowdown: Slowdown allowed, as a fraction of the time at default clocks.
        finish_in: Deadline of the whole job as a multiple of its time at default clocks. None for no deadline.
        power: Power of all GPUs together as a fraction of that at default clocks. None for no limit.
    """

    max_slowdown: float = 0.0
    finish_in: float | None = None
    power: float | None = None

    @property
    def allowed(self) -> float:
        """Slowdown allowed by the first two."""
        return self.max_slowdown if self.finish_in is None else self.finish_in - 1


class Cost(NamedTuple):
    """Time [s] and energy of all GPUs [J]."""

    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Machine:
    """The part of a job that does not change.

    Attributes:
        forwards_s, backwards_s: Times of each stage at the top clock [s]. Backwards take twice as long as forwards by
            default.
        tail_s: Time of the gradient reduction and the optimizer step [s].
        pipelines: Number of data-parallel pipelines, which wait for each other at the end of an iteration.
        gpu: Device model.
        micro_batches: Number of micro-batches, unless an iteration has another one.
        noise: Relative standard deviation of the time of each pass.
        memory_bound: Kinds of passes whose times hardly depend on the clock.
        flat_above_mhz: The time of such a pass does not depend on the clock above this one [MHz]. By default, a part of
            it does at every clock.
        change_delay_s: Delay of the next pass by each change of its GPU's clock [s].
        without_permission: Rank whose clocks cannot be set.
        slow_driver: Rank whose clock changes take 1 s now and then.
        late_marks: Rank whose agent sees marks 30 ms late.
        module_counter: Rank whose counter includes the other parts of its module.
        launches: Whether the host only launches passes and runs ahead of the GPU, as with real GPUs.
        waits_for_gpu: Whether such a host waits for the GPU after each iteration.
    """

    forwards_s: tuple[float, ...] = (0.05, 0.07)
    backwards_s: tuple[float, ...] = ()
    tail_s: float = 0.01
    pipelines: int = 1
    gpu: str = "a100-sxm"
    micro_batches: int = 6
    noise: float = 0.005
    memory_bound: tuple[Kind, ...] = (Kind.TAIL,)
    flat_above_mhz: float | None = None
    change_delay_s: float = 0.0
    without_permission: int | None = None
    slow_driver: int | None = None
    late_marks: int | None = None
    module_counter: int | None = None
    launches: bool = False
    waits_for_gpu: bool = False

    @property
    def ranks(self) -> int:
        return len(self.forwards_s) * self.pipelines

    @property
    def model(self) -> FleetModel:
        return FleetModel(**asdict(DEVICES[self.gpu]), flat_above_mhz=self.flat_above_mhz)

    def passes(self) -> Iterator[tuple[int, Kind, float, Workload]]:
        """Yield stage, kind, time at the top clock [s] and workload of each pass."""
        backwards_s = self.backwards_s or [2 * time_s for time_s in self.forwards_s]
        for stage, (forward_s, backward_s) in enumerate(zip(self.forwards_s, backwards_s, strict=True)):
            times_s = {Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s, Kind.TAIL: self.tail_s}
            for kind, time_s in times_s.items():
                yield stage, kind, time_s, MEMORY_BOUND if kind in self.memory_bound else COMPUTE_BOUND

    def schedule(self, micro_batches: int) -> Schedule:
        return one_f_one_b(len(self.forwards_s), micro_batches)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FleetModel(DeviceModel):
    """A device model whose memory-bound work may be independent of all clocks above one of them."""

    flat_above_mhz: float | None = None

    def slowdown(self, clock_mhz: float, workload: Workload = COMPUTE_BOUND) -> float:
        if workload is not MEMORY_BOUND or self.flat_above_mhz is None:
            return super().slowdown(clock_mhz, workload)
        share = self.compute_share
        return share * max(1.0, self.flat_above_mhz / clock_mhz) + 1 - share


@dataclass(frozen=True)
class State:
    """What an iteration depends on.

    Attributes:
        micro_batches: Number of micro-batches. 0 for the machine's.
        slow: Factor on the times of each rank that lasts, so that plans can take it into account.
        hot: Ranks whose GPUs heat limits.
        goal: The user's goal at this time.
        change_delay_s: Delay of a pass by a clock change. None for the machine's [s].
        lengths: Factor on the times of each pipeline by the lengths of its inputs, which nobody knows in advance.
        factor: Factor on all times, by which plans need not change.
        stall_s: Time for which the first pass of the job waits for its data [s].
    """

    micro_batches: int = 0
    slow: tuple[float, ...] = ()
    hot: tuple[int, ...] = ()
    goal: Goal = Goal()
    change_delay_s: float | None = None
    lengths: tuple[float, ...] = ()
    factor: float = 1.0
    stall_s: float = 0.0


class FleetGpu(FaultyGpu):  # type: ignore[misc]
    """A GPU of a machine.

    Attributes:
        change_delay_s: Delay of the next pass by each clock change [s].
        lowest_mhz: Lowest clock that was set since the last iteration [MHz].
    """

    machine = Machine()
    job_seed = 0

    @classmethod
    def named(cls, gpu: str, *, seed: int, **settings: Any) -> FleetGpu:
        """Create the GPU of a rank."""
        made = cls(
            cls.machine.model,
            seed=1000 * cls.job_seed + seed,
            may_lock=seed != cls.machine.without_permission,
            **settings,
        )
        made._rank = seed
        return made

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.change_delay_s = self.machine.change_delay_s
        self._rank = -1
        self._delays = 0
        self._counted_j = self._module_j = 0.0
        self._own_random = random.Random(f"driver {settings['seed']}")
        self.lowest_mhz = self._locked_mhz = self.model.top_clock_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        self._be_slow()
        super().lock_clock(clock_mhz)
        self._is_changed(clock_mhz)

    def reset_clock(self) -> None:
        self._be_slow()
        super().reset_clock()
        self._is_changed(self.model.top_clock_mhz)

    def energy_j(self) -> float:
        own_j = float(super().energy_j())
        if self._rank != self.machine.module_counter:
            return own_j
        if own_j != self._counted_j:  # one refresh includes the whole module
            self._counted_j, self._module_j = own_j, MODULE_W * self.timebase.now_s()
        return own_j + self._module_j

    def begin_work(self, workload: Workload = COMPUTE_BOUND) -> None:
        delays, self._delays = self._delays, 0
        if delays and self.change_delay_s:
            self.timebase.sleep(delays * self.change_delay_s)
        super().begin_work(workload)

    def begin_iteration(self) -> None:
        """Forget the clocks of earlier iterations, except for the present one."""
        self.lowest_mhz = self._locked_mhz

    def _be_slow(self) -> None:
        if self._rank == self.machine.slow_driver and self._own_random.random() < SLOW_SHARE:
            self.timebase.sleep(SLOW_CHANGE_S)

    def _is_changed(self, clock_mhz: int) -> None:
        self._delays += clock_mhz != self._locked_mhz
        self._locked_mhz = clock_mhz
        self.lowest_mhz = min(self.lowest_mhz, clock_mhz)


TOKENS = 4096
"""Tokens of a micro-batch of usual length."""


class FleetJob(VirtualJob):  # type: ignore[misc]
    """A job of a machine under ``"mode": "auto"``.

    Attributes:
        history: State of each iteration.
        under_plan: Whether each iteration ran under a plan on all ranks.
        idle_s: Time between iterations [s].
        begun_s: Time before the first measurement at the start [s].
        start_s: Duration of the start, in which the GPUs are measured [s].
    """

    def __init__(self, folder: Path, machine: Machine, seed: int, first: State, goal: Mapping[str, Any]) -> None:
        self.machine, self.seed = machine, seed
        self.schedule: Schedule
        self.server: Any
        self.state = first
        self.history: list[State] = []
        self.under_plan: list[bool] = []
        self.idle_s = 0.0
        self._stall_s = 0.0
        self._restarts = False
        self.begun_s = BEGIN_S
        super().__init__(
            folder,
            stages_s=machine.forwards_s,
            pipelines=machine.pipelines,
            schedule=machine.schedule(first.micro_batches or machine.micro_batches),
            gpu={"time_noise": machine.noise, "lock_latency_s": LATENCY_S},
            gpu_class=type("Gpu", (FleetGpu,), {"machine": machine, "job_seed": seed}),
            cuda=machine.launches,
            mode="auto",
            **goal,
        )
        self.start_s = self.time.now_s() - self.begun_s
        for stage, kind, time_s, _ in machine.passes():
            self.work_s[stage][kind] = time_s

    def go(self, state: State) -> None:
        """Train an iteration."""
        machine = self.machine
        micro_batches = state.micro_batches or machine.micro_batches
        if micro_batches != self.schedule.micro_batches:
            self.schedule = machine.schedule(micro_batches)
        if self._restarts:
            self.restart()
            self._restarts = False
        stages = len(machine.forwards_s)
        for rank, gpu in enumerate(self.gpus):
            own = state.slow[rank] if state.slow else 1.0
            length = state.lengths[rank // stages] if state.lengths else 1.0
            self.slowdowns[rank] = state.factor * own * length
            self.tokens[rank // stages] = round(TOKENS * length) if state.lengths else 0
            if (rank in state.hot) != (rank in self.state.hot) or not self.history:
                gpu.limit(clock_mhz=HOT_MHZ if rank in state.hot else None)
            gpu.change_delay_s = machine.change_delay_s if state.change_delay_s is None else state.change_delay_s
            gpu.begin_iteration()
        if machine.late_marks is not None:
            self.agent_link(machine.late_marks).late_s = 0.03
        self._stall_s = state.stall_s
        self.state = state
        self.history.append(state)
        self.train()
        if machine.waits_for_gpu:
            self.settle()
        has_changed = any(gpu.lowest_mhz < gpu.model.top_clock_mhz for gpu in self.gpus)
        has_fallen_back = any(self.has_fallen_back(rank) for rank in range(len(self.gpus)))
        self.under_plan.append(self.taken[-1][0] == "run" and has_changed and not has_fallen_back)

    def restart_first(self) -> None:
        """End the job and start it again before the next iteration, whose schedule the engine then declares."""
        self._restarts = True

    def pause(self, seconds: float) -> None:
        """Write a checkpoint, during which all GPUs wait."""
        self.settle()
        self.time.sleep(seconds)
        self.idle_s += seconds

    def lose_server(self) -> None:
        """Lose the server until :meth:`renew`. GPUs return to default clocks."""
        self.server = _LostServer(self.server)
        for rank in range(len(self.gpus)):
            self.agent(rank).forget_server()

    def used(self) -> Cost:
        """Return what the job has used so far."""
        return Cost(self.time.now_s() - self.begun_s, sum(gpu.true_energy_j for gpu in self.gpus))

    def work(self, rank: int, instruction: Instruction) -> None:
        if self._stall_s and rank == 0 and instruction.kind is Kind.FORWARD and instruction.micro_batch == 0:
            self.idle(rank, self._stall_s)
        if self.machine.memory_bound == (Kind.TAIL,):
            super().work(rank, instruction)
            return
        is_memory_bound = instruction.kind in self.machine.memory_bound
        self.gpus[rank].begin_work(MEMORY_BOUND if is_memory_bound else COMPUTE_BOUND)
        self.gpus[rank].finish_work(self.work_s[instruction.stage][instruction.kind] * self.slowdowns[rank])

    # Transfers and the end of an iteration hold up the device, not the host that only launches them.

    def _launch(self, rank: int, operation: Any) -> None:
        if not self.machine.launches:
            super()._launch(rank, operation)
            return
        number, pipeline = self._iterations[rank], self._place(rank)[0]

        def bring() -> None:
            for transfer in operation.transfers:
                self._meetings.bring(("device", number, pipeline, transfer), rank, None)

        self.devices[rank].enqueue(bring)

    def _await(self, rank: int, operation: Any) -> None:
        if not self.machine.launches:
            super()._await(rank, operation)
            return
        number, pipeline = self._iterations[rank], self._place(rank)[0]

        def wait() -> None:
            for transfer in operation.transfers:
                self._meetings.wait(("device", number, pipeline, transfer), 2)

        self.devices[rank].enqueue(wait)

    def _hold_host(self, rank: int) -> None:
        name = "device end", self._iterations[rank]

        def wait_for_all() -> None:
            self._meetings.bring(name, rank, None)
            self._meetings.wait(name, len(self.gpus))

        self.devices[rank].enqueue(wait_for_all)
        super()._hold_host(rank)


class _LostServer:
    """A server that receives no message any more, and whose state the next one finds."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def receive(self, rank: int, message: object) -> None:
        """Lose a message."""

    def tick(self) -> None:
        """Do nothing."""


def goal_in_block(goal: Goal, default: Cost, steps: int) -> dict[str, Any]:
    """Return the keys of the ``perseus`` block for a goal.

    Args:
        goal: The goal.
        default: What the whole job costs at default clocks.
        steps: Number of steps of the job.
    """
    if goal.finish_in is None:
        return {"goal": _limit(goal, default)}
    begin = VirtualTime().date()
    finish_by = begin + timedelta(seconds=goal.finish_in * default.time_s)
    return {"goal": {"finish_by": finish_by.isoformat(), "total_steps": steps}}


def set_goal(job: FleetJob, goal: Goal, default: Cost) -> None:
    """Give a running job another goal, which has no deadline."""
    job.control(command="clear")
    job.control(command="set", goal=_limit(goal, default))


def _limit(goal: Goal, default: Cost) -> dict[str, Any]:
    if goal.power is not None:
        return {"watts": goal.power * default.energy_j / default.time_s}
    return {"max_slowdown": goal.max_slowdown}


def lasting(state: State) -> State:
    """Return the part of a state on which plans depend."""
    return replace(state, lengths=(), factor=1.0, stall_s=0.0)
