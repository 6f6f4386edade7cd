"""The linear programme of the relaxed problem, solved by an interior-point method.

Variables are event times ``x`` and, for each arc, the time ``d`` spent on each of its pieces and its waiting time
``s``. The programme is to

    minimise    waiting * x[end]  -  saving . d
    subject to  least + sum(d) + s = x[head] - x[tail],   0 <= d <= length,   s >= 0,

with x = 0 at the start, and the deadline at the end unless the end is *free*. Let ``v = length - d`` be the unused rest
of each piece. The multipliers are the ``flow`` of each equation, ``z`` of d >= 0, and ``w`` of v >= 0. A point is
optimal if it satisfies the equations above and

    flow[owner] - saving = z - w,    inflow of an event - outflow = demand,    d * z = v * w = s * flow = 0,

where demand is 0 at inner events, and the cost of waiting at a free end. The method keeps all six variables of the
products positive and reduces the products. A Newton step changes a point so that, to first order, the equations hold
and the products change by given amounts ``to_d``, ``to_v`` and ``to_s``. After elimination of all other variables, it
is a linear system for the changes of x with the Laplacian of the network, weighted by ``weight``:

    theta  = 1 / (z / d + w / v)                            for each piece,
    weight = 1 / (s / flow + sum of theta)                  for each arc.

Events are ordered along the pipeline, so that the system is banded, and a step costs about events * bandwidth ** 2.
Each step has a predictor, which aims at products of 0, and a corrector (Mehrotra, SIAM J. Optimization 2(4), 1992).
All quantities are in units of a typical time and power.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from perseus_ds.optimizer.laplacian import Laplacian
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices

_MAX_STEPS = 80
_START_FLOW = 0.6
"""Flow through a typical decision at the start, in units of typical savings."""
_START_MULTIPLIER, _START_WAITING = 0.1, 0.05
"""Minimum of the multipliers z and w and of waiting times at the start."""
_TOLERANCE = 1e-8
"""Tolerance relative to the cost. Bounds are recomputed from the flow, so it affects their tightness, not validity."""
_MISSING = 1e-7
"""Largest error of an equation at the end."""
_STAY_INSIDE = 0.995
"""Largest part of the way to the boundary that a step takes."""


@dataclass(frozen=True)
class LinearProgramme:
    """The numbers of a linear programme, in units of a typical time and power.

    Attributes:
        least: Shape (arcs,): minimum duration of each arc.
        owner: Shape (pieces,): the arc of each piece, rising.
        length: Shape (pieces,): length of each piece.
        saving: Shape (pieces,): energy saved per second on each piece.
        deadline: The deadline, or the initial guess if ``waiting`` is given.
        waiting: Cost of a second of iteration time. If given, the end is free.
        cost: Cost of the whole iteration, to which the tolerance is relative.
    """

    least: Floats
    owner: Indices
    length: Floats
    saving: Floats
    deadline: float
    waiting: float | None
    cost: float


@dataclass(frozen=True)
class Optimum:
    """Event times, shape (events,), and flows, shape (arcs,), of an optimum."""

    event: Floats
    flow: Floats


@dataclass(frozen=True)
class _Direction:
    """The changes of all variables in a Newton step. That of v is the negative one of d."""

    x: Floats
    flow: Floats
    d: Floats
    z: Floats
    w: Floats
    s: Floats


class InteriorPoint:
    """One run of the interior-point method."""

    def __init__(self, network: Network, laplacian: Laplacian, programme: LinearProgramme, even_flow: Floats) -> None:
        """Choose the starting point.

        ``even_flow`` is a flow of size 1 from the start to the end, positive on each arc.
        """
        self._network, self._laplacian, self._programme = network, laplacian, programme
        # A decision with a single clock has no piece; reduceat needs the other decisions only.
        self._movable, self._first = np.unique(programme.owner, return_index=True)
        self._tolerance = _TOLERANCE * programme.cost
        self._end_is_free = programme.waiting is not None
        self._demand = np.zeros(network.events)
        self._demand[-1] = programme.waiting or 0.0
        earliest = network.earliest_s(programme.least)
        self._x = earliest * (programme.deadline / earliest[-1])
        self._flow = even_flow.copy()
        if self._end_is_free:
            self._flow *= max(float(self._demand[-1]), 1.0)
        elif len(self._movable):
            # An additional second of a typical decision saves about a typical amount, for any number of ranks.
            self._flow *= _START_FLOW / np.median(self._flow[self._movable])
        self._d = programme.length / 2
        self._v = programme.length - self._d
        reduced = self._flow[programme.owner] - programme.saving
        self._z = np.maximum(reduced, 0) + _START_MULTIPLIER
        self._w = np.maximum(-reduced, 0) + _START_MULTIPLIER
        self._s = np.maximum(self._window() - programme.least, 0.0)
        self._s[self._movable] -= self._by_arc(self._d)
        self._s = np.maximum(self._s, _START_WAITING)

    def run(self) -> Optimum:
        """Return the optimum."""
        # Rounding errors may make the last steps impossible. The point reached by then is close enough to the optimum,
        # and the bound is recomputed from the flow in any case.
        with contextlib.suppress(np.linalg.LinAlgError):
            for _ in range(_MAX_STEPS):
                missing = self._missing()
                if self._is_optimal(missing):
                    break
                self._step(missing)
        return Optimum(event=self._x, flow=self._flow)

    def _window(self) -> Floats:
        """Return the time between the two events of each arc, shape (arcs,)."""
        result: Floats = self._x[self._network.head] - self._x[self._network.tail]
        return result

    def _by_arc(self, of_pieces: Floats) -> Floats:
        """Return the sums over the pieces of each arc that has any, shape (movable arcs,)."""
        return np.add.reduceat(of_pieces, self._first)

    def _missing(self) -> Floats:
        """Return by how much a window is longer than what happens in it, shape (arcs,)."""
        missing = self._window() - self._programme.least - self._s
        missing[self._movable] -= self._by_arc(self._d)
        return missing

    def _products(self) -> list[Floats]:
        """Return the products that are 0 at the optimum."""
        return [self._d * self._z, self._v * self._w, self._s * self._flow]

    def _is_optimal(self, missing: Floats) -> bool:
        gap = sum(float(product.sum()) for product in self._products())
        error = abs(float(self._flow @ missing))
        return gap + error < self._tolerance and bool(np.abs(missing).max() < _MISSING)

    def _step(self, missing: Floats) -> None:
        """Take one predictor-corrector step."""
        products = self._products()
        gap = sum(float(product.sum()) for product in products)
        mean = gap / sum(len(product) for product in products)
        self._factorise()
        predictor = self._direction(missing, *(-product for product in products))
        target = (self._gap_after(predictor) / gap) ** 3 * mean
        # The predictor's own changes multiply, which a first-order step neglects.
        neglected = [predictor.d * predictor.z, -predictor.d * predictor.w, predictor.s * predictor.flow]
        changes = [target - product - more for product, more in zip(products, neglected, strict=True)]
        corrector = self._direction(missing, *changes)
        primal = min(1.0, _STAY_INSIDE * self._longest_primal(corrector))
        dual = min(1.0, _STAY_INSIDE * self._longest_dual(corrector))
        self._x = self._x + primal * corrector.x
        self._d = self._d + primal * corrector.d
        self._v = self._v - primal * corrector.d
        self._s = self._s + primal * corrector.s
        self._flow = self._flow + dual * corrector.flow
        self._z = self._z + dual * corrector.z
        self._w = self._w + dual * corrector.w

    def _factorise(self) -> None:
        """Compute theta and weight of the present point, and factorise the system."""
        self._theta = 1 / (self._z / self._d + self._w / self._v)
        arc_theta = self._s / self._flow
        arc_theta[self._movable] += self._by_arc(self._theta)
        self._weight = 1 / arc_theta
        self._laplacian.factorise(self._weight)

    def _direction(self, missing: Floats, to_d: Floats, to_v: Floats, to_s: Floats) -> _Direction:
        """Return the Newton step that changes the products by the given amounts."""
        owner, saving = self._programme.owner, self._programme.saving
        pull = saving - self._flow[owner] + self._z - self._w + to_d / self._d - to_v / self._v
        push = to_s / self._flow - missing
        push[self._movable] += self._by_arc(self._theta * pull)
        push *= self._weight
        # Conservation after the step: inflow(flow + change) = demand.
        lacking = self._demand - self._laplacian.inflow(self._flow)
        x = self._laplacian.solve(self._laplacian.inflow(push) - lacking, self._end_is_free)
        flow = push - self._weight * (x[self._network.head] - x[self._network.tail])
        d = self._theta * (pull - flow[owner])
        return _Direction(
            x=x,
            flow=flow,
            d=d,
            z=(to_d - self._z * d) / self._d,
            w=(to_v + self._w * d) / self._v,
            s=(to_s - self._s * flow) / self._flow,
        )

    def _gap_after(self, step: _Direction) -> float:
        """Return the sum of all products after the longest possible step."""
        primal, dual = self._longest_primal(step), self._longest_dual(step)
        of_d = (self._d + primal * step.d) * (self._z + dual * step.z)
        of_v = (self._v - primal * step.d) * (self._w + dual * step.w)
        of_s = (self._s + primal * step.s) * (self._flow + dual * step.flow)
        return sum(float(product.sum()) for product in (of_d, of_v, of_s))

    def _longest_primal(self, step: _Direction) -> float:
        """Return the longest step, at most 1, for which d, v and s remain positive."""
        return min(_room(self._d, step.d), _room(self._v, -step.d), _room(self._s, step.s))

    def _longest_dual(self, step: _Direction) -> float:
        """Return the longest step, at most 1, for which z, w and flow remain positive."""
        return min(_room(self._z, step.z), _room(self._w, step.w), _room(self._flow, step.flow))


def _room(value: Floats, change: Floats) -> float:
    """Return the longest step, at most 1, for which every value remains >= 0."""
    worst = float((change / value).min(initial=0.0))
    return 1.0 if worst >= -1.0 else -1.0 / worst
