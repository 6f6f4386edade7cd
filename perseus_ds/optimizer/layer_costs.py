"""Estimates the costs of each kind of layer by least squares from the costs of stages.

The cost of a stage is the sum of its parts' costs. With N the number of parts of each kind on each measured stage and y
the costs of the stages, the costs x of the kinds minimise ``|(N x - y) / errors|²`` with x >= 0. A kind can be
distinguished from the others if no change of the costs that keeps the costs of all stages changes its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from scipy.optimize import nnls
from scipy.sparse.csgraph import connected_components

from perseus_ds.artifacts.layout import Layout, Part
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.errors import ConfigError
from perseus_ds.optimizer.partition import Cut, LayerCosts
from perseus_ds.optimizer.problem import Floats
from perseus_ds.pipeline.instruction import Kind

_LEAST_ERROR, _UNKNOWN_ERROR = 1e-3, 0.02
"""Minimum relative error of a row, and relative error of a row with unknown error."""
_SAME = 1e-9


@dataclass(frozen=True)
class KindCosts:
    """The costs of the kinds of parts of a model.

    Attributes:
        kinds: Names, in the order of the model.
        clocks_mhz: Shape (clocks,), ascending.
        time_s: By kind of instruction, shape (kinds, clocks): time of one micro-batch [s].
        energy_j: By kind of instruction, shape (kinds, clocks): energy of one micro-batch [J].
        time_covariance: By kind of instruction, shape (kinds, kinds), at the highest clock [s²].
        energy_covariance: By kind of instruction, shape (kinds, kinds), at the highest clock [J²].
    """

    kinds: tuple[str, ...]
    clocks_mhz: tuple[int, ...]
    time_s: Mapping[Kind, Floats]
    energy_j: Mapping[Kind, Floats]
    time_covariance: Mapping[Kind, Floats]
    energy_covariance: Mapping[Kind, Floats]

    def of_parts(self, parts: Sequence[Part], profile: StageProfile) -> LayerCosts:
        """Return the costs of the parts of a model, with the GPU, fixed durations and tails of a profile."""
        number, info = np.array([self.kinds.index(part.kind) for part in parts]), profile.info
        return LayerCosts(
            clocks_mhz=self.clocks_mhz,
            time_s={kind: values[number] for kind, values in self.time_s.items()},
            energy_j={kind: values[number] for kind, values in self.energy_j.items()},
            parameters=np.array([float(part.parameters) for part in parts]),
            fixed_bytes=np.zeros(len(parts)),
            held_bytes=np.zeros(len(parts)),
            blocking_power_w=info.blocking_power_w or 0.0,
            gpu=info.gpu or "unknown GPU",
            simulated=bool(info.simulated),
            fixed=info.fixed_durations,
            tails=tuple(row for row in profile.measurements if row.kind is Kind.TAIL),
        )


def kind_costs(jobs: Sequence[tuple[Layout, StageProfile]]) -> KindCosts:
    """Estimate the costs of all kinds of parts from one or more jobs of the same model.

    Raises:
        ConfigError: If kinds cannot be distinguished. The message names a layout with which they can.
    """
    if any(kind is Kind.FORWARD_BACKWARD for _, profile in jobs for _, kind in profile.keys):
        raise ConfigError(
            "In combined 1F1B, one step is the forward of one stage and the backward of another, so that the costs of "
            "stages cannot be separated. Observe some iterations without overlap_moe_expert_parallel_comm."
        )
    kinds = tuple(dict.fromkeys(part.kind for layout, _ in jobs for part in layout.parts))
    held = np.concatenate([_held(layout, kinds) for layout, _ in jobs])
    if together := _inseparable(held, kinds):
        raise ConfigError(_separation_error(jobs[0][0], held, kinds, together))
    measured = [
        (kind, set(profile.options(stage, kind).clock_mhz.tolist()))
        for _, profile in jobs
        for stage, kind in profile.keys
        if kind is not Kind.TAIL
    ]
    clocks_mhz = tuple(sorted(set.intersection(*(clocks for _, clocks in measured))))
    if not clocks_mhz:
        raise ConfigError("The runs have no clock in common. Give runs of one mode, profile or observe, on one GPU.")
    time_s: dict[Kind, Floats] = {}
    energy_j: dict[Kind, Floats] = {}
    time_covariance: dict[Kind, Floats] = {}
    energy_covariance: dict[Kind, Floats] = {}
    for kind in (kind for kind in Kind if kind in dict(measured)):
        at_clocks = [_estimate(jobs, kinds, kind, clock_mhz) for clock_mhz in clocks_mhz]
        time_s[kind], energy_j[kind] = (np.stack([found[n] for found in at_clocks], axis=1) for n in (0, 1))
        time_covariance[kind], energy_covariance[kind] = at_clocks[-1][2:]
    return KindCosts(kinds, clocks_mhz, time_s, energy_j, time_covariance, energy_covariance)


def _held(layout: Layout, kinds: Sequence[str]) -> Floats:
    """Return the number of parts of each kind on each stage, shape (stages, kinds)."""
    return np.array([[sum(part.kind == kind for part in parts) for kind in kinds] for parts in layout.stages], float)


def _estimate(
    jobs: Sequence[tuple[Layout, StageProfile]], kinds: Sequence[str], kind: Kind, clock_mhz: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return time [s] and energy [J] of each kind of part at a clock, and their covariances."""
    held, values, errors = [], [], []
    for layout, profile in jobs:
        quality = profile.info.quality
        for stage, counts in enumerate(_held(layout, kinds)):
            if (stage, kind) not in profile.keys:
                continue
            row, known = profile.at(stage, kind, clock_mhz), quality.get((stage, kind, clock_mhz))
            held.append(counts)
            values.append((row.time_s, row.energy_j))
            of_row = (known.time_relative_error, known.energy_relative_error) if known else (None, None)
            errors.append([max(_LEAST_ERROR, _UNKNOWN_ERROR if error is None else error) for error in of_row])
    measured = np.array(values)
    found: list[Floats] = []
    covariances: list[Floats] = []
    for which in (0, 1):
        sigma = measured[:, which] * np.array(errors)[:, which]
        weighted = np.array(held) / sigma[:, None]
        costs, residual = nnls(weighted, measured[:, which] / sigma)
        # A residual that the errors of the rows do not explain increases the covariance.
        freedom = len(sigma) - len(kinds)
        scale = max(1.0, residual**2 / freedom) if freedom > 0 else 1.0
        found.append(costs)
        covariances.append(scale * np.linalg.pinv(weighted.T @ weighted))
    return found[0], found[1], covariances[0], covariances[1]


