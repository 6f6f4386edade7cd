"""The relaxed problem at one deadline, solved by an interior-point method.

Every decision may move along the lower convex hull of its options. With event times ``x`` and, for each arc, the
time ``d`` spent on each hull piece and the waiting time ``s``,

    minimise    -saving . d
    subject to  least + sum(d) + s = x[head] - x[tail],   0 <= d <= length,   s >= 0.

The multipliers of the equations are a flow through the network: the energy that an additional second on each arc would
save. A Newton step solves a system with the Laplacian of the network, which is banded if the events are ordered along
the pipeline, so a step costs about events * bandwidth ** 2 (Mehrotra's predictor-corrector method, SIAM J.
Optimization 2(4), 1992).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve_banded, cholesky_banded
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Corners, Floats, Indices, Problem
from perseus_ds.pipeline.instruction import Kind

_MAX_STEPS = 80
_START_FLOW = 0.6
"""Flow through a typical decision at the start, in units of typical savings."""
_TOLERANCE = 1e-8
"""Tolerance relative to the cost. Bounds are recomputed from the flow, so it affects their tightness, not validity."""
_MARGIN = 0.4
"""Relative margin by which a price may lie outside the range of the neighbouring optima."""
_TILT = 3e-3
"""Fraction by which savings are raised at the start of the iteration and lowered at its end.

