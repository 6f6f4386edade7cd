"""The published solver: lowtime's Phillips-Dessouky algorithm on a fitted cost curve.

lowtime starts with every instruction at its slowest clock and shortens the iteration by one unit of time at each step,
by a minimum cut of the critical paths. It uses times in whole units and energies on an exponential curve through the
options. Times and energies of its plans are recomputed here from the measured rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.optimizer.problem import InstructionGroup, Problem, Progress

_UNIT_S = 1e-3
"""The unit of time in lowtime's publication."""
_UNITS_PER_INSTRUCTION = 25
"""Minimum number of units in the shortest instruction; the unit is shortened if necessary."""
_LARGEST_COST_J = 100.0
# lowtime starts its curve fits from guesses of 10 to 1000 J, and treats 1e-6 J as zero and 1e4 J as infinite.
_FEWEST_FITTED = 4
# The curve has three parameters.


def unit_time_s(problem: Problem) -> float:
    """Return the time unit: 1 ms, or 1/25 of the shortest instruction if that is less [s]."""
    shortest_s = min(float(group.options.time_s.min()) for group in problem.groups)
    return min(_UNIT_S, shortest_s / _UNITS_PER_INSTRUCTION)


def solve_lowtime(problem: Problem, progress: Progress) -> list[FrequencyPlan]:
    """Return all plans that lowtime generates, from the one of least energy to the fastest."""
    from lowtime.solver import PhillipsDessouky

    graph, operations = _graph(problem)
    slowest_s, fastest_s = problem.time_s(problem.most_frugal), problem.t_min_s
    speed_up = _UNIT_S / unit_time_s(problem)

    def plan() -> FrequencyPlan:
        return problem.plan(problem.fastest + [operation.assigned_knob for operation in operations])

    plans = [plan()]
    for result in PhillipsDessouky(graph).run():
        plans.append(plan())
        done = (slowest_s - result.real_time / speed_up) / max(slowest_s - fastest_s, 1e-12)
        progress("lowtime", min(max(done, 0.0), 1.0))
    progress("lowtime", 1.0)
    return plans


def _graph(problem: Problem) -> tuple[Any, list[Any]]:
    """Return lowtime's activity-on-node graph and the operation of every decision."""
    import networkx
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec

    # lowtime always counts in ms here, so shorter instructions are scaled up.
    time_scale = _UNIT_S / unit_time_s(problem)
    cost_scale = _LARGEST_COST_J / max(float(group.cost_j.max()) for group in problem.groups)

    def options(knobs: list[int], time_s: Any, cost_j: Any) -> Any:
        return CandidateExecutionOptions(
            options=[
                ExecutionOption(
                    real_time=float(time_s[knob]) * time_scale,
                    unit_time=_UNIT_S,
                    cost=float(cost_j[knob]) * cost_scale,
                    knob=knob,
                )
                for knob in knobs
            ]
        )

    of_groups = [options(_published_options(g), g.options.time_s, g.cost_j) for g in problem.groups]
    specs = [OperationSpec(options=of_group, cost_model=_cost_model(of_group)) for of_group in of_groups]
    operations = [Operation(spec=specs[group]) for group in problem.group]
    of_node: dict[int, Any] = dict(zip(problem.node.tolist(), operations, strict=True))
    for node in np.flatnonzero(problem.fixed_s * time_scale >= _UNIT_S).tolist():
        one = options([0], [problem.fixed_s[node]], [0.0])
        of_node[node] = Operation(spec=OperationSpec(options=one, cost_model=lambda quant_time: 0.0))
    dag = problem.dag
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(dag.nodes)))
    graph.add_edges_from(zip(dag.edge_tail.tolist(), dag.edge_head.tolist(), strict=True))
    for node in set(graph) - set(of_node):
        graph.add_edges_from(product([*graph.pred[node]], [*graph.succ[node]]))
        graph.remove_node(node)
    graph = networkx.transitive_reduction(graph)
    networkx.set_node_attributes(graph, of_node, "op")
    add_source_node(graph, "source")
    add_sink_node(graph, "sink")
    graph.graph.update(source_node="source", sink_node="sink")
    return graph, operations


def _published_options(group: InstructionGroup) -> list[int]:
    """Return the options used in lowtime's publication, up to the one of least energy.

    Slower options may have less *effective* energy, so leaving them out costs a little energy and halves the run time.
    """
    energy_j = group.options.energy_j
    return [index for index in range(len(energy_j)) if energy_j[index] < energy_j[:index].min(initial=np.inf)]


def _cost_model(options: Any) -> Callable[[int], float]:
    """Return lowtime's exponential curve, or linear interpolation if the curve cannot be fitted."""
    from lowtime.cost_model import ExponentialModel

    if len(options.options) >= _FEWEST_FITTED:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return ExponentialModel(options, search_strategy="best")  # type: ignore[no-any-return]
        except (ValueError, RuntimeError):  # raised by its grid search and by scipy's curve_fit
            pass
    times = [option.quant_time for option in reversed(options.options)]
    costs = [option.cost for option in reversed(options.options)]
    return lambda quant_time: float(np.interp(quant_time, times, costs))
