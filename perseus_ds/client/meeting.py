"""Before training: the meeting of all ranks, through the job's own store, and measurements of their GPUs.

The part of each rank is a description of itself. Rank 0 has its agent start the job's server with all of them, and
answers with the server's address (:mod:`perseus_ds.client.agreement`). If a profile will be measured, ranks then
measure their energy counters and blocking powers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import math
import os
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from perseus_ds import errors
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.client.agreement import agree, store_of_job
from perseus_ds.client.clocks import AgentClocks
from perseus_ds.client.devices import RankGpu, clocks_of, execution_on, open_gpu_of_rank
from perseus_ds.client.operations import Work
from perseus_ds.client.timers import Execution
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import GpuError, PerseusError
from perseus_ds.gpu.energy_counter import CounterAnswer, answer_to_a_step, mean_power_w, period_s_of
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.protocol import job_messages as msg
from perseus_ds.protocol import places
from perseus_ds.protocol.job_messages import JobDescription, Measured, RankFacts
from perseus_ds.protocol.messages import ServerStarted
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
STARTED = "started"
"""Topic of the agreement before the first iteration."""
# Load before the measured step of power: number of refreshes, length of one part [s], and longest time [s].
_LOADED_REFRESHES, _LOAD_S, _LONGEST_LOAD_S = 4, 0.1, 3.0
_LONGEST_WINDOW_S, _UNKNOWN_PERIOD_S = 1.35, 1.0
"""Longest time for which the refreshes of the energy counter are counted, and its period if there are too few [s]."""
# Longest time until the power after a load is steady, and interval at which it is checked [s].
_LONGEST_STEP_S, _LOOK_S = 4.0, 0.05
# Number of refreshes in which the first rank waits for the others.
_WAITED_REFRESHES = 4
_encode = msgspec.msgpack.Encoder().encode


class Monitor(Protocol):
    """DeepSpeed's monitor, or an object with the same method."""

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training on this rank, by an engine or a user's own loop.

    Its functions are called at the meeting, where an error of one rank is raised on all of them.

    Attributes:
        facts: Returns the facts that the engine and its versions determine.
        device: Returns the device of the rank's tensors.
        read: Returns the operations of this rank in an iteration, as a schedule of one rank.
        check: Called on rank 0 with the schedule of all ranks of its pipeline. Raises an error if it cannot be planned.
        monitor: Returns what receives time and energy, as DeepSpeed's monitor does, or None.
    """

    facts: Callable[[], RankFacts]
    device: Callable[[], torch.device]
    read: Callable[[], Schedule]
    check: Callable[[Schedule], object] = lambda schedule: None
    monitor: Callable[[], Monitor | None] = lambda: None


@functools.lru_cache(maxsize=1024)
def key_of(order: Hashable) -> int:
    """Return a number that identifies an order, the same in every process."""
    digest = hashlib.blake2b(repr(order).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Opened:
    """Resources that a rank has opened. They are closed if the job does not start."""

    facts: RankFacts
    device: torch.device
    gpu: RankGpu | None = None
    clocks: AgentClocks | None = None
    timers: Execution
    simulated: Work | None = None
    schedule: Schedule
    monitor: Monitor | None = None

    def close(self) -> None:
        if self.clocks is not None:
            self.clocks.close()
        elif self.gpu is not None:
            self.gpu.close()


def meet(config: PerseusConfig, training: Training, opened: Opened) -> ServerStarted:
    """Open the GPU of this rank, have rank 0 start the job's server, and return the server's answer.

    ``opened`` receives the opened resources.

    Raises:
        PerseusError: On all ranks, the error of the first rank that has one.
    """

    def part() -> bytes:
        facts, device, schedule = training.facts(), training.device(), training.read()
        gpu = opened.gpu = open_gpu_of_rank(config, device, rank=dist.get_rank(), local_rank=local_rank())
        opened.clocks = clocks_of(gpu.take_lease(), device)
        opened.timers, opened.simulated = execution_on(device), gpu.work(config)
        opened.monitor = training.monitor()
        calibrates, has_monitor = opened.simulated is not None, opened.monitor is not None
        facts = msgspec.structs.replace(facts, calibrates=calibrates, has_monitor=has_monitor)
        opened.facts, opened.device, opened.schedule = complete(facts, config, schedule, gpu), device, schedule
        return msg.encode(opened.facts)

    def start_server(parts: list[bytes]) -> bytes:
        return _encode(_start_server(config, parts, training, opened))

    return msgspec.msgpack.decode(agree(STARTED, "begin to train", part, start_server), type=ServerStarted)


def complete(facts: RankFacts, config: PerseusConfig, schedule: Schedule, gpu: RankGpu) -> RankFacts:
    """Add what rank 0 must know about schedule, node and GPU. Raises a ``GpuError`` if needed clocks cannot be set."""
    no_permission, clocks_mhz = "", tuple[int, ...]()
    if config.mode != "observe":
        try:
            gpu.check_lock_permission()
            clocks_mhz = gpu.supported_clocks_mhz()
        except GpuError as error:
            if config.needs_clocks:
                raise
            no_permission = str(error)
    return msgspec.structs.replace(
        facts,
        schedule=ScheduleStreams.of(schedule).model_dump_json().encode(),
        versions={**facts.versions, **own_versions()},
        node=f"{socket.gethostname()} {places.boot_id()}",
        gpu=gpu.facts,
        clocks_mhz=tuple(clocks_mhz),
        no_permission=no_permission,
    )


def _start_server(config: PerseusConfig, parts: list[bytes], training: Training, opened: Opened) -> ServerStarted:
    """Have rank 0's agent start the server, and return the answer for all ranks."""
    ranks = tuple(msg.decode_facts(part) for part in parts)
    pipeline = ranks[0].pipeline
    streams = [ScheduleStreams.model_validate_json(ranks[each].schedule).to_schedule() for each in pipeline]
    training.check(replace(streams[0], ranks=tuple(stream.ranks[0] for stream in streams)))
    content = msg.encode(JobDescription.of(config.model_dump_json().encode(), ranks, os.getcwd()))
    assert opened.clocks is not None
    host = config.server.host or host_of(store_of_job())
    started = opened.clocks.start_server(host, config.server.port or 0, content)
    if started.kind:
        raise getattr(errors, started.kind, PerseusError)(started.error)
    return started