Micro-batches are alike, so the optimum is far from unique. The tilt selects an optimum that slows the early part of the
iteration down as a whole rather than every instruction by half a step, so that it can be realised with few clock
changes. The bound is computed without the tilt and decreases by less than 0.01 % because of it.
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
        owner: The decision of each piece.
        length_s: Length of each piece [s].
        saving_w: Energy saved per additional second on it [W].
    """

    owner: Indices
    length_s: Floats
    saving_w: Floats


class Relaxation:
    """Solves the relaxed problem of one network for any deadline."""

    def __init__(self, network: Network, *, turns: int = 1) -> None:
        """Set up the solver, with optima that alternate if ``turns``, a number of micro-batches, is above 1."""
        self.network = network
        self._tilt = 1 + _TILT * (1 - 2 * network.position[: network.decisions])
        if turns > 1:
            self._tilt += _ALTERNATION * _alternation(network.problem, turns)
        problem = network.problem
        self.fastest_j = float(problem.table.cost_j[problem.fastest].sum())
        self.time_unit_s = float(np.mean([g.options.time_s[0] for g in problem.groups]))
        # Lengths and savings of the hull pieces, by group and number of usable clocks, from the fastest one.
        self._hulls: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self.laplacian = Laplacian(network)
        self.spread = _spread(network)
        self._earliest_s = network.earliest_s(network.least_s)
        self._after_s = network.latest_s(network.least_s, 0.0)

    def pieces(self, deadline_s: float) -> Pieces:
        """Return the hull pieces of every decision, for clocks that can meet the deadline.

        A clock is excluded if the deadline is missed even with all other instructions at their fastest clocks. This
        tightens the bound near ``T_min``. Savings are tilted, see ``_TILT`` and ``_ALTERNATION``.
        """
        problem, n = self.network.problem, self.network.decisions
        tail, head = self.network.tail[:n], self.network.head[:n]
        longest_s = deadline_s + self._after_s[head] - self._earliest_s[tail]
        usable = problem.table.longest_within(problem.group, longest_s) - problem.fastest + 1
        hulls = [self._hull(*key) for key in zip(problem.group.tolist(), usable.tolist(), strict=True)]
        length_s, saving_w = (np.concatenate(parts) for parts in zip(*hulls, strict=True))
        owner = np.repeat(np.arange(len(hulls)), [len(lengths_s) for lengths_s, _ in hulls])
        return Pieces(owner, length_s, saving_w * self._tilt[owner])

    def _hull(self, group: int, usable: int) -> tuple[Floats, Floats]:
        if (group, usable) not in self._hulls:
            options = self.network.problem.groups[group]
            corners = Corners.of(options.options.time_s[:usable], options.cost_j[:usable])
            self._hulls[group, usable] = corners.length_s, corners.saving_w
        return self._hulls[group, usable]

    def solve_between(self, deadline_s: float, faster: Relaxed, slower: Relaxed) -> Relaxed:
        """Return the optimum for a deadline between those of two known optima.

        The price of a second of an instruction is expected to lie near those of the two optima. So pieces that save
        clearly more are used completely, and pieces that save clearly less are excluded.
        """
        pieces, least_s = self.pieces(deadline_s), self.network.least_s
        price_w = np.stack([faster.flow_w[pieces.owner], slower.flow_w[pieces.owner]])
        taken = pieces.saving_w > price_w.max(axis=0) * (1 + _MARGIN)
        kept = ~taken & (pieces.saving_w >= price_w.min(axis=0) * (1 - _MARGIN))
        least_s = least_s + np.bincount(pieces.owner[taken], pieces.length_s[taken], len(least_s))
        if self.network.earliest_s(least_s)[-1] >= deadline_s:
            return self.solve(deadline_s)
        pieces = Pieces(pieces.owner[kept], pieces.length_s[kept], pieces.saving_w[kept])
        return _InteriorPoint(self, deadline_s, pieces, None, least_s).run()

    def solve(self, deadline_s: float, *, waiting_w: float | None = None) -> Relaxed:
        """Return the optimum for a deadline above ``T_min`` [s].

        If ``waiting_w`` is given, the energy cost of a second of iteration time without any instruction [W], the
        deadline of least energy is chosen, and ``deadline_s`` is the initial guess.
        """
        pieces = self.pieces(deadline_s if waiting_w is None else np.inf)
        return _InteriorPoint(self, deadline_s, pieces, waiting_w, self.network.least_s).run()


def _alternation(problem: Problem, turns: int) -> Floats:
    """Return values from -1 to 1 that repeat after the given number of micro-batches."""
    turn = np.zeros(len(problem.node))
    for decisions, stream in zip(problem.rank_decisions, problem.instructions, strict=True):
        # In the steady state of 1F1B, a backward and the next forward take place at the same time as the forward and
        # the backward of the next stage.
        turn[decisions] = [i.micro_batch - i.stage + (turns == 2 and i.kind is Kind.BACKWARD) for i in stream]
    result: Floats = np.cos(2 * np.pi / turns * turn)
    return result


class _InteriorPoint:
    """One run of the interior-point method, with all quantities in units of a typical time and power."""

    def __init__(
        self,
        relaxation: Relaxation,
        deadline_s: float,
        pieces: Pieces,
        waiting_w: float | None,
        least_s: Floats,
    ) -> None:
        self.network = relaxation.network
        self.laplacian = relaxation.laplacian
        self.time_unit_s = relaxation.time_unit_s
        self.power_unit_w = float(pieces.saving_w.mean()) if len(pieces.owner) else 1.0
        self.owner = pieces.owner
        # A decision with a single clock has no piece; reduceat needs the other decisions only.
        self.movable, self.first = np.unique(pieces.owner, return_index=True)
        self.length = pieces.length_s / self.time_unit_s
        self.saving = pieces.saving_w / self.power_unit_w
        self.least = least_s / self.time_unit_s
        self.tolerance = _TOLERANCE * relaxation.fastest_j / (self.time_unit_s * self.power_unit_w)
        self.end_is_free = waiting_w is not None
        self.demand = np.zeros(self.network.events)
        self.demand[-1] = (waiting_w or 0.0) / self.power_unit_w
        least = self.network.earliest_s(self.least)
        self.x = least * (deadline_s / self.time_unit_s / least[-1])
        self._start(relaxation.spread)

    def _start(self, spread: Floats) -> None:
        self.flow = spread.copy()
        if self.end_is_free:
            self.flow *= max(float(self.demand[-1]), 1.0)
        elif len(self.movable):
            # An additional second of a typical decision saves about a typical amount, for any number of ranks.
            self.flow *= _START_FLOW / np.median(self.flow[self.movable])
        self.d = self.length / 2
        self.v = self.length - self.d
        reduced = self.flow[self.owner] - self.saving
        margin = 0.1
        self.z = np.maximum(reduced, 0) + margin
        self.w = np.maximum(-reduced, 0) + margin
        self.s = np.maximum(self._window() - self.least, 0.0)
        self.s[self.movable] -= self._taken()
        self.s = np.maximum(self.s, 0.05)

    def _window(self) -> Floats:
        result: Floats = self.x[self.network.head] - self.x[self.network.tail]
        return result

    def _taken(self) -> Floats:
        return np.add.reduceat(self.d, self.first)

    def run(self) -> Relaxed:
        # Rounding errors may make the last steps impossible. The point reached by then is close enough to the optimum,
        # and the bound is recomputed from the flow in any case.
        with contextlib.suppress(np.linalg.LinAlgError):
            for _ in range(_MAX_STEPS):
                if self._step():
                    break
        return Relaxed(
            deadline_s=float(self.x[-1]) * self.time_unit_s,
            event_s=self.x * self.time_unit_s,
            flow_w=self.flow * self.power_unit_w,
        )

    def _step(self) -> bool:
        """Take one predictor-corrector step, or return True if the optimum is already reached."""
        missing = self._window() - self.least - self.s
        missing[self.movable] -= self._taken()
        products = (self.d * self.z, self.v * self.w, self.s * self.flow)
        gap = sum(float(p.sum()) for p in products)
        if gap + abs(float(self.flow @ missing)) < self.tolerance and np.abs(missing).max() < 1e-7:
            return True
        mean = gap / sum(len(p) for p in products)
        self.theta = 1 / (self.z / self.d + self.w / self.v)
        arc_theta = self.s / self.flow
        arc_theta[self.movable] += np.add.reduceat(self.theta, self.first)
        self.weight = 1 / arc_theta
        self.laplacian.factorise(self.weight)
        self.missing = missing
        affine = self._direction([-p for p in products])
        primal, dual = self._lengths(affine)
        after = sum(
            float(((a + primal * da) * (b + dual * db)).sum())
            for a, b, da, db in (
                (self.d, self.z, affine.d, affine.z),
                (self.v, self.w, -affine.d, affine.w),
                (self.s, self.flow, affine.s, affine.flow),
            )
        )
        target = (after / gap) ** 3 * mean
        second = (affine.d * affine.z, -affine.d * affine.w, affine.s * affine.flow)
        step = self._direction([target - p - q for p, q in zip(products, second, strict=True)])
        primal, dual = self._lengths(step)
        primal, dual = min(1.0, 0.995 * primal), min(1.0, 0.995 * dual)
        self.x = self.x + primal * step.x
        self.d = self.d + primal * step.d
        self.v = self.v - primal * step.d
        self.s = self.s + primal * step.s
        self.flow = self.flow + dual * step.flow
        self.z = self.z + dual * step.z
        self.w = self.w + dual * step.w
        return False

    def _direction(self, wanted: list[Floats]) -> _Direction:
        to_d, to_v, to_s = wanted
        h = self.saving - self.flow[self.owner] + self.z - self.w + to_d / self.d - to_v / self.v
        push = to_s / self.flow - self.missing
        push[self.movable] += np.add.reduceat(self.theta * h, self.first)
        push *= self.weight
        # Conservation after the step: inflow(flow + dflow) = demand.
        lacking = self.demand - self.laplacian.inflow(self.flow)
        dx = self.laplacian.solve(self.laplacian.inflow(push) - lacking, self.end_is_free)
        dflow = push - self.weight * (dx[self.network.head] - dx[self.network.tail])
        dd = self.theta * (h - dflow[self.owner])
        return _Direction(
            x=dx,
            flow=dflow,
            d=dd,
            z=(to_d - self.z * dd) / self.d,
            w=(to_v + self.w * dd) / self.v,
            s=(to_s - self.s * dflow) / self.flow,
        )

    def _lengths(self, step: _Direction) -> tuple[float, float]:
        primal = min(_room(self.d, step.d), _room(self.v, -step.d), _room(self.s, step.s))
        dual = min(_room(self.z, step.z), _room(self.w, step.w), _room(self.flow, step.flow))
        return primal, dual


@dataclass
class _Direction:
    x: Floats
    flow: Floats
    d: Floats
    z: Floats
    w: Floats
    s: Floats


def _room(value: Floats, change: Floats) -> float:
    """Return the longest step, at most 1, for which every value remains >= 0."""
    worst = float((change / value).min(initial=0.0))
    return 1.0 if worst >= -1.0 else -1.0 / worst


def _spread(network: Network) -> Floats:
    """Return a flow of size 1 from the start to the end that is divided evenly at every event."""
    through = np.zeros(network.events)
    through[-1] = 1.0
    flow = np.zeros(len(network.tail))
    for level in reversed(network.forward):
        count = np.diff(np.r_[level.first, len(level.edges)])
        flow[level.edges] = np.repeat(through[level.nodes] / count, count)
        through += np.bincount(level.others, flow[level.edges], network.events)
    return flow


class Laplacian:
    """Factorises ``B' W B`` over all events except the start, with the end treated separately.

    Many events may be connected to the end, which would widen the band, so the end is eliminated separately.
    """

    def __init__(self, network: Network) -> None:
        self.tail, self.head, self.events = network.tail, network.head, network.events
        n = network.events - 2
        row = np.full(network.events, -1, dtype=np.intp)
        row[1:-1] = np.arange(n)
        self.inner = (row[self.tail] >= 0) & (row[self.head] >= 0)
        a, b = row[self.tail[self.inner]], row[self.head[self.inner]]
        graph = coo_array((np.ones(2 * len(a)), (np.r_[a, b], np.r_[b, a])), shape=(n, n)).tocsr()
        self.order = 1 + (reverse_cuthill_mckee(graph, symmetric_mode=True) if n else np.arange(0))
        row[self.order] = np.arange(n)
        a, b = row[self.tail[self.inner]], row[self.head[self.inner]]
        self.band = int(np.abs(a - b).max(initial=0))
        # Stored by columns, as LAPACK requires; other layouts would be copied.
        self.cell = np.minimum(a, b) * (self.band + 1) + np.abs(a - b)
        self.to_end = self.head == self.events - 1

    def factorise(self, weight: Floats) -> None:
        """Factorise the matrix with these arc weights."""
        n = len(self.order)
        diagonal = np.bincount(self.tail, weight, self.events) + np.bincount(self.head, weight, self.events)
        self.to_end_weight = _bincount(self.tail[self.to_end], weight[self.to_end], self.events)
        self.end_diagonal = float(diagonal[-1])
        if n:
            band = _bincount(self.cell, -weight[self.inner], (self.band + 1) * n).reshape(n, -1).T
            band[0] += diagonal[self.order] * (1 + 1e-13)
            self.factor = cholesky_banded(band, lower=True, overwrite_ab=True, check_finite=False)

    def inflow(self, flow: Floats) -> Floats:
        """Return the flow into each event minus the flow out of it."""
        return _bincount(self.head, flow, self.events) - _bincount(self.tail, flow, self.events)

    def solve(self, inflow: Floats, end_is_free: bool) -> Floats:
        """Return the potentials of all events: 0 at the start, and 0 at the end unless it is free."""
        result = self._inner_solve(inflow)
        if end_is_free:
            share = self._inner_solve(self.to_end_weight)
            rest = inflow[-1] + float(self.to_end_weight @ result)
            end = rest / (self.end_diagonal - float(self.to_end_weight @ share))
            result += end * share
            result[-1] = end
        return result

    def _inner_solve(self, inflow: Floats) -> Floats:
        result = np.zeros(self.events)
        if len(self.order):
            result[self.order] = cho_solve_banded((self.factor, True), inflow[self.order], check_finite=False)
        return result


def _bincount(index: Indices, values: Floats, size: int) -> Floats:
    # bincount returns integers for empty input.
    return np.bincount(index, values, size).astype(np.float64, copy=False)
