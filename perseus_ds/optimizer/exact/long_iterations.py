"""Plans of many micro-batches from those of few: the middle of an iteration repeats itself.

The relaxed problem is solved for an iteration with most periods of the middle left out, and its flows are extended to
the whole one, where they prove bounds as any flow does. Plans of the shorter iteration become plans of the whole one
by repeating a block of periods; they then end when they end.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from perseus_ds.optimizer.exact.bounds import Bounds
from perseus_ds.optimizer.exact.deadlines import Tangent, spread
from perseus_ds.optimizer.exact.descent import Descent
from perseus_ds.optimizer.exact.extension import Cut, ExtensionError, FlowExtension
from perseus_ds.optimizer.exact.joint_relaxation import JointRelaxation
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.option_table import OptionTable
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxation, Relaxed
from perseus_ds.optimizer.exact.repetition import find_repetition
from perseus_ds.optimizer.exact.rounding import durations_at, options_at, round_late
from perseus_ds.optimizer.exact.search import Progress, ProvenPlans, between, proven, relaxed_curve
from perseus_ds.optimizer.exact.switches import SwitchCosts, settle
from perseus_ds.pipeline.dag import Dag

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MANY = 20_000
"""An iteration with fewer decisions is solved as a whole."""
_BLOCK = 20
"""The clocks of so many periods are repeated."""
_STARTS = (2, 4, 6, 8)
"""The block may begin so many periods after all ranks repeat themselves; each plan takes the best."""
_SWEEPS = 2


def solve_long(problem: Problem, *, plans: int, switches: SwitchCosts, progress: Progress) -> ProvenPlans | None:
    """Return what ``solve_exact`` promises, or None where an iteration is not long or does not repeat itself."""
    kept = _BLOCK + _STARTS[0] + _STARTS[-1]
    repetition = find_repetition(problem.dag.schedule, kept, _BLOCK) if len(problem.node) >= _MANY else None
    if repetition is None:
        return None
    power_w, switch_s = problem.blocking_power_w, problem.switch_cost_s
    short = Problem(Dag.build(repetition.short), problem.profile, power_w, switch_cost_s=switch_s)
    try:
        extension = FlowExtension(Cut(problem, short, repetition, kept // 2))
        repeated = [Cut(problem, short, repetition, start).repeated_decisions(_BLOCK) for start in _STARTS]
    except ExtensionError:
        return None
    network = Network(short)
    relaxation = Relaxation(network)
    bounds = Bounds(problem)
    joint = JointRelaxation.of(relaxation)

    def record(relaxed: Relaxed) -> Tangent:
        period_s = extension.period_s(relaxed.event_s[network.end_event], _BLOCK // 2)
        time_s = max(relaxed.deadline_s + repetition.left_out * period_s, problem.t_min_s)
        flows_w = [np.maximum(relaxed.flow_w, 0.0)]
        if joint is not None:
            flows_w.append(joint.flow_w(relaxed.deadline_s))
        return bounds.add(time_s, [extension.flow(*network.dag_flow(flow_w)) for flow_w in flows_w])

    curve = relaxed_curve(relaxation, max(2, min(plans, 4 + plans // 8)), record, progress)
    bounds.sort()
    time_s = np.array([tangent.time_s for tangent, _ in curve])
    short_s = np.array([relaxed.deadline_s for _, relaxed in curve])
    deadline_s = time_s if len(curve) == 1 else spread(time_s, bounds.energies_j, plans)
    target_s = between(np.stack([relaxed.event_s for _, relaxed in curve], axis=1), time_s, deadline_s)
    short_options = _round(network, target_s, np.interp(deadline_s, time_s, short_s))
    progress("clocks", 0.5)
    whole, table = Network(problem), OptionTable(problem.groups)
    second_w = problem.waiting_energy_j(1.0) + np.interp(deadline_s, time_s, [tangent.slope_w for tangent, _ in curve])
    options = _best(whole, table, (short_options[decisions] for decisions in repeated), second_w)
    event_s = _events(whole, durations_at(whole, table, options))
    event_s[:, 0] = _fastest(whole, table, event_s[:, :1])[:, 0]
    progress("clocks", 0.75)
    options = settle(whole, table, event_s, switches)
    progress("clocks", 1.0)
    return proven(problem, bounds, options - table.begin[problem.group][:, None])


def _round(network: Network, target_s: Floats, deadline_s: Floats) -> Indices:
    """Return the options of good plans of the shorter iteration, shape (decisions, plans)."""
    table = OptionTable(network.problem.groups)
    start_s = round_late(network, table, target_s, deadline_s)
    return options_at(network, table, Descent(network, table).run(start_s, _SWEEPS))


def _best(network: Network, table: OptionTable, candidates: Iterable[Indices], second_w: Floats) -> Indices:
    """Return for each plan the best of several, shape (decisions, plans), by energy and what a second costs [W]."""
    result, least_j = np.zeros(0, dtype=np.intp), np.full(len(second_w), np.inf)
    for options in candidates:
        time_s = network.earliest_s(durations_at(network, table, options))[-1]
        total_j = table.cost_j[options].sum(axis=0) + second_w * time_s
        result = np.where(total_j < least_j, options, result) if result.size else options
        least_j = np.minimum(total_j, least_j)
    return result


def _events(network: Network, duration_s: Floats) -> Floats:
    """Return the latest times of events in plans that end as early as they can, shape (events, plans) [s]."""
    result = network.latest_s(duration_s, network.earliest_s(duration_s)[-1])
    result[0] = 0.0
    return result


def _fastest(network: Network, table: OptionTable, event_s: Floats) -> Floats:
    """Return the events of a plan that ends at ``T_min``, near those of one that ends a little later."""
    deadline_s = np.array([network.problem.t_min_s])
    start_s = round_late(network, table, event_s * (deadline_s / event_s[-1]), deadline_s)
    return Descent(network, table).run(start_s, _SWEEPS)
