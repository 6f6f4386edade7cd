"""The lower bound at every iteration time, from flows found at some of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.optimizer.exact.certificate import Verifier
from perseus_ds.optimizer.exact.deadlines import Tangent
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxed

Floats = npt.NDArray[np.float64]


class Bounds:
    """The flows of the solved deadlines, and the bounds that follow at any iteration time."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self.problem, self.network = problem, network
        self._verifier = Verifier(problem)
        self._found: list[tuple[Tangent, Floats, Floats]] = []

    def add(self, relaxed: Relaxed) -> Tangent:
        """Keep a relaxed optimum's flow; return the bound that it proves at its deadline."""
        edges_w, source_w = self.network.dag_flow(np.maximum(relaxed.flow_w, 0.0))
        energy_j = self._verifier.bound_j(relaxed.deadline_s, edges_w, source_w)
        tangent = Tangent(relaxed.deadline_s, energy_j, float(source_w.sum()) - self.problem.waiting_energy_j(1.0))
        self._found.append((tangent, edges_w, source_w))
        self._found.sort(key=lambda found: found[0].time_s)
        return tangent

    @property
    def energies_j(self) -> Floats:
        return np.minimum.accumulate([tangent.energy_j for tangent, _, _ in self._found])

    def certify(self, times_s: list[float]) -> tuple[list[float], Certificates]:
        """Return the best bound at hand for each iteration time: the flow of a neighbour, or a mixture of two [J]."""
        found = [tangent for tangent, _, _ in self._found]
        found_s = [tangent.time_s for tangent in found]
        edge_flow_w = np.stack([edges_w for _, edges_w, _ in self._found])
        source_flow_w = np.stack([source_w for _, _, source_w in self._found])
        bounds_j, mixed, shares = [], [], []
        for time_s in times_s:
            right = min(int(np.searchsorted(found_s, time_s)), len(found_s) - 1)
            left = max(right - 1, 0)
            span_s = found_s[right] - found_s[left]
            between = min(max((time_s - found_s[left]) / span_s, 0.0), 1.0) if span_s > 0 else 0.0
            candidates = []
            # What one flow proves changes along its tangent, so the lower end need not be tried; but near T_min, where
            # more and more clocks become possible, tangents say little.
            ends_j = [found[n].energy_j - found[n].slope_w * (time_s - found_s[n]) for n in (left, right)]
            for share in sorted({0.0, between, 1.0} if left == 0 else {between, float(ends_j[1] > ends_j[0])}):
                edges_w = (1 - share) * edge_flow_w[left] + share * edge_flow_w[right]
                source_w = (1 - share) * source_flow_w[left] + share * source_flow_w[right]
                candidates.append((self._verifier.bound_j(time_s, edges_w, source_w), share))
            bound_j, share = max(candidates, key=lambda candidate: candidate[0])
            bounds_j.append(bound_j)
            mixed.append((left, right))
            shares.append(share)
        schedule = self.problem.dag.schedule
        return bounds_j, Certificates(schedule, edge_flow_w, source_flow_w, np.array(mixed), np.array(shares))
