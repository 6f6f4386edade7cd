"""A network of many ranks in one process: messages take their latency and bytes; what ranks do is the real code."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from perseus_ds.distributed import Messages, PipelineTopology, Widths
from perseus_ds.distributed.exchange import PendingAnswer, start_exchange
from perseus_ds.distributed.tree import GROUP_SIZE, Tree, groups_of

LATENCY_S = 50e-6
BANDWIDTH_B_PER_S = 10e9 / 8


def wait_s(ranks: int) -> float:
    """Return how long a rank waits for all others by ``Communicator.agree``, all of which have come already [s].

    In each group of a level: sizes to everybody around the group, values to its first rank; then size and value from
    it, each in three steps.
    """
    levels = sum(1 for _ in groups_of(0, ranks))
    return levels * (GROUP_SIZE - 1 + 1 + 2 * 3) * LATENCY_S


class Network:
    """Ranks, the trees that connect them, and the messages under way.

    Args:
        ranks: The ranks of the job.
        present: Those that take part; others send what rank 0 sends, as soon as they are
            waited for. None for all.

    Attributes:
        rank: Whose code runs now.
        size: Number of ranks.
        trees: Of each rank.
        messages: Of each rank.
        meetings: Gathers and scatters under way.
        bytes_of: By rank, sent and received in each round.
        messages_of: By rank, sent and received in each round.
        callbacks_s: By rank, processor time of what it passes on in each round [s].
    """

    def __init__(self, ranks: range, present: Sequence[int] | None = None) -> None:
        self.rank = 0
        self.size = len(ranks)
        self.bytes_of: dict[int, list[int]] = defaultdict(list)
        self.messages_of: dict[int, list[int]] = defaultdict(list)
        self.callbacks_s: dict[int, list[float]] = defaultdict(list)
        self.present = set(ranks if present is None else present)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._free_s: dict[tuple[int, str], float] = {}
        self._bytes: dict[int, int] = defaultdict(int)
        self._messages: dict[int, int] = defaultdict(int)
        self._callbacks: dict[int, float] = defaultdict(float)
        self._widths = Widths(0)
        self.meetings: dict[Any, _Meeting] = {}
        self.trees = {
            rank: Tree(ranks, rank, self._connected(rank))  # type: ignore[arg-type]
            for rank in sorted(self.present)
        }
        self.messages = {rank: Messages() for rank in self.present}

    def begin_round(self) -> None:
        """Begin an exchange: all links are idle, and it is second 0."""
        self._now_s = 0.0
        for of_ranks in (self._free_s, self._bytes, self._messages, self._callbacks):
            of_ranks.clear()

    def exchange(
        self, rank: int, numbers: Sequence[float], answers: Any = None, widths: Widths | None = None
    ) -> PendingAnswer:
        """Have a rank begin its exchange; without widths, as the rank before it."""
        self.rank, self._widths = rank, widths or self._widths
        return start_exchange(self.trees[rank], numbers, answers, self._widths, self.messages[rank])

    def finish_round(self) -> float:
        """Deliver all messages; return when the last one arrived [s]."""
        while self._events:
            self._now_s, _, arrive = heapq.heappop(self._events)
            arrive()
        for rank in self.present:
            self.bytes_of[rank].append(self._bytes[rank])
            self.messages_of[rank].append(self._messages[rank])
            self.callbacks_s[rank].append(self._callbacks[rank])
        self.meetings.clear()
        return self._now_s

    def send(self, source: int, target: int, size: int, arrived: Callable[[], None]) -> None:
        """Send a message: after those that the source sends, and before those that the target receives later."""
        for rank in (source, target):
            self._bytes[rank] += size
            self._messages[rank] += 1
        duration_s = size / BANDWIDTH_B_PER_S
        begin_s = max(self._now_s, self._free_s.get((source, "sends"), 0.0))
        self._free_s[source, "sends"] = begin_s + duration_s
        arrives_s = max(begin_s + LATENCY_S, self._free_s.get((target, "receives"), 0.0)) + duration_s
        self._free_s[target, "receives"] = arrives_s
        heapq.heappush(self._events, (arrives_s, next(self._numbers), arrived))

    def call(self, rank: int, function: Callable[[], None]) -> None:
        """Run what a thread of torch runs on a rank."""
        self.rank = rank
        began_s = time.thread_time()
        function()
        self._callbacks[rank] += time.thread_time() - began_s

    def _connected(self, rank: int) -> Callable[[Sequence[int], str], _Group]:
        return lambda ranks, name: _Group(self, tuple(ranks), name, rank)


class _Meeting:
    """One gather or scatter of a group: what has arrived, and who waits for it."""

    def __init__(self) -> None:
        self.arrived: dict[int, torch.Tensor] = {}
        self.begun: dict[int, _Begun] = {}


class _Begun:
    """A collective of one rank; nothing may wait for one that is not over."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self._result: Any = None
        self._is_over = False
        self._follow: Callable[[Callable[[], Any]], None] | None = None

    def finish(self, result: Any) -> None:
        self._result, self._is_over = result, True
        if self._follow is not None:
            follow, self._follow = self._follow, None
            self._network.call(self._rank, lambda: follow(lambda: result))

    def is_over(self) -> bool:
        return self._is_over

    def wait(self) -> Any:
        assert self._is_over, f"rank {self._rank} would wait"
        return self._result

    def then(self, follow: Callable[[Callable[[], Any]], None]) -> None:
        self._follow = follow
        if self._is_over:
            self.finish(self._result)


