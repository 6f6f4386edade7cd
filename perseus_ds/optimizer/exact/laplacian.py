"""Linear systems with the weighted Laplacian of a network of events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve_banded, cholesky_banded
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from perseus_ds.optimizer.exact.network import Network

Floats = npt.NDArray[np.float64]


class Laplacian:
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
        # By columns, as LAPACK has them: it copies other bands.
        self.cell = np.minimum(a, b) * (self.band + 1) + np.abs(a - b)
        self.to_end = self.head == self.events - 1

    def factorise(self, weight: Floats) -> None:
        """Prepare to solve with these arc weights."""
        n = len(self.order)
        diagonal = np.bincount(self.tail, weight, self.events) + np.bincount(self.head, weight, self.events)
        self.to_end_weight = _sums(self.tail[self.to_end], weight[self.to_end], self.events)
        self.end_diagonal = float(diagonal[-1])
        if n:
            band = _sums(self.cell, -weight[self.inner], (self.band + 1) * n).reshape(n, -1).T
            band[0] += diagonal[self.order] * (1 + 1e-13)
            self.factor = cholesky_banded(band, lower=True, overwrite_ab=True, check_finite=False)

    def inflow(self, flow: Floats) -> Floats:
        """Return what flows into each event less what flows out."""
        return _sums(self.head, flow, self.events) - _sums(self.tail, flow, self.events)

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


def _sums(index: npt.NDArray[np.intp], values: Floats, size: int) -> Floats:
    # Of nothing, bincount returns integers.
    return np.bincount(index, values, size).astype(np.float64, copy=False)
