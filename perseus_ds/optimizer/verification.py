"""Checks a frontier's claims against profile, schedule and certificates, without the solver."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import FrontierError, ProfileError
from perseus_ds.optimizer import problem_for
from perseus_ds.optimizer.bounds import CertificateError, Verifier
from perseus_ds.optimizer.problem import Problem

_ROUNDING = 1e-12
"""Relative difference that rounding may make where sums are computed in another order on another machine."""


@dataclass(frozen=True)
class Verified:
    """The result of a verification that found every claim to hold.

    Attributes:
        worst_gap: The largest distance of a plan from its bound, as a fraction.
    """

    plans: int
    worst_gap: float


def verify(frontier: Frontier, certificates: Certificates, profile: StageProfile) -> Verified:
    """Recompute time, energy and lower bound of every plan, and compare them with what the frontier states.

    Raises:
        FrontierError: A claim does not hold; the message names the plan.
        ProfileError: The profile does not cover the schedule.
        ScheduleError: The certificates' schedule is not possible.
    """
    origin = frontier.provenance
    problem = problem_for(
        certificates.schedule, profile, origin.blocking_power_w, origin.switch_cost_s, origin.least_dwell_s
    )
    _check_inputs(frontier, certificates, problem)
    _check_plan("the baseline", frontier.baseline, problem)
    verifier = Verifier(problem)
    worst_gap = 0.0
    for number, plan in enumerate(frontier.plans):
        name = f"plan {number}"
        _check_plan(name, plan, problem)
        if plan.lower_bound_j is None or plan.gap is None:
            raise FrontierError(f"{name} states no lower bound.")
        try:
            proven_j = verifier.bound_j(plan.time_s, *certificates.flow_w(number))
        except CertificateError as error:
            raise FrontierError(f"{name}: {error}") from None
        if not plan.lower_bound_j <= proven_j * (1 + _ROUNDING):
            raise FrontierError(
                f"{name}: the frontier states a lower bound of {plan.lower_bound_j!r} J, its certificate proves "
                f"{proven_j!r} J only."
            )
        if plan.energy_j < plan.lower_bound_j * (1 - _ROUNDING):
            raise FrontierError(f"{name}: its energy, {plan.energy_j!r} J, is below its bound.")
        worst_gap = max(worst_gap, plan.gap)
    return Verified(len(frontier.plans), worst_gap)


def _check_inputs(frontier: Frontier, certificates: Certificates, problem: Problem) -> None:
    if frontier.instructions != problem.instructions:
        raise FrontierError(
            "the frontier's instructions are not those of the certificates' schedule. Give the certificates that were "
            "written with this frontier."
        )
    if len(certificates.share) != len(frontier.plans):
        raise FrontierError(f"{len(frontier.plans)} plans, but certificates for {len(certificates.share)}.")
    if not _equal(frontier.t_min_s, problem.t_min_s):
        raise FrontierError(f"T_min is {frontier.t_min_s!r} s, by the profile {problem.t_min_s!r} s.")
    # Before any flow is mixed: those of a damaged file may be as wide as memory.
    widths = certificates.edge_flow_w.shape[1], certificates.source_flow_w.shape[1]
    edges, nodes = sum(map(len, problem.dag.predecessors)), len(problem.dag.nodes)
    if widths != (edges, nodes):
        raise FrontierError(
            f"the certificates' flows have {widths[0]} edges and {widths[1]} nodes, the schedule {edges} and {nodes}."
        )
    rows = {(row.stage, row.kind, row.clock_mhz): row.time_s for row in problem.profile.measurements}
    for (stage, kind, clock_mhz), time_s in frontier.instruction_times_s.items():
        if rows.get((stage, kind, clock_mhz)) != time_s:
            raise FrontierError(
                f"instruction_times_s: stage {stage}, {kind}, {clock_mhz} MHz takes {time_s!r} s, by the profile "
                f"{rows.get((stage, kind, clock_mhz))!r} s."
            )


def _check_plan(name: str, plan: FrequencyPlan, problem: Problem) -> None:
    try:
        found = problem.evaluate(plan.clocks_mhz)
    except ProfileError as error:
        raise FrontierError(f"{name}: {error}") from None
    for what, unit, stated, recomputed in (
        ("takes", "s", plan.time_s, found.time_s),
        ("uses", "J", plan.energy_j, found.energy_j),
    ):
        if not _equal(stated, recomputed):
            raise FrontierError(f"{name} {what} {stated!r} {unit}, by the profile's rows {recomputed!r} {unit}.")


def _equal(stated: float, recomputed: float) -> bool:
    return math.isclose(stated, recomputed, rel_tol=_ROUNDING)
