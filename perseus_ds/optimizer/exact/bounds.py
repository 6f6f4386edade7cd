"""The lower bound at every iteration time, from flows found at some of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.optimizer.exact.certificate import Verifier
from perseus_ds.optimizer.exact.deadlines import Tangent
from perseus_ds.optimizer.exact.problem import Problem

Floats = npt.NDArray[np.float64]


class Bounds:
    """Flows found at some iteration times, and the bounds that follow at any iteration time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._verifier = Verifier(problem)
        self._found: list[tuple[float, float, Floats, Floats]] = []

    def add(self, time_s: float, flows_w: list[tuple[Floats, Floats]]) -> Tangent:
        """Keep the flow that proves most at an iteration time; return the bound."""
        bounds_j = [self._verifier.bound_j(time_s, *flow_w) for flow_w in flows_w]
        energy_j = max(bounds_j)
        edges_w, source_w = flows_w[bounds_j.index(energy_j)]
        self._found.append((time_s, energy_j, edges_w, source_w))
        return Tangent(time_s, energy_j, float(source_w.sum()) - self.problem.waiting_energy_j(1.0))

    def sort(self) -> None:
        self._found.sort(key=lambda found: found[0])

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([found[1] for found in self._found])

    def certify(self, times_s: list[float]) -> tuple[list[float], Certificates]:
        """Return the best bound at hand for each iteration time: the flow of a neighbour, or a mixture of two [J]."""
        found_s = [found[0] for found in self._found]
        edge_flow_w = np.stack([found[2] for found in self._found])
        source_flow_w = np.stack([found[3] for found in self._found])
        bounds_j, mixed, shares = [], [], []
        for time_s in times_s:
            right = min(int(np.searchsorted(found_s, time_s)), len(found_s) - 1)
            left = max(right - 1, 0)
            span_s = found_s[right] - found_s[left]
            between = min(max((time_s - found_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
            candidates = []
            for share in sorted({0.0, between, 1.0}):
                edges_w = (1 - share) * edge_flow_w[left] + share * edge_flow_w[right]
                source_w = (1 - share) * source_flow_w[left] + share * source_flow_w[right]
                candidates.append((self._verifier.bound_j(time_s, edges_w, source_w), share))
            bound_j, share = max(candidates, key=lambda candidate: candidate[0])
            bounds_j.append(bound_j)
            mixed.append((left, right))
            shares.append(share)
        schedule = self.problem.dag.schedule
        return bounds_j, Certificates(schedule, edge_flow_w, source_flow_w, np.array(mixed), np.array(shares))