def host_of(store: Any) -> str:
    """Return the name or address at which ranks reach rank 0's node.

    Jobs that begin with ``init_method="tcp://host:port"`` have it only in their store.
    """
    while hasattr(store, "underlying_store"):  # a prefix of keys
        store = store.underlying_store
    return os.environ.get("MASTER_ADDR") or str(getattr(store, "host", "127.0.0.1"))


def local_rank() -> int:
    """Return the rank on this node, from the launcher's environment variables."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))


def own_versions() -> dict[str, str]:
    """Return the versions of torch and Perseus. A package on Python's path that is not installed has none."""
    installed = {}
    for package in ("torch", "perseus-ds"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def measure_counter(clocks: AgentClocks, timebase: Timebase = REAL_TIME) -> Measured:
    """Return the refresh period of the energy counter. Raises a ``GpuError`` if it cannot be read."""
    refreshes: list[tuple[float, float]] = []
    end_s = timebase.now_s() + _LONGEST_WINDOW_S
    clocks.log_counter(True)
    try:
        while len(refreshes) < _LOADED_REFRESHES and timebase.now_s() < end_s:
            timebase.sleep(_LOOK_S)
            refreshes += clocks.refreshes()
    finally:
        clocks.log_counter(False)
    return Measured(period_s_of(refreshes) or _UNKNOWN_PERIOD_S)


def measure_gpu(
    clocks: AgentClocks,
    load: Callable[[float], None],
    device: torch.device,
    *,
    pipeline_rank: int,
    pipeline_ranks: int,
    timebase: Timebase = REAL_TIME,
) -> Measured:
    """Measure the energy counter and the blocking power of this rank's GPU. All ranks must call it.

    After a load, all ranks wait in a collective for the first ranks of their pipelines, which enter it once the energy
    counter of their own GPU is steady. Then the first ranks wait for all others. The rank of a pipeline of one never
    waits, and its idle GPU is closest to that. ``load`` keeps the GPU busy for some time [s].

    Raises:
        PerseusError: On all ranks, if the load fails on one.
    """
    is_first = pipeline_rank == 0
    error = ""
    with _read_counter(clocks, timebase) as refreshes_since:
        begin_s = timebase.now_s()
        try:
            while len(refreshes_since(begin_s)) < _LOADED_REFRESHES and timebase.now_s() < begin_s + _LONGEST_LOAD_S:
                load(_LOAD_S)
        except Exception as failure:  # for example no memory: the other ranks wait in the collective
            error = f"perseus: rank {dist.get_rank()} could not keep its GPU busy to measure it: {failure!r}"
        ended_s = timebase.now_s()
        loaded_w = mean_power_w(refreshes_since(begin_s))

        def answered() -> CounterAnswer | None:
            return answer_to_a_step(refreshes_since(ended_s), loaded_w, ended_s)

        answer = None
        while is_first and not error and timebase.now_s() < ended_s + _LONGEST_STEP_S:
            if (answer := answered()) is not None and answer.is_steady:
                break
            timebase.sleep(_LOOK_S)
        _raise_on_all(error, device)
        answer = answer or answered()
        period_s, settle_s = (_UNKNOWN_PERIOD_S, 0.0) if answer is None else (answer.period_s, answer.settle_s)
        power_w = math.nan if answer is None else answer.power_w
        if pipeline_ranks == 1:
            return Measured(period_s, settle_s, power_w)
        # All ranks wait equally long.
        period_s, settle_s = _largest_of_all([period_s, settle_s], device)
        settled_s = timebase.now_s() + settle_s + period_s
        if not is_first:
            timebase.sleep(settle_s + (1 + _WAITED_REFRESHES) * period_s)
        _wait_for_all(device)
        if is_first:
            power_w = mean_power_w(refreshes_since(settled_s))
    return Measured(period_s, settle_s, power_w)


@contextmanager
def _read_counter(
    clocks: AgentClocks, timebase: Timebase
) -> Iterator[Callable[[float], Sequence[tuple[float, float]]]]:
    """Yield a function that returns the refreshes of the energy counter since a time. There are none on an error."""
    seen: list[tuple[float, float]] = []

    def since(begin_s: float) -> Sequence[tuple[float, float]]:
        with suppress(GpuError):
            seen.extend(clocks.refreshes())
        return [refresh for refresh in seen if refresh[0] >= begin_s]

    clocks.log_counter(True)
    try:
        yield since
    finally:
        clocks.log_counter(False)


def _raise_on_all(error: str, device: torch.device) -> None:
    """Wait for all ranks in a collective, and raise an error on all of them if any rank has one."""
    (has_failed,) = _largest_of_all([float(bool(error))], device)

    def part() -> bytes:
        if error:
            raise PerseusError(error)
        return b""

    if has_failed:
        agree("measured", "measure its GPU", part, b"".join)


def _largest_of_all(values: list[float], device: torch.device) -> tuple[float, ...]:
    tensor = torch.tensor(values, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tuple(tensor.tolist())


def _wait_for_all(device: torch.device) -> None:
    """Wait for all ranks in a collective, because sending to one rank would create another communicator."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
