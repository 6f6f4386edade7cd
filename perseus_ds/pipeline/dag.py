"""The DAG of one iteration: nodes, precedences, makespan and critical path.

A transfer is a *meeting point*: a node that starts when both ranks have launched it. In an exchange, a rank launches
transfers and continues when all of them are complete: one transfer (DeepSpeed's 1F1B) or a batch (DualPipeV's
``CommitP2P``). If a schedule launches transfers and continues immediately (PyTorch's), its rank waits for them at the
schedule's wait operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from perseus_ds.errors import ScheduleError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import (
    Compute,
    Exchange,
    Launch,
    Load,
    Operation,
    Other,
    Payload,
    Schedule,
    Transfer,
    Wait,
)

Seconds = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

Boundary = tuple[Payload, int, int]
"""Payload, sending stage and receiving stage."""


@dataclass(frozen=True)
class FixedDurations:
    """Durations of the parts of an iteration that have no clock to choose, in seconds.

    Parts without an entry take no time.

    Attributes:
        load_s: Loads, by stage.
        transfer_s: Transfers, by boundary and direction.
        tail_s: Gradient reduction and optimizer step, by stage. Not used for stages that have a profiled tail.
        other_s: Commands that perseus-ds does not know, by (class name, stage).
    """

    load_s: dict[int, float] = field(default_factory=dict)
    transfer_s: dict[Boundary, float] = field(default_factory=dict)
    tail_s: dict[int, float] = field(default_factory=dict)
    other_s: dict[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an iteration that takes time on one rank, or on both ranks of a transfer."""

    work: Instruction | Load | Other | Transfer
    ranks: tuple[int, ...]


class Dag:
    """Nodes in a topological order, and for every node, those that must finish before it starts."""

    def __init__(self, schedule: Schedule, nodes: Sequence[Node], predecessors: Sequence[Sequence[int]]) -> None:
        self.schedule = schedule
        self.nodes = tuple(nodes)
        self.predecessors = tuple(tuple(p) for p in predecessors)

    @classmethod
    def build(cls, schedule: Schedule) -> Dag:
        """Build the DAG of a schedule.

        Raises:
            ScheduleError: If the streams deadlock or a transfer has no partner. The message names ranks and
                instructions.
        """
        return _DagBuilder(schedule).build()

    @cached_property
    def compute_nodes(self) -> tuple[tuple[int, ...], ...]:
        """For every rank, its compute nodes in program order (as ``schedule.instructions``)."""
        by_rank: list[list[int]] = [[] for _ in self.schedule.ranks]
        for index, node in enumerate(self.nodes):
            if isinstance(node.work, Instruction):
                by_rank[node.ranks[0]].append(index)
        return tuple(map(tuple, by_rank))

    def fixed_durations_s(self, fixed: FixedDurations) -> Seconds:
        """Return the duration of every node that has no clock to choose [s], zero for the others."""
        result = np.zeros(len(self.nodes))
        for index, node in enumerate(self.nodes):
            match node.work:
                case Load(stage=stage):
                    result[index] = fixed.load_s.get(stage, 0.0)
                case Other(command=command, stage=stage):
                    result[index] = fixed.other_s.get((command, stage), 0.0)
                case Transfer(payload=payload, source=source, target=target):
                    result[index] = fixed.transfer_s.get((payload, source, target), 0.0)
                case Instruction(stage=stage) if node.work.kind is Kind.TAIL:
                    result[index] = fixed.tail_s.get(stage, 0.0)
        return result

    def finish_s(self, durations_s: Seconds) -> Seconds:
        """Return the earliest finish of each node, if the iteration starts at 0 [s]."""
        finish = np.array(durations_s, dtype=np.float64)
        for level in self._levels:
            finish[level.nodes] += np.maximum.reduceat(finish[level.others], level.first)
        return finish

    def makespan_s(self, durations_s: Seconds) -> float:
        """Return the iteration time if every node starts as early as possible [s]."""
        return float(self.finish_s(durations_s).max(initial=0.0))

    def latest_finish_s(self, durations_s: Seconds, deadline_s: float) -> Seconds:
        """Return the latest finish of each node with which the iteration meets the deadline [s]."""
        durations_s = np.asarray(durations_s, dtype=np.float64)
        latest = np.full(len(self.nodes), deadline_s)
        for level in self._reverse_levels:
            latest[level.nodes] = np.minimum.reduceat(latest[level.others] - durations_s[level.others], level.first)
        return latest

    def critical_path(self, durations_s: Seconds) -> list[int]:
        """Return the node indices of one longest path, from first to last."""
        finish = self.finish_s(durations_s)
        path = [int(finish.argmax())]
        while before := self.predecessors[path[-1]]:
            path.append(max(before, key=lambda node: finish[node]))
        return path[::-1]

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        result: list[list[int]] = [[] for _ in self.nodes]
        for node, before in enumerate(self.predecessors):
            for predecessor in before:
                result[predecessor].append(node)
        return tuple(tuple(after) for after in result)

    @cached_property
    def edge_head(self) -> Indices:
        """The node at which each edge ends, with the edges in the order of ``predecessors``."""
        return np.repeat(np.arange(len(self.nodes)), [len(before) for before in self.predecessors])

    @cached_property
    def edge_tail(self) -> Indices:
        """The node at which each edge begins."""
        return np.fromiter(chain.from_iterable(self.predecessors), np.intp, len(self.edge_head))

    @cached_property
    def _levels(self) -> list[DagLevel]:
        return levels(self.edge_tail, self.edge_head, np.arange(len(self.edge_head)))

    @cached_property
    def _reverse_levels(self) -> list[DagLevel]:
        return levels(self.edge_head, self.edge_tail, np.arange(len(self.edge_head))[::-1])


