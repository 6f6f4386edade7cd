"""The whole problem as a mixed-integer programme for HiGHS, to measure how far the bound is from the optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack, vstack

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Problem


@dataclass(frozen=True)
class MilpResult:
    """The mixed-integer solver's bound and plan when it stops.

    Attributes:
        bound_j: No plan that meets the deadline uses less [J].
        plan_j: What its best plan uses [J], or None where it found none in time.
    """

    bound_j: float
    plan_j: float | None


def solve_milp(problem: Problem, deadline_s: float, time_limit_s: float) -> MilpResult:
    """Solve the problem at one deadline, over all Pareto-optimal clocks, for as long as allowed."""
    network = Network(problem)
    n, arcs = network.decisions, len(network.tail)
    sizes = np.array([len(g.cost_j) for g in problem.groups])[problem.group]
    owner = np.repeat(np.arange(n), sizes)
    time_s = np.concatenate([problem.groups[g].options.time_s for g in problem.group])
    cost_j = np.concatenate([problem.groups[g].cost_j for g in problem.group])
    rows = np.arange(arcs)
    incidence = csr_array(coo_array((np.ones(arcs), (rows, network.head)), shape=(arcs, network.events)))
    incidence = incidence - coo_array((np.ones(arcs), (rows, network.tail)), shape=(arcs, network.events))
    columns = np.arange(len(owner))
    durations = coo_array((-time_s, (owner, columns)), shape=(arcs, len(owner)))
    one_each = hstack([csr_array((n, network.events)), coo_array((np.ones(len(owner)), (owner, columns)))])
    least_s = np.where(rows < n, 0.0, network.least_s)
    latest_s = np.full(network.events, deadline_s)
    latest_s[0] = 0.0
    solution = milp(
        np.concatenate([np.zeros(network.events), cost_j]),
        integrality=np.concatenate([np.zeros(network.events), np.ones(len(owner))]),
        bounds=Bounds(np.zeros(network.events + len(owner)), np.concatenate([latest_s, np.ones(len(owner))])),
        constraints=LinearConstraint(
            csr_array(vstack([hstack([incidence, durations]), one_each])),
            np.concatenate([least_s - 1e-9, np.ones(n)]),
            np.concatenate([np.full(arcs, np.inf), np.ones(n)]),
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-5},
    )
    waiting_j = problem.waiting_energy_j(deadline_s)
    return MilpResult(
        bound_j=float(solution.mip_dual_bound) + waiting_j,
        plan_j=None if solution.x is None else float(solution.fun) + waiting_j,
    )
