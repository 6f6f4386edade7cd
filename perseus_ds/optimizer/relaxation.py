"""The relaxed problem: every decision may take any time between two of its options, at a cost on their lower hull.

Words:

- the *hull* of a decision is the lower convex hull of its options' costs over their times;
- a *piece* of a hull lies between two of its corners. It has a length [s] and a saving [W], the energy saved for each
  second that is spent on it;
- the *flow* of an arc is the energy that an additional second on it would save [W]. At an optimum it is conserved at
  every event. The flow of a decision's arc is its *price*.

The relaxed problem of a deadline chooses event times that meet it, and how much of each piece is used, so that the most
energy is saved. It is a linear programme (:mod:`perseus_ds.optimizer.interior_point`).

Micro-batches are alike, so an optimum is far from unique. Savings are *tilted* by a small fraction to select an optimum
that can be realised well at measured clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.interior_point import InteriorPoint, LinearProgramme
from perseus_ds.optimizer.laplacian import Laplacian
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Corners, Floats, Indices, Problem
from perseus_ds.pipeline.instruction import Kind

_MARGIN = 0.4
"""Relative margin by which a price may lie outside the range of the neighbouring optima."""
_TILT = 3e-3
"""Fraction by which savings are raised at the start of the iteration and lowered at its end.

This tilt selects an optimum that slows the early part of the iteration down as a whole rather than every instruction by
half a step, so that it can be realised with few clock changes. The bound is computed without the tilt and decreases by
less than 0.01 % because of it.
"""
_ALTERNATION = 0.15
"""Fraction by which savings are alternately raised and lowered to obtain optima that alternate.

