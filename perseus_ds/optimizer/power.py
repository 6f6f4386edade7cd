"""The power of a pipeline under a plan, over one second: with many GPUs in step, its swing is the grid's problem."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.plan import FrequencyPlan, PowerSwing
from perseus_ds.optimizer.problem import Problem

_SECOND_S = 1.0
Floats = npt.NDArray[np.float64]


def power_swing(problem: Problem, plan: FrequencyPlan) -> PowerSwing:
    """Return the highest and the lowest power over any second of an iteration that repeats, and its largest change.

    An instruction draws its energy evenly, and a rank that waits draws blocking power. The energy used so far is then
    linear between the begins and ends of instructions, so that the extremes lie where a window begins or ends at one.

    Args:
        problem: What the plan is for.
        plan: With measured clocks.
    """
    dag, profile = problem.dag, problem.profile
    rows = {
        node: profile.at(i.stage, i.kind, clock)
        for nodes, stream, clocks in zip(problem.rank_nodes, plan.instructions, plan.clocks_mhz, strict=True)
        for node, i, clock in zip(nodes, stream, clocks, strict=True)
    }
    durations = problem.fixed_s + problem.delays_s(plan.clocks_mhz)
    nodes = np.fromiter(rows, np.intp)
    time_s = np.array([row.time_s for row in rows.values()])
    beyond_w = np.array([row.energy_j for row in rows.values()]) / time_s - problem.blocking_power_w
    durations[nodes] += time_s
    end_s = dag.finish_s(durations)[nodes]
    begin_s = end_s - time_s
    # At each begin the power rises by what the instruction draws beyond waiting; at each end it falls by that.
    at_s = np.concatenate([[0.0], begin_s, end_s, [plan.time_s]])
    step_w = np.concatenate([[problem.waiting_power_w], beyond_w, -beyond_w, [0.0]])
    order = np.argsort(at_s, kind="stable")
    at_s, power_w = at_s[order], np.cumsum(step_w[order])
    used_j = np.concatenate([[0.0], np.cumsum(power_w[:-1] * np.diff(at_s))])

    def until_j(moment_s: Floats) -> Floats:
        iterations, rest_s = np.divmod(moment_s, plan.time_s)
        energy_j: Floats = iterations * used_j[-1] + np.interp(rest_s, at_s, used_j)
        return energy_j

    first_s = np.concatenate([at_s, at_s - _SECOND_S, at_s - 2 * _SECOND_S])
    begin_j, middle_j, end_j = (until_j(first_s + seconds * _SECOND_S) for seconds in range(3))
    mean_w, next_w = (middle_j - begin_j) / _SECOND_S, (end_j - middle_j) / _SECOND_S
    return PowerSwing(float(mean_w.max()), float(mean_w.min()), float(np.abs(next_w - mean_w).max()))
