"""The relaxed problem at one deadline, solved by an interior-point method.

Every decision may move along the lower convex hull of its options. With event times ``x`` and,
for each arc, the length ``d`` it takes of each hull piece and the time ``s`` it waits,

    minimise    -saving . d
    subject to  least + sum(d) + s = x[head] - x[tail],   0 <= d <= length,   s >= 0.

The multipliers of the equations are a flow through the network: what one second more would save on
each arc. A Newton step solves a system with the Laplacian of the network, which is banded once the
events are ordered along the pipeline, so a step costs about events * bandwidth ** 2 (Mehrotra's
predictor and corrector, SIAM J. Optimization 2(4), 1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve_banded, cholesky_banded
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from perseus_ds.optimize.hull import HullTable, Pieces
from perseus_ds.optimize.network import Network
from perseus_ds.optimize.options import OptionTable

Floats = npt.NDArray[np.float64]

_MAX_STEPS = 80


@dataclass(frozen=True)
class Relaxed:
    """An optimum of the relaxed problem.

    Attributes:
        deadline_s: When the iteration ends [s].
        event_s: Shape (events,): when each event happens [s].
        flow_w: Shape (arcs,): what a second more on each arc would save [W]; conserved at every event.
        cost_j: Sum of effective energies [J].
    """

    deadline_s: float
    event_s: Floats
    flow_w: Floats
    cost_j: float


class Relaxation:
    """Solves the relaxed problem of one network for any deadline."""

    def __init__(self, network: Network) -> None:
        self.network = network
        problem = network.problem
        self.fastest_j = problem.energy_j(problem.fastest, 0.0)
        self.time_unit_s = float(np.mean([g.options.time_s[-1] for g in problem.groups]))
        self._hulls = HullTable(problem.groups)
        self._laplacian = _Laplacian(network)
        self._earliest_s = network.earliest_s(network.least_s)
        self._after_s = network.latest_s(network.least_s, 0.0)
        self._options = OptionTable(problem.groups)

    def pieces(self, deadline_s: float) -> Pieces:
        """Return the hull pieces of every decision, of the clocks with which the deadline can be met.

        A clock so slow that the deadline is missed though all else runs flat out is no option, and
        leaving it out of the hull tightens the bound near ``T_min``.
        """
        n = self.network.decisions
        room = self.room_s(deadline_s)
        group = self.network.problem.group
        usable = self._options.longest_within(group, room) - self._options.begin[group] + 1
        return self._hulls.pieces(group, usable)

    def room_s(self, deadline_s: float) -> Floats:
        """Return how long each decision may take when all else runs flat out [s]."""
        n = self.network.decisions
        tail, head = self.network.tail[:n], self.network.head[:n]
        return deadline_s + self._after_s[head] - self._earliest_s[tail]

    def solve(self, deadline_s: float, pieces: Pieces, *, saving_w: Floats | None = None, waiting_w: float | None = None, tolerance: float = 1e-7) -> Relaxed:
        """Return the optimum for a deadline, or the deadline of least energy with its optimum.

        Args:
            deadline_s: Iteration time [s], above ``T_min``; with ``waiting_w`` a first guess.
            pieces: What :meth:`pieces` returned.
            saving_w: Shape of ``pieces.saving_w``: savings to use in their place [W].
            waiting_w: What a second of iteration time costs when nothing runs [W]; choose the deadline then.
            tolerance: Relative accuracy of the cost.
        """
        return _InteriorPoint(self, deadline_s, pieces, pieces.saving_w if saving_w is None else saving_w, waiting_w, tolerance).run()


class _Laplacian:
    """Factorises ``B' W B`` over all events but the start, the end last and on its own.

    Everything may lead to the end, so it would widen the band; it is eliminated separately.
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
        self.cell = np.abs(a - b) * n + np.minimum(a, b)
        self.to_end = self.head == self.events - 1

    def factorise(self, weight: Floats) -> None:
        """Prepare to solve with these arc weights."""
        n = len(self.order)
        diagonal = np.bincount(self.tail, weight, self.events) + np.bincount(self.head, weight, self.events)
        self.to_end_weight = np.bincount(self.tail[self.to_end], weight[self.to_end], self.events)
        self.end_diagonal = float(diagonal[-1])
        if n:
            band = np.bincount(self.cell, -weight[self.inner], minlength=(self.band + 1) * n).reshape(-1, n)
            band[0] += diagonal[self.order] * (1 + 1e-13)
            self.factor = cholesky_banded(band, lower=True, overwrite_ab=True, check_finite=False)

    def inflow(self, flow: Floats) -> Floats:
        """Return what flows into each event less what flows out."""
        return np.bincount(self.head, flow, self.events) - np.bincount(self.tail, flow, self.events)

    def solve(self, inflow: Floats, end_is_free: bool) -> Floats:
        """Return the potentials of all events; the start's is 0, the end's too unless it is free."""
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


