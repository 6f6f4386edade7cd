"""Linear systems with the weighted Laplacian of a network."""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_solve_banded, cholesky_banded
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Floats, Indices

_SHIFT = 1e-13
"""Relative increase of the diagonal, so that rounding errors do not make the matrix singular."""


class Laplacian:
    """Solves systems of the matrix ``B' W B`` with the incidence matrix B and a weight for each arc.

    The potential of the start is 0. The events between start and end are the *inner* events. They are ordered along the
    pipeline, so that the matrix is banded. Many events may be connected to the end, which would widen the band, so the
    end is eliminated separately.
    """

    def __init__(self, network: Network) -> None:
        self._tail, self._head, self._events = network.tail, network.head, network.events
        inner = network.events - 2
        row = np.full(network.events, -1, dtype=np.intp)
        row[1:-1] = np.arange(inner)
        self._is_inner = (row[self._tail] >= 0) & (row[self._head] >= 0)
        tail, head = row[self._tail[self._is_inner]], row[self._head[self._is_inner]]
        entries = np.ones(2 * len(tail)), (np.r_[tail, head], np.r_[head, tail])
        graph = coo_array(entries, shape=(inner, inner)).tocsr()
        # Shape (inner events,): the event of each row.
        self._event_of_row = 1 + (reverse_cuthill_mckee(graph, symmetric_mode=True) if inner else np.arange(0))
        row[self._event_of_row] = np.arange(inner)
        tail, head = row[self._tail[self._is_inner]], row[self._head[self._is_inner]]
        distance = np.abs(tail - head)
        self._band = int(distance.max(initial=0))
        # Shape (inner arcs,): place in the band. It is stored by columns, as LAPACK requires; others would be copied.
        self._cell = np.minimum(tail, head) * (self._band + 1) + distance
        self._to_end = self._head == self._events - 1

    def factorise(self, weight: Floats) -> None:
        """Factorise the matrix with these weights, shape (arcs,)."""
        inner = len(self._event_of_row)
        diagonal = np.bincount(self._tail, weight, self._events) + np.bincount(self._head, weight, self._events)
        self._to_end_weight = _bincount(self._tail[self._to_end], weight[self._to_end], self._events)
        self._end_diagonal = float(diagonal[-1])
        if inner:
            band = _bincount(self._cell, -weight[self._is_inner], (self._band + 1) * inner).reshape(inner, -1).T
            band[0] += diagonal[self._event_of_row] * (1 + _SHIFT)
            self._factor = cholesky_banded(band, lower=True, overwrite_ab=True, check_finite=False)

    def inflow(self, flow: Floats) -> Floats:
        """Return the flow into each event minus the flow out of it, shape (events,)."""
        return _bincount(self._head, flow, self._events) - _bincount(self._tail, flow, self._events)

    def solve(self, inflow: Floats, end_is_free: bool) -> Floats:
        """Return the potentials of all events, shape (events,): 0 at the start, and 0 at the end unless it is free."""
        result = self._inner_solve(inflow)
        if end_is_free:
            share = self._inner_solve(self._to_end_weight)
            rest = inflow[-1] + float(self._to_end_weight @ result)
            end = rest / (self._end_diagonal - float(self._to_end_weight @ share))
            result += end * share
            result[-1] = end
        return result

    def _inner_solve(self, inflow: Floats) -> Floats:
        result = np.zeros(self._events)
        if len(self._event_of_row):
            result[self._event_of_row] = cho_solve_banded(
                (self._factor, True), inflow[self._event_of_row], check_finite=False
            )
        return result


def _bincount(index: Indices, values: Floats, size: int) -> Floats:
    # bincount returns integers for empty input.
    return np.bincount(index, values, size).astype(np.float64, copy=False)