If no single clock fits, an instruction runs at a lower clock for some micro-batches and at a higher one for others.
Neighbouring stages need not wait for each other if these micro-batches follow a pattern: every second, third, fourth or
fifth one, shifted by one micro-batch at the next stage. This tilt selects such an optimum.
"""


@dataclass(frozen=True)
class Relaxed:
    """An optimum of the relaxed problem.

    Attributes:
        event_s: Shape (events,): time of each event [s].
        flow_w: Shape (arcs,): energy that an additional second on each arc would save [W]; conserved at every event.
    """

    deadline_s: float
    event_s: Floats
    flow_w: Floats


@dataclass(frozen=True)
class Pieces:
    """The hull pieces of all decisions, concatenated.

    Attributes:
        owner: Shape (pieces,): the decision of each piece.
        length_s: Shape (pieces,): length of each piece [s].
        saving_w: Shape (pieces,): energy saved per second on it [W].
    """

    owner: Indices
    length_s: Floats
    saving_w: Floats

    def where(self, kept: npt.NDArray[np.bool_]) -> Pieces:
        """Return the pieces selected by a mask."""
        return Pieces(self.owner[kept], self.length_s[kept], self.saving_w[kept])


class Relaxation:
    """Solves the relaxed problem of one network for any deadline."""

    def __init__(self, network: Network, *, turns: int = 1) -> None:
        """Set up the solver, with optima that alternate if ``turns``, a number of micro-batches, is above 1."""
        self.network = network
        problem = network.problem
        # Shape (decisions,): factors on savings.
        self._tilt = 1 + _TILT * (1 - 2 * network.position[: network.decisions])
        if turns > 1:
            self._tilt += _ALTERNATION * _alternation(problem, turns)
        self.fastest_j = float(problem.table.cost_j[problem.fastest].sum())
        self._time_unit_s = float(np.mean([group.options.time_s[0] for group in problem.groups]))
        # By group and number of usable clocks, from the fastest one.
        self._corners: dict[tuple[int, int], Corners] = {}
        self._laplacian = Laplacian(network)
        self._even_flow = _even_flow(network)
        # Shape (events,): earliest time of each event, and its latest time relative to the end, at the fastest clocks.
        self._earliest_s = network.earliest_s(network.least_s)
        self._latest_from_end_s = network.latest_s(network.least_s, 0.0)

    def pieces(self, deadline_s: float) -> Pieces:
        """Return the hull pieces of every decision, for clocks that can meet the deadline.

        A clock is excluded if the deadline is missed even with all other instructions at their fastest clocks. This
        tightens the bound near ``T_min``. Savings are tilted, see ``_TILT`` and ``_ALTERNATION``.
        """
        problem, decisions = self.network.problem, slice(self.network.decisions)
        tail, head = self.network.tail[decisions], self.network.head[decisions]
        # Shape (decisions,), as the next one: longest time that an instruction may take, and number of usable clocks.
        longest_s = deadline_s + self._latest_from_end_s[head] - self._earliest_s[tail]
        usable = problem.table.longest_within(problem.group, longest_s) - problem.fastest + 1
        hulls = [self._hull(group, own) for group, own in zip(problem.group.tolist(), usable.tolist(), strict=True)]
        owner = np.repeat(np.arange(len(hulls)), [len(hull.length_s) for hull in hulls])
        length_s = np.concatenate([hull.length_s for hull in hulls])
        saving_w = np.concatenate([hull.saving_w for hull in hulls])
        return Pieces(owner, length_s, saving_w * self._tilt[owner])

    def _hull(self, group: int, usable: int) -> Corners:
        """Return the hull of a group's fastest options."""
        key = group, usable
        if key not in self._corners:
            own = self.network.problem.groups[group]
            self._corners[key] = Corners.of(own.options.time_s[:usable], own.cost_j[:usable])
        return self._corners[key]

    def solve(self, deadline_s: float, *, waiting_w: float | None = None) -> Relaxed:
        """Return the optimum for a deadline above ``T_min`` [s].

        If ``waiting_w`` is given, the energy cost of a second of iteration time without any instruction [W], the
        deadline of least energy is chosen, and ``deadline_s`` is the initial guess.
        """
        pieces = self.pieces(deadline_s if waiting_w is None else np.inf)
        return self._solve(pieces, self.network.least_s, deadline_s, waiting_w)

    def solve_between(self, deadline_s: float, faster: Relaxed, slower: Relaxed) -> Relaxed:
        """Return the optimum for a deadline between those of two known optima.

        The price of a second of an instruction is expected to lie near those of the two optima. So pieces that save
        clearly more are used completely, and pieces that save clearly less are excluded.
        """
        pieces = self.pieces(deadline_s)
        prices_w = np.stack([faster.flow_w[pieces.owner], slower.flow_w[pieces.owner]])
        is_used = pieces.saving_w > prices_w.max(axis=0) * (1 + _MARGIN)
        competes = ~is_used & (pieces.saving_w >= prices_w.min(axis=0) * (1 - _MARGIN))
        network = self.network
        used_s = np.bincount(pieces.owner[is_used], pieces.length_s[is_used], len(network.least_s))
        least_s: Floats = network.least_s + used_s
        if network.earliest_s(least_s)[-1] >= deadline_s:
            return self.solve(deadline_s)
        return self._solve(pieces.where(competes), least_s, deadline_s, None)

    def _solve(self, pieces: Pieces, least_s: Floats, deadline_s: float, waiting_w: float | None) -> Relaxed:
        """Solve the linear programme in units of a typical time and power."""
        time_s = self._time_unit_s
        power_w = float(pieces.saving_w.mean()) if len(pieces.owner) else 1.0
        programme = LinearProgramme(
            least=least_s / time_s,
            owner=pieces.owner,
            length=pieces.length_s / time_s,
            saving=pieces.saving_w / power_w,
            deadline=deadline_s / time_s,
            waiting=None if waiting_w is None else waiting_w / power_w,
            cost=self.fastest_j / (time_s * power_w),
        )
        optimum = InteriorPoint(self.network, self._laplacian, programme, self._even_flow).run()
        return Relaxed(
            deadline_s=float(optimum.event[-1]) * time_s,
            event_s=optimum.event * time_s,
            flow_w=optimum.flow * power_w,
        )


def _alternation(problem: Problem, turns: int) -> Floats:
    """Return values from -1 to 1 that repeat after the given number of micro-batches, shape (decisions,)."""
    turn = np.zeros(len(problem.node))
    for decisions, stream in zip(problem.rank_decisions, problem.instructions, strict=True):
        for decision, instruction in zip(decisions, stream, strict=True):
            turn[decision] = instruction.micro_batch - instruction.stage
            # In the steady state of 1F1B, a backward and the next forward take place at the same time as the forward
            # and the backward of the next stage.
            if turns == 2 and instruction.kind is Kind.BACKWARD:
                turn[decision] += 1
    result: Floats = np.cos(2 * np.pi / turns * turn)
    return result


def _even_flow(network: Network) -> Floats:
    """Return a flow of size 1 from the start to the end that is divided evenly at every event, shape (arcs,)."""
    through = np.zeros(network.events)
    through[-1] = 1.0
    flow = np.zeros(len(network.tail))
    for level in reversed(network.forward):
        count = np.diff(np.r_[level.first, len(level.edges)])
        flow[level.edges] = np.repeat(through[level.nodes] / count, count)
        through += np.bincount(level.others, flow[level.edges], network.events)
    return flow
