"""The whole problem as a mixed-integer programme for HiGHS, to compare the bound with the optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack, vstack

from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Problem
from perseus_ds.optimizer.runs import RunSearch


@dataclass(frozen=True)
class MilpResult:
    """Bound and plan of the mixed-integer solver at its end.

    Attributes:
        bound_j: Lower bound on the energy of all plans that meet the deadline [J].
        plan_j: Energy of its best plan [J]. None if it found no plan within the time limit.
    """

    bound_j: float
    plan_j: float | None


def solve_milp(problem: Problem, deadline_s: float, time_limit_s: float) -> MilpResult:
    """Solve the problem at one deadline, over all Pareto-optimal clocks, within the time limit."""
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
    waiting_j = problem.waiting_power_w * deadline_s
    return MilpResult(
        bound_j=float(solution.mip_dual_bound) + waiting_j,
        plan_j=None if solution.x is None else float(solution.fun) + waiting_j,
    )


def solve_held_milp(network: Network, search: RunSearch, deadline_s: float, time_limit_s: float) -> MilpResult:
    """Solve the problem at one deadline with a dwell time, over the clocks of ``search``.

    Here, an instruction may begin later than necessary, so that waiting lengthens the run before a clock change instead
    of the run after it. In plans of ``search``, instructions begin as early as possible, as in an engine. So this
    programme allows plans that ``search`` does not, and its bound holds for both.

    Args:
        network: The events.
        search: Contains the clocks of each rank, their times and energies, and one dwell time for all clocks.
        deadline_s: Iteration time, after which the plan repeats [s].
        time_limit_s: Time limit of the solver [s].
    """
    events, n = network.events, network.decisions
    rows: list[tuple[dict[int, float], float, float]] = []
    costs, width = [0.0] * events, events
    choices: dict[int, tuple[int, list[float]]] = {}
    for rank in search.ranks:
        for decision, time_s, cost_j in zip(rank.decisions.tolist(), rank.time_s, rank.cost_j, strict=True):
            choices[decision] = width, time_s.tolist()
            rows.append(({width + clock: 1.0 for clock in range(len(time_s))}, 1.0, 1.0))
            costs += cost_j.tolist()
            width += len(time_s)
    for arc, (tail, head) in enumerate(zip(network.tail.tolist(), network.head.tolist(), strict=True)):
        first, times_s = choices.get(arc, (0, []))
        taken = {first + clock: -time_s for clock, time_s in enumerate(times_s)}
        rows.append(({head: 1.0, tail: -1.0} | taken, 0.0 if arc < n else float(network.least_s[arc]), np.inf))
    for rank in search.ranks:
        chain, dwell_s = rank.decisions.tolist(), float(rank.dwell_s.max())
        changes = range(width, width + len(chain))
        width += len(chain)
        costs += [0.0] * len(chain)
        for number, decision in enumerate(chain):
            first, times_s = choices[decision]
            before, _ = choices[chain[number - 1]]
            rows += [
                ({changes[number]: 1.0, first + clock: -1.0, before + clock: 1.0}, 0.0, np.inf)
                for clock in range(len(times_s))
            ]
        # The clock changes before an instruction when the previous one ends, for the first one in the last iteration.
        ends = []
        for number in range(len(chain)):
            first, times_s = choices[chain[number - 1]]
            end = {int(network.tail[chain[number - 1]]): 1.0} | {first + c: s for c, s in enumerate(times_s)}
            ends.append((end, 0.0 if number else -deadline_s))
        for late in range(len(chain)):
            for early in range(late):
                for first, last, length_s in ((early, late, 0.0), (late, early, deadline_s)):
                    (begin, begin_s), (end, end_s) = ends[first], ends[last]
                    row = {column: end.get(column, 0.0) - begin.get(column, 0.0) for column in begin | end}
                    row[changes[early]] = row[changes[late]] = -dwell_s
                    rows.append((row, -dwell_s - length_s - end_s + begin_s, np.inf))
    matrix = csr_array(
        (
            [value for row, _, _ in rows for value in row.values()],
            [column for row, _, _ in rows for column in row],
            np.cumsum([0, *(len(row) for row, _, _ in rows)]),
        ),
        shape=(len(rows), width),
    )
    upper = np.ones(width)
    upper[:events] = deadline_s
    upper[0] = 0.0
    solution = milp(
        np.array(costs),
        integrality=np.arange(width) >= events,
        bounds=Bounds(np.zeros(width), upper),
        constraints=LinearConstraint(
            matrix, np.array([least - 1e-9 for _, least, _ in rows]), np.array([most for _, _, most in rows])
        ),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-4},
    )
    waiting_j = network.problem.waiting_power_w * deadline_s
    return MilpResult(
        bound_j=float(solution.mip_dual_bound) + waiting_j,
        plan_j=None if solution.fun is None else float(solution.fun) + waiting_j,
    )