def _inseparable(held: Floats, kinds: Sequence[str]) -> list[list[str]]:
    """Return the groups of kinds that cannot be distinguished from these stages."""
    unseen = np.eye(len(kinds)) - np.linalg.pinv(held) @ held  # projects onto cost changes that no stage shows
    linked = np.abs(unseen) > 1e-6
    _, group_of = connected_components(linked, directed=False)
    return [
        [kinds[n] for n in np.flatnonzero(group_of == group).tolist()]
        for group in np.unique(group_of[linked.diagonal()])
    ]


def _separation_error(layout: Layout, held: Floats, kinds: Sequence[str], together: Sequence[Sequence[str]]) -> str:
    """Return an error message that names a layout with which the kinds can be distinguished."""
    groups = "; ".join(f"{', '.join(group[:-1])} and {group[-1]}" if len(group) > 1 else group[0] for group in together)
    problem = f"The costs of these kinds of parts cannot be distinguished: {groups}. "
    for cut in _other_cuts(layout.cut):
        other = layout.cut_into(cut)
        if not _inseparable(np.concatenate([held, _held(other, kinds)]), kinds):
            return (
                f"{problem}Train a few iterations of the same model with another layout in the same mode, such as\n"
                f"{other.spelled()}\nand give both output folders: perseus-ds partition RUN --also OTHER_RUN"
            )
    return f"{problem}They are on the same stages in the same numbers: train with more stages, and give that run."


def _other_cuts(cut: Cut) -> list[Cut]:
    """Return cuts with one or two parts moved to a neighbouring stage."""
    ways = [(a, b) for a, b in pairwise(range(len(cut)))]
    ways += [(b, a) for a, b in ways]
    found = []
    for moves in [*combinations(ways, 1), *combinations(ways, 2)]:
        counts = list(cut)
        for giver, taker in moves:
            counts[giver] -= 1
            counts[taker] += 1
        if min(counts) > 0:
            found.append(tuple(counts))
    return found