@dataclass(frozen=True)
class DagLevel:
    """Nodes whose edges on one side come from earlier levels only.

    Attributes:
        nodes: Shape (n,).
        edges: Their edges on that side, grouped by node.
        others: The nodes on the other side of these edges.
        first: Shape (n,): where each node's group of edges starts.
    """

    nodes: Indices
    edges: Indices
    others: Indices
    first: Indices


def levels(tail: Indices, head: Indices, order: Indices) -> list[DagLevel]:
    """Group the nodes at the heads of edges so that each group depends only on earlier groups.

    In ``order``, the edge indices, a node's incoming edges precede its outgoing ones.
    """
    tails, heads = tail.tolist(), head.tolist()
    depth = [0] * (1 + max([*tails, *heads], default=-1))
    for edge in order.tolist():
        depth[heads[edge]] = max(depth[heads[edge]], depth[tails[edge]] + 1)
    depths = np.array(depth, dtype=np.intp)[head]
    edges = np.lexsort((head, depths))
    result = []
    for group in np.split(edges, np.flatnonzero(np.diff(depths[edges])) + 1):
        nodes, first = np.unique(head[group], return_index=True)
        result.append(DagLevel(nodes, group, tail[group], first))
    return result


class _DagBuilder:
    """Executes the streams of all ranks until each waits for another one or has finished."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.nodes: list[Node] = []
        self.predecessors: list[tuple[int, ...]] = []
        self.next = [0] * len(schedule.ranks)
        # By rank: the nodes that its next operation waits for.
        self.waits_for: list[tuple[int, ...]] = [()] * len(schedule.ranks)
        self.ranks_of = _ranks_of_transfers(schedule)
        # By transfer: the nodes that each rank waits for which has launched it, and its node once both ranks have.
        self.launched: defaultdict[Transfer, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.met: dict[Transfer, int] = {}

    def build(self) -> Dag:
        progress = True
        while progress:
            progress = False
            for rank, stream in enumerate(self.schedule.ranks):
                while self.next[rank] < len(stream) and self._run(rank, stream[self.next[rank]]):
                    self.next[rank] += 1
                    progress = True
        waiting = [
            f"rank {rank}, operation {self.next[rank]}: {stream[self.next[rank]]}"
            for rank, stream in enumerate(self.schedule.ranks)
            if self.next[rank] < len(stream)
        ]
        if waiting:
            raise ScheduleError(
                f"{self.schedule.name} deadlocks, these operations wait for each other: {'; '.join(waiting)}."
            )
        return Dag(self.schedule, self.nodes, self.predecessors)

    def _run(self, rank: int, operation: Operation) -> bool:
        """Execute a rank's next operation, or return False if it must wait for another rank."""
        match operation:
            case Launch():
                self._launch(rank, operation.transfers)
            case Exchange():
                self._launch(rank, operation.transfers)
                return self._complete(rank, operation.transfers)
            case Wait():
                return self._complete(rank, operation.transfers)
            case _:
                work = operation.instruction if isinstance(operation, Compute) else operation
                self.waits_for[rank] = (self._add(Node(work, (rank,)), self.waits_for[rank]),)
        return True

    def _launch(self, rank: int, transfers: tuple[Transfer, ...]) -> None:
        for transfer in transfers:
            sides = self.launched[transfer]
            sides[rank] = self.waits_for[rank]
            if len(sides) == 2 and transfer not in self.met:
                before = dict.fromkeys(chain.from_iterable(sides.values()))
                self.met[transfer] = self._add(Node(transfer, self.ranks_of[transfer]), tuple(before))

    def _complete(self, rank: int, transfers: tuple[Transfer, ...]) -> bool:
        """Let a rank continue after transfers if both sides have launched all of them."""
        if any(transfer not in self.met for transfer in transfers):
            return False
        met = tuple(self.met[t] for t in transfers)
        # The rank need not wait again for a node that a transfer waits for.
        implied = {before for node in met for before in self.predecessors[node]}
        self.waits_for[rank] = (*(node for node in self.waits_for[rank] if node not in implied), *met)
        return True

    def _add(self, node: Node, before: tuple[int, ...]) -> int:
        self.nodes.append(node)
        self.predecessors.append(before)
        return len(self.nodes) - 1


def _ranks_of_transfers(schedule: Schedule) -> dict[Transfer, tuple[int, int]]:
    """Return the sending and the receiving rank of every transfer."""
    sender: dict[Transfer, int] = {}
    receiver: dict[Transfer, int] = {}
    for rank, stream in enumerate(schedule.ranks):
        for operation in stream:
            if isinstance(operation, Exchange | Launch):
                sender.update(dict.fromkeys(operation.sends, rank))
                receiver.update(dict.fromkeys(operation.receives, rank))
    for transfer in sorted(sender.keys() ^ receiver.keys()):
        if transfer in sender:
            problem = f"rank {sender[transfer]} sends it, no rank receives it"
        else:
            problem = f"rank {receiver[transfer]} receives it, no rank sends it"
        raise ScheduleError(f"{schedule.name}: {transfer} has no partner: {problem}.")
    return {transfer: (rank, receiver[transfer]) for transfer, rank in sender.items()}
