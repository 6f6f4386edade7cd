"""Plans of many micro-batches from those of few: the middle of an iteration repeats itself.

The relaxed problem is solved for an iteration with most periods of the middle left out, and its flows are extended to
the whole one, where they prove bounds as any flow does. So are the times of its events, from which clocks are chosen
for the whole iteration.
"""

from __future__ import annotations

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
from perseus_ds.optimizer.exact.rounding import round_late
from perseus_ds.optimizer.exact.search import Progress, ProvenPlans, between, proven, relaxed_curve
from perseus_ds.optimizer.exact.switches import SwitchCosts, settle
from perseus_ds.pipeline.dag import Dag

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MANY = 20_000
"""An iteration with fewer decisions is solved as a whole."""
_KEPT = 24
"""So many periods are kept, half of them before the cut."""
_SWEEPS = 1


def solve_long(problem: Problem, *, plans: int, switches: SwitchCosts, progress: Progress) -> ProvenPlans | None:
    """Return what ``solve_exact`` promises, or None where an iteration is not long or does not repeat itself."""
    repetition = find_repetition(problem.dag.schedule, _KEPT) if len(problem.node) >= _MANY else None
    if repetition is None:
        return None
    power_w, switch_s = problem.blocking_power_w, problem.switch_cost_s
    short = Problem(Dag.build(repetition.short), problem.profile, power_w, switch_cost_s=switch_s)
    try:
        cut = Cut(problem, short, repetition, _KEPT // 2)
        extension, repeated = FlowExtension(cut), cut.repeated()
    except ExtensionError:
        return None
    network = Network(short)
    relaxation = Relaxation(network)
    bounds = Bounds(problem)
    joint = JointRelaxation.of(relaxation)

    def record(relaxed: Relaxed) -> Tangent:
        time_s = max(relaxed.deadline_s + repetition.left_out * period_s(relaxed), problem.t_min_s)
        flows_w = [np.maximum(relaxed.flow_w, 0.0)]
        if joint is not None:
            flows_w.append(joint.flow_w(relaxed.deadline_s))
        return bounds.add(time_s, [extension.flow(*network.dag_flow(flow_w)) for flow_w in flows_w])

    def period_s(relaxed: Relaxed) -> float:
        return extension.period_s(relaxed.event_s[network.end_event], _KEPT // 2 - 2)

    curve = relaxed_curve(relaxation, max(2, min(plans, 4 + plans // 8)), record, progress)
    bounds.sort()
    time_s = np.array([tangent.time_s for tangent, _ in curve])
    time_s[0] = problem.t_min_s
    deadline_s = time_s if len(curve) == 1 else spread(time_s, bounds.energies_j, plans)
    whole, table = Network(problem), OptionTable(problem.groups)
    known_s = [_extended(relaxed.event_s, period_s(relaxed), network, whole, repeated) for _, relaxed in curve]
    target_s = between(np.stack(known_s, axis=1), time_s, deadline_s)
    progress("clocks", 0.25)
    event_s = Descent(whole, table).run(round_late(whole, table, target_s, deadline_s), _SWEEPS)
    progress("clocks", 0.75)
    options = settle(whole, table, event_s, switches)
    progress("clocks", 1.0)
    return proven(problem, bounds, options - table.begin[problem.group][:, None])


def _extended(
    event_s: Floats, period_s: float, network: Network, whole: Network, repeated: tuple[Indices, Indices]
) -> Floats:
    """Return the times of events of the whole iteration from those of the shorter one [s].

    Args:
        event_s: Times in the shorter iteration [s].
        period_s: How long a period takes [s].
        network: The shorter iteration's.
        whole: The whole iteration's.
        repeated: For each node of the whole DAG the one that it repeats, and how many periods later.
    """
    of_node, later = repeated
    result = np.zeros(whole.events)
    for at, short_at in ((whole.start_event, network.start_event), (whole.end_event, network.end_event)):
        result[at] = event_s[short_at[of_node]] + later * period_s
    result[0] = 0.0
    return result