class _InteriorPoint:
    """One run; all quantities in units of a typical time and power."""

    def __init__(
        self, relaxation: Relaxation, deadline_s: float, pieces: Pieces, saving_w: Floats, waiting_w: float | None, tolerance: float
    ) -> None:
        self.r = relaxation
        self.network = relaxation.network
        self.laplacian = relaxation._laplacian
        self.time_unit_s = relaxation.time_unit_s
        self.power_unit_w = float(saving_w.mean()) if len(saving_w) else 1.0
        self.owner = pieces.owner
        # Decisions without a second clock have no piece; reduceat needs the others only.
        self.movable, self.first = np.unique(pieces.owner, return_index=True)
        self.length = pieces.length_s / self.time_unit_s
        self.saving = saving_w / self.power_unit_w
        self.least = self.network.least_s / self.time_unit_s
        self.tolerance = tolerance * relaxation.fastest_j / (self.time_unit_s * self.power_unit_w)
        self.end_is_free = waiting_w is not None
        self.demand = np.zeros(self.network.events)
        self.demand[-1] = (waiting_w or 0.0) / self.power_unit_w
        least = self.network.earliest_s(self.least)
        self.x = least * (deadline_s / self.time_unit_s / least[-1])
        self._start(max(float(self.demand[-1]), 1.0))

    def _start(self, total_flow: float) -> None:
        self.flow = _spread(self.network, total_flow)
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
        return self.x[self.network.head] - self.x[self.network.tail]

    def _taken(self) -> Floats:
        return _sums(self.d, self.first)

    def run(self) -> Relaxed:
        for _ in range(_MAX_STEPS):
            if self._step():
                break
        r = self.r
        return Relaxed(
            deadline_s=float(self.x[-1]) * self.time_unit_s,
            event_s=self.x * self.time_unit_s,
            flow_w=self.flow * self.power_unit_w,
            cost_j=r.fastest_j - float(self.saving @ self.d) * self.time_unit_s * self.power_unit_w,
        )

    def _step(self) -> bool:
        """Take one predictor-corrector step; return whether the optimum was reached before it."""
        r = self.r
        missing = self._window() - self.least - self.s
        missing[self.movable] -= self._taken()
        products = (self.d * self.z, self.v * self.w, self.s * self.flow)
        gap = sum(float(p.sum()) for p in products)
        if gap + abs(float(self.flow @ missing)) < self.tolerance and np.abs(missing).max() < 1e-7:
            return True
        mean = gap / sum(len(p) for p in products)
        self.theta = 1 / (self.z / self.d + self.w / self.v)
        arc_theta = self.s / self.flow
        arc_theta[self.movable] += _sums(self.theta, self.first)
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
        self._move(step, min(1.0, 0.995 * primal), min(1.0, 0.995 * dual))
        return False

    def _direction(self, wanted: list[Floats]) -> _Direction:
        to_d, to_v, to_s = wanted
        h = self._reduced() + to_d / self.d - to_v / self.v
        push = to_s / self.flow - self.missing
        push[self.movable] += _sums(self.theta * h, self.first)
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

    def _reduced(self) -> Floats:
        return self.saving - self.flow[self.owner] + self.z - self.w

    def _lengths(self, step: _Direction) -> tuple[float, float]:
        primal = min(_room(self.d, step.d), _room(self.v, -step.d), _room(self.s, step.s))
        dual = min(_room(self.z, step.z), _room(self.w, step.w), _room(self.flow, step.flow))
        return primal, dual

    def _move(self, step: _Direction, primal: float, dual: float) -> None:
        self.x = self.x + primal * step.x
        self.d = self.d + primal * step.d
        self.v = self.v - primal * step.d
        self.s = self.s + primal * step.s
        self.flow = self.flow + dual * step.flow
        self.z = self.z + dual * step.z
        self.w = self.w + dual * step.w


@dataclass
class _Direction:
    x: Floats
    flow: Floats
    d: Floats
    z: Floats
    w: Floats
    s: Floats


def _room(value: Floats, change: Floats) -> float:
    """How far one can go before a value reaches zero, at most 1."""
    worst = float((change / value).min(initial=0.0))
    return 1.0 if worst >= -1.0 else -1.0 / worst


def _spread(network: Network, total: float) -> Floats:
    """A flow of this size through every arc, divided evenly at every event."""
    through = np.zeros(network.events)
    through[-1] = total
    flow = np.zeros(len(network.tail))
    for level in reversed(network.forward):
        count = np.diff(np.r_[level.first, len(level.arcs)])
        flow[level.arcs] = np.repeat(through[level.events] / count, count)
        through += np.bincount(network.tail[level.arcs], flow[level.arcs], network.events)
    return flow


def _sums(values: Floats, first: npt.NDArray[np.intp]) -> Floats:
    return np.add.reduceat(values, first) if len(first) else np.zeros(0)