class _Group:
    """A group as exchanges use it; it has no other collectives."""

    def __init__(self, network: Network, ranks: tuple[int, ...], name: str, rank: int) -> None:
        self.is_first = rank == ranks[0]
        self._network, self._ranks, self._name, self._rank = network, ranks, name, rank

    def start_gather(self, numbers: torch.Tensor) -> _Begun:
        meeting, begun = self._meeting("gather"), _Begun(self._network, self._rank)
        first = self._ranks[0]

        def arrive(rank: int, block: torch.Tensor) -> None:
            meeting.arrived[rank] = block
            if len(meeting.arrived) == len(self._ranks):
                meeting.begun[first].finish([meeting.arrived[rank] for rank in self._ranks])

        size = numbers.numel() * numbers.element_size()
        if self.is_first:
            meeting.begun[first] = begun
            for absent in set(self._ranks) - self._network.present:
                self._network.send(absent, first, size, partial(arrive, absent, numbers.clone()))
            arrive(first, numbers.clone())
        else:
            self._network.send(self._rank, first, size, lambda: arrive(self._rank, numbers.clone()))
        return begun

    def start_scatter(self, numbers: Sequence[torch.Tensor], shape: Sequence[int]) -> _Begun:
        meeting, begun = self._meeting("scatter"), _Begun(self._network, self._rank)
        meeting.begun[self._rank] = begun
        if self.is_first:
            for rank, block in zip(self._ranks[1:], numbers[1:], strict=True):
                size = block.numel() * block.element_size()
                self._network.send(self._rank, rank, size, partial(_deliver, meeting, rank, block))
            begun.finish(numbers[0])
        elif self._rank in meeting.arrived:
            begun.finish(meeting.arrived[self._rank])
        return begun

    def _meeting(self, kind: str) -> _Meeting:
        return self._network.meetings.setdefault((kind, self._name, self._ranks[0]), _Meeting())


def _deliver(meeting: _Meeting, rank: int, block: torch.Tensor) -> None:
    meeting.arrived[rank] = block
    if rank in meeting.begun:
        meeting.begun[rank].finish(block)


class ModelCommunicator:
    """What ``Communicator`` does: exchanges on the modelled network; other collectives give what rank 0 gives.

    Args:
        network: The network.
        topology: Position of this rank.
        pipeline_of_rank: On rank 0, of all ranks.
        log: What rank 0 has given so far, which the ranks that are made after it get.
    """

    is_connected = True

    def __init__(self, network: Network, topology: PipelineTopology, pipeline_of_rank: Any, log: list[Any]) -> None:
        self.topology = topology
        self.messages = network.messages[topology.rank]
        self.world_size = network.size
        self.pipeline_of_rank = np.zeros(0, int) if pipeline_of_rank is None else pipeline_of_rank
        self.is_first = topology.rank == 0
        self._network, self._log, self._calls = network, log, 0

    def gather(self, value: Any) -> list[Any]:
        self._first(value)
        return [value] * self.world_size if self.is_first else []

    def from_first(self, make: Callable[[], Any]) -> Any:
        return self._first(make() if self.is_first else None)

    def together(self, check: Callable[[], object]) -> None:
        check()
        self._first(None)

    def agree(self, value: Any, combined: Callable[[list[Any]], Any]) -> Any:
        return self._first(combined([value]))

    def all_max(self, value: Any) -> Any:
        return self._first(value)

    first_of = all_sum = stage_max = all_max

    def pipeline_gather(self, value: Any) -> list[Any]:
        return [value] * self.topology.pipeline_ranks

    def barrier(self) -> None:
        self._first(None)

    def pipeline_barrier(self) -> None:
        pass

    def start_exchange(self, numbers: list[float], answers: Any, widths: Widths) -> PendingAnswer:
        return self._network.exchange(self.topology.rank, numbers, answers, widths)

    def _first(self, value: Any) -> Any:
        self._calls += 1
        if self.is_first:
            self._log.append(value)
        return self._log[self._calls - 1]
