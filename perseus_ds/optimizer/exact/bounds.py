"""What is known about the least energy at every iteration time, from flows found at some of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.certificate import Certificate, Verifier
from perseus_ds.optimizer.exact.deadlines import Tangent
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxed

Floats = npt.NDArray[np.float64]


class Bounds:
    """The flows of the solved deadlines, and what they prove at any iteration time."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self.problem, self.network = problem, network
        self.verifier = Verifier(problem)
        self._found: list[tuple[float, float, Floats, Floats]] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Keep a relaxed optimum's flow; return what it proves at its deadline."""
        edges, source = self.network.dag_flow(np.maximum(relaxed.flow_w, 0.0)[:, None])
        edges_w, source_w = edges[:, 0], source[:, 0]
        energy_j = self.verifier.bound_j(relaxed.deadline_s, edges_w, source_w)
        self._found.append((relaxed.deadline_s, energy_j, edges_w, source_w))
        return Tangent(relaxed.deadline_s, energy_j, float(source_w.sum()) - self.problem.waiting_energy_j(1.0))

    def sort(self) -> None:
        self._found.sort(key=lambda found: found[0])

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([energy_j for _, energy_j, _, _ in self._found])

    def certify(self, time_s: float) -> Certificate:
        """Return the best proof at hand for an iteration time: the flow of a neighbour, or a mixture of two."""
        times_s = [found[0] for found in self._found]
        right = min(int(np.searchsorted(times_s, time_s)), len(times_s) - 1)
        left = max(right - 1, 0)
        span_s = times_s[right] - times_s[left]
        share = min(max((time_s - times_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
        best: Certificate | None = None
        for part in sorted({0.0, share, 1.0}):
            (_, _, edges_a, source_a), (_, _, edges_b, source_b) = self._found[left], self._found[right]
            edges_w = (1 - part) * edges_a + part * edges_b
            source_w = (1 - part) * source_a + part * source_b
            energy_j = self.verifier.bound_j(time_s, edges_w, source_w)
            if best is None or energy_j > best.bound_j:
                best = Certificate(time_s, energy_j, edges_w, source_w)
        assert best is not None
        return best
