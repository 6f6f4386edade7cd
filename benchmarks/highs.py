"""Compares our solver of the relaxed problem with HiGHS at many deadlines.

    pip install highspy
    python benchmarks/highs.py                                       # the published A100 profile, 8 stages
    python benchmarks/highs.py --stages 32 --micro-batches 256 --deadlines 4    # a synthetic profile

Tests and ``frontier.py`` use HiGHS of scipy (``linprog``), which solves one deadline after the other. HiGHS of the
package ``highspy`` can start its simplex method from the optimum of the deadline before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csc_array, hstack

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.optimizer.relaxation import Pieces, Relaxation, Relaxed
from perseus_ds.pipeline.commands import read_schedule, schedule_class

PROFILE = Path(__file__).resolve().parents[1] / "tests/data/sosp24/stage_profile/gpt3-175b_a100-sxm.csv"
BLOCKING_POWER_W = 83.64
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
    events, count = network.events, len(pieces.owner)
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
        A_ub=_constraints(relaxation, pieces),
        b_ub=-network.least_s,
        bounds=bounds,
        method=method,
        options={} if time_limit_s is None else {"time_limit": time_limit_s},
    )
    return -float(found.fun) if found.success else None


def warm_savings_j(relaxation: Relaxation, deadlines_s: Sequence[float]) -> Iterator[float]:
    """Yield the savings at rising deadlines by HiGHS's simplex, each started from the optimum before [J].

    All clocks are usable at each deadline, so that only one bound of the linear programme changes. This needs
    ``pip install highspy``.
    """
    import highspy  # type: ignore[import-not-found]

    network = relaxation.network
    pieces = relaxation.pieces(np.inf)
    arcs, events, count = len(network.tail), network.events, len(pieces.owner)
    matrix = _constraints(relaxation, pieces)
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = events + count, arcs
    programme.col_cost_ = np.concatenate([np.zeros(events), -pieces.saving_w])
    programme.col_lower_ = np.zeros(events + count)
    programme.col_upper_ = np.concatenate([[0.0], np.full(events - 1, highspy.kHighsInf), pieces.length_s])
    programme.row_lower_ = np.full(arcs, -highspy.kHighsInf)
    programme.row_upper_ = -network.least_s
    programme.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    programme.a_matrix_.start_ = matrix.indptr
    programme.a_matrix_.index_ = matrix.indices
    programme.a_matrix_.value_ = matrix.data
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("solver", "simplex")
    solver.passModel(programme)
    for deadline_s in deadlines_s:
        solver.changeColBounds(events - 1, deadline_s, deadline_s)
        solver.run()
        yield -float(solver.getInfo().objective_function_value)


def _constraints(relaxation: Relaxation, pieces: Pieces) -> csc_array:
    """Return the matrix with a row for each arc, and columns for event times and pieces."""
    network = relaxation.network
    arcs, count = len(network.tail), len(pieces.owner)
    rows, shape = np.arange(arcs), (arcs, network.events)
    tails = coo_array((np.ones(arcs), (rows, network.tail)), shape=shape)
    heads = coo_array((np.ones(arcs), (rows, network.head)), shape=shape)
    taken = coo_array((np.ones(count), (pieces.owner, np.arange(count))), shape=(arcs, count))
    return csc_array(hstack([tails - heads, taken]))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8, help="more than 8 have a synthetic profile")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[24, 96])
    parser.add_argument("--deadlines", type=int, default=31)
    arguments = parser.parse_args()
    profile = StageProfile.load(PROFILE)
    if arguments.stages > profile.num_stages:
        from frontier import synthetic_profile  # type: ignore[import-not-found]  # which imports this module

        profile = synthetic_profile(arguments.stages, seed=0)
    for micro_batches in arguments.micro_batches:
        schedule = read_schedule(schedule_class("1f1b"), ranks=arguments.stages, micro_batches=micro_batches)
        relaxation = Relaxation(Network(problem_for(schedule, profile, blocking_power_w=BLOCKING_POWER_W)))
        print(f"1f1b, {arguments.stages} stages, {micro_batches} micro-batches, {arguments.deadlines} deadlines")
        _compare(relaxation, arguments.deadlines)


def _compare(relaxation: Relaxation, count: int) -> None:
    """Solve the relaxed problem at deadlines from ``T_min`` to the time of the most frugal clocks."""
    problem = relaxation.network.problem
    slowest_s = problem.time_s(problem.most_frugal)
    deadlines_s = np.linspace(1.001 * problem.t_min_s, slowest_s, count).tolist()
    begin_s = time.process_time()
    found = [relaxation.solve(deadline_s) for deadline_s in deadlines_s]
    ours_s = time.process_time() - begin_s
    begin_s = time.process_time()
    savings_j = list(warm_savings_j(relaxation, deadlines_s))
    simplex_s = time.process_time() - begin_s
    ours_j = np.array([our_saving_j(relaxation, relaxed) for relaxed in found])
    apart = np.median(np.abs(np.array(savings_j) / ours_j - 1))
    ratio = simplex_s / ours_s
    print(f"  processor time: ours {ours_s:.2f} s, warm-started simplex {simplex_s:.2f} s ({ratio:.2f} times)")
    print(f"  savings differ by {apart:.1e} (median)")


if __name__ == "__main__":
    main()
