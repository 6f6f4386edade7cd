"""The relaxed problem at one deadline as a sparse linear programme for HiGHS (scipy's ``linprog``)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csc_array, hstack

from perseus_ds.optimizer.relaxation import Relaxation, Relaxed

Method = Literal["highs-ipm", "highs-ds"]


def highs_saving_j(
    relaxation: Relaxation,
    deadline_s: float,
    *,
    waiting_w: float | None = None,
    method: Method = "highs-ipm",
    time_limit_s: float | None = None,
) -> float | None:
    """Return the saving of the optimum relative to the fastest clocks [J]. None after the time limit.

    Args:
        relaxation: The network, and the hull pieces of its decisions.
        deadline_s: Iteration time [s]. Ignored if ``waiting_w`` is given.
        waiting_w: Energy cost of a second of iteration time [W]. If given, the iteration time is chosen, too.
        method: HiGHS's interior-point method or its dual simplex.
        time_limit_s: Time limit of HiGHS [s].
    """
    network = relaxation.network
    pieces = relaxation.pieces(deadline_s if waiting_w is None else np.inf)
    arcs, events, count = len(network.tail), network.events, len(pieces.owner)
    rows = np.arange(arcs)
    incidence = coo_array((np.ones(arcs), (rows, network.tail)), shape=(arcs, events)) - coo_array(
        (np.ones(arcs), (rows, network.head)), shape=(arcs, events)
    )
    taken = coo_array((np.ones(count), (pieces.owner, np.arange(count))), shape=(arcs, count))
    bounds = np.zeros((events + count, 2))
    bounds[1:events, 1] = np.inf
    bounds[events:, 1] = pieces.length_s
    cost = np.concatenate([np.zeros(events), -pieces.saving_w])
    if waiting_w is None:
        bounds[events - 1] = deadline_s
    else:
        cost[events - 1] = waiting_w
    found = linprog(
        cost,
        A_ub=csc_array(hstack([incidence, taken])),
        b_ub=-network.least_s,
        bounds=bounds,
        method=method,
        options={} if time_limit_s is None else {"time_limit": time_limit_s},
    )
    return -float(found.fun) if found.success else None


def our_saving_j(relaxation: Relaxation, relaxed: Relaxed, waiting_w: float | None = None) -> float:
    """Return the saving of our optimum relative to the fastest clocks, from its event times [J]."""
    network = relaxation.network
    pieces = relaxation.pieces(relaxed.deadline_s if waiting_w is None else np.inf)
    window_s = (relaxed.event_s[network.head] - relaxed.event_s[network.tail] - network.least_s)[pieces.owner]
    before_s = np.cumsum(pieces.length_s) - pieces.length_s
    first = np.unique(pieces.owner, return_index=True)[1]
    before_s -= np.repeat(before_s[first], np.diff(np.append(first, len(pieces.owner))))
    taken_s = np.clip(window_s - before_s, 0.0, pieces.length_s)
    return float(pieces.saving_w @ taken_s) - (waiting_w or 0.0) * relaxed.deadline_s
