"""Finds the fastest partition of a model into stages and the most frugal of these.

A *cut* is the number of the model's layers on each stage. The time of an iteration is the length of the longest path
through its DAG, so the length of any path is a lower bound. Consider a path that runs mainly through stage s: through
each earlier stage at least n times and through each later stage at least m times. With P(i) the time of the first i
layers and P that of all layers, the iteration takes at least

    n * P(i) + (the path's visits to stage s) * (P(j) - P(i)) + m * (P - P(j))

if stage s has the layers i to j, for any layers on the other stages. (For 1F1B these terms are the filling of the
pipeline, the steady state of its slowest stage and the draining.) Dynamic programming finds the cut with the least
maximum of these bounds over stages, and a search lists cuts in the order of their bounds. Each cut is evaluated with
the DAG until the next bound is not below the best time found. All times are at default clocks, the highest measured
ones.

With hundreds of layers on tens of stages, such a search takes too long. Then layers are moved between any two stages as
long as the iteration becomes faster, from several initial cuts, and the bound is that of a linear program in which
layers may be divided: the least time for which no known path is longer. A search that was stopped early uses the better
of both bounds.

Energy has a bound over all cuts too. A flow through the DAG, in watts, proves a bound for one cut
(:mod:`perseus_ds.optimizer.bounds`) and is a price for each second of an instruction. With these prices, the least
energy of a cut is a sum over layers, and dynamic programming finds the minimum over all cuts that are fast enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, pairwise, permutations

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from perseus_ds.artifacts.profile import ClockOptions, Measurement, ProfileInfo, StageProfile
from perseus_ds.errors import ConfigError
from perseus_ds.layouts.schedule_comparison import held_by_stage
from perseus_ds.optimizer import solve
from perseus_ds.optimizer.bounds import ending_w
from perseus_ds.optimizer.network import Network
from perseus_ds.optimizer.problem import Corners, Floats, Problem
from perseus_ds.optimizer.relaxation import Relaxation
from perseus_ds.pipeline.dag import Dag, FixedDurations
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Schedule
from perseus_ds.planning import PlanningSettings

Cut = tuple[int, ...]

_SAME = 1e-9
"""Relative difference up to which two times are equal."""
_MOST_SEARCHED, _MOST_ROUNDS = 30_000, 8
"""Maximum number of partial cuts examined in a round of the search, and of rounds."""
_MOST_PLACES, _MOST_VIRTUAL_PLACES = 4_000, 500
"""Maximum stages times layers for a search in the order of bounds, with one and with several stages per rank."""
_MOST_EVALUATED, _MOST_NODES = 1_200, 6_000_000
"""Maximum number of cuts evaluated with the DAG while layers are moved, and of nodes of all these DAGs."""
_MOST_PLANNED = 4_000
"""Maximum number of instructions for which plans are computed; for more, this would take minutes."""
_PLANS = 12
"""Number of deadlines for which each cut is planned, the first of which is the fastest time."""
_PRICES, _LATER = 12, 0.003
"""Number of rounds of prices, and how much later than the fastest time their deadline is, where prices are unique."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of each layer on one device.

    The embedding and the head are separate layers or are included in the first and the last layer.

    Attributes:
        clocks_mhz: Ascending.
        time_s, energy_j: By kind, shape (layers, clocks): time [s] and energy [J] of one micro-batch.
        parameters: Shape (layers,): number of parameters.
        fixed_bytes: Shape (layers,): memory of weights, gradients and optimizer state.
        held_bytes: Shape (layers,): memory that the backward of one micro-batch needs from its forward.
        fixed: Durations that do not depend on layers.
        tails: Rows of the ranks' tails, if they were measured over clocks.
    """

    clocks_mhz: tuple[int, ...]
    time_s: Mapping[Kind, Floats]
    energy_j: Mapping[Kind, Floats]
    parameters: Floats
    fixed_bytes: Floats
    held_bytes: Floats
    blocking_power_w: float
    gpu: str
    simulated: bool
    fixed: FixedDurations = field(default_factory=FixedDurations)
    tails: tuple[Measurement, ...] = ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(self.time_s)

    @property
    def layers(self) -> int:
        return len(self.parameters)

    def profile(self, shares: Floats) -> StageProfile:
        """Return the profile of stages with these shares of each layer, shape (stages, layers)."""
        rows = []
        for kind in self.kinds:
            times_s, energies_j = shares @ self.time_s[kind], shares @ self.energy_j[kind]
            for (stage, number), time_s in np.ndenumerate(times_s):
                energy_j = float(energies_j[stage, number])
                rows.append(Measurement(stage, kind, self.clocks_mhz[number], float(time_s), energy_j))
        info = ProfileInfo(simulated=self.simulated, gpu=self.gpu, blocking_power_w=self.blocking_power_w)
        return StageProfile([*rows, *self.tails], info.with_fixed_durations(self.fixed))


@dataclass(frozen=True)
class EvaluatedCut:
    """A cut and the predicted costs of an iteration with it, at default clocks.

    Attributes:
        cut: Number of layers on each stage.
        planned_j: Energy under the plan of least energy that is as fast [J], or ``energy_j`` without plans.
        memory_bytes: Memory of the fullest stage.
        bubble: Fraction of the GPUs' time that is spent waiting.
        on_path, runs: Number of times that the longest path and an iteration visit each layer, shape (layers, kinds).
    """

    cut: Cut
    time_s: float
    energy_j: float
    planned_j: float
    memory_bytes: float
    bubble: float
    on_path: Floats = field(repr=False, compare=False)
    runs: Floats = field(repr=False, compare=False)


@dataclass(frozen=True)
class Partition:
    """The result of a search for the best cut of a model.

    Attributes:
        known: Cuts to compare with, by name. For a model that has not trained, the defaults of engines.
        most_frugal: The cut of least energy under its plan among those that are as fast.
        time_bound_s: Lower bound on the time of any cut [s].
        energy_bound_j: Lower bound on the planned energy of any cut as fast as the fastest one [J], or None if unknown.
        is_planned: Whether plans were computed.
    """

    known: Mapping[str, EvaluatedCut]
    fastest: EvaluatedCut
    most_frugal: EvaluatedCut
    time_bound_s: float
    energy_bound_j: float | None
    costs: LayerCosts
    is_planned: bool

    @property
    def cut(self) -> Cut:
        """The cut to train with, the most frugal one of the fastest."""
        return self.most_frugal.cut

    @property
    def time_gap(self) -> float:
        """Relative amount by which a faster cut may exist, or 0 if it is proven that none exists."""
        gap = self.fastest.time_s / self.time_bound_s - 1
        return gap if gap > _SAME else 0.0

    @property
    def energy_gap(self) -> float | None:
        """Relative distance of the most frugal cut's planned energy from the bound over all cuts."""
        return None if self.energy_bound_j is None else self.most_frugal.planned_j / self.energy_bound_j - 1


def best_partition(
    costs: LayerCosts,
    schedule: Schedule,
    *,
    known: Mapping[str, Cut] | None = None,
    memory_bytes: float | None = None,
    may_hold: npt.NDArray[np.bool_] | None = None,
    is_planned: bool = True,
) -> Partition:
    """Find the fastest cut, and the most frugal one of those that are as fast.

    Args:
        costs: The costs of the layers.
        schedule: The schedule of all ranks.
        known: Cuts to compare with, by name. None for the defaults of engines.
        memory_bytes: Maximum memory of a stage.
        may_hold: Whether a stage may have the layers i to j, shape (stages, layers + 1, layers + 1).
        is_planned: Whether to compute plans, if more than one clock was measured.

    Raises:
        ConfigError: If the schedule has other instructions, there are more stages than layers, or the model does not
            fit into the memory.
    """
    return _Search(costs, schedule, memory_bytes, may_hold, is_planned and len(costs.clocks_mhz) > 1).result(known)


class _Search:
    def __init__(
        self,
        costs: LayerCosts,
        schedule: Schedule,
        memory_bytes: float | None,
        may_hold: npt.NDArray[np.bool_] | None,
        is_planned: bool,
    ) -> None:
        self.costs, self.schedule = costs, schedule
        self.is_planned = is_planned and sum(map(len, schedule.instructions)) <= _MOST_PLANNED
        self.stages = schedule.num_stages
        self.kinds = costs.kinds
        if others := {kind for _, kind in schedule.keys} - {*self.kinds, Kind.TAIL}:
            raise ConfigError(
                f"{schedule.name} has instructions {', '.join(sorted(others))}; layers are measured as "
                f"{' and '.join(self.kinds)}. Choose a schedule of these, such as 1f1b."
            )
        self.uniform = uniform_cut(costs.layers, self.stages)
        most = _MOST_PLACES if self.stages == len(schedule.ranks) else _MOST_VIRTUAL_PLACES
        self.is_large = self.stages * costs.layers > most
        self.dag = Dag.build(schedule)
        # For each node, the index of its (stage, kind), or -1 if it has none.
        self.row = np.array([self._row(node.work) for node in self.dag.nodes])
        self.fixed_s = self.dag.fixed_durations_s(costs.fixed)
        self.least_fixed_s = self.fixed_s.copy()  # with tails at their fastest clock
        tails_s: dict[int, list[float]] = defaultdict(list)  # by stage, at each clock
        for row in costs.tails:
            tails_s[row.stage].append(row.time_s)
        for number, node in enumerate(self.dag.nodes):
            if isinstance(node.work, Instruction) and node.work.kind is Kind.TAIL and node.work.stage in tails_s:
                self.fixed_s[number] = tails_s[node.work.stage][-1]
                self.least_fixed_s[number] = min(tails_s[node.work.stage])
        # Shape (kinds, layers + 1): total time of the first layers at default clocks.
        self.before_s = _sums(np.stack([costs.time_s[kind][:, -1] for kind in self.kinds]))
        self.bytes = np.stack(
            [_between(_sums(costs.fixed_bytes + held * costs.held_bytes)) for held in held_by_stage(schedule)]
        )
        self.allowed = self._allowed(memory_bytes, may_hold)
        # Number of visits of each known path to each stage, shape (paths, stages, kinds), and its fixed time [s].
        self.paths = np.zeros((0, self.stages, len(self.kinds)))
        self.rest_s = np.zeros(0)
        self.evaluated = 0
        for stages in schedule.stages_of_ranks if self.is_large else [[stage] for stage in range(self.stages)]:
            for slower in (1.05, 3.0):
                times_s = np.tile(self.before_s[:, -1] / self.stages, (self.stages, 1))
                times_s[stages] *= slower
                self._add_path(times_s)

    def _row(self, work: object) -> int:
        if isinstance(work, Instruction) and work.kind in self.kinds:
            return work.stage * len(self.kinds) + self.kinds.index(work.kind)
        return -1

    def _allowed(self, memory_bytes: float | None, may_hold: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
        """Return, for each stage, whether it may have the layers i to j, as of ``best_partition``."""
        limit_bytes = np.inf if memory_bytes is None else memory_bytes
        needed = self.bytes if may_hold is None else np.where(may_hold, self.bytes, np.inf)
        needed_bytes, self.fallback = next(_in_order(needed), (np.inf, ()))
        if np.isinf(needed_bytes):
            raise ConfigError(f"There is no cut into {self.stages} stages that the engine supports. Use fewer stages.")
        if needed_bytes > limit_bytes:
            raise ConfigError(
                f"memory: with the best cut into {self.stages} stages, {self.fallback}, the fullest one needs "
                f"{needed_bytes / 2**30:.3g} GiB, and {limit_bytes / 2**30:.3g} GiB are allowed. Use more stages, "
                "smaller micro-batches, or recompute activations (gradient_checkpointing)."
            )
        allowed: npt.NDArray[np.bool_] = np.isfinite(needed) & (needed <= limit_bytes)
        return allowed

    def result(self, known: Mapping[str, Cut] | None) -> Partition:
        if known is None:
            parameters = np.stack([_between(_sums(self.costs.parameters))] * self.stages)
            known = {"uniform": self.uniform, "parameters": next(_in_order(parameters))[1]}
        self.starts = [cut for cut in (*known.values(), self.uniform) if self._fits(cut)] or [self.fallback]
        fastest, time_bound_s = self._fastest_moved() if self.is_large else self._fastest()
        most_frugal, energy_bound_j = (fastest, None) if self.is_large else self._most_frugal(fastest, time_bound_s)
        return Partition(
            known={name: self._evaluate(cut) for name, cut in known.items()},
            fastest=fastest,
            most_frugal=most_frugal,
            time_bound_s=time_bound_s,
            energy_bound_j=energy_bound_j,
            costs=self.costs,
            is_planned=self.is_planned,
        )

    def _times_s(self, cut: Cut) -> Floats:
        """Return the times of a cut's stages, shape (stages, kinds) [s]."""
        return np.diff(self.before_s[:, list(accumulate(cut, initial=0))], axis=1).T

    def _durations_s(self, times_s: Floats) -> Floats:
        return np.where(self.row >= 0, times_s.ravel()[self.row], self.fixed_s)

    def _add_path(self, times_s: Floats) -> None:
        path = self.dag.critical_path(self._durations_s(times_s))
        count = self._counts(path)[None]
        rest_s = float(self.fixed_s[path][self.row[path] < 0].sum())
        same = (self.paths == count).all(axis=(1, 2))
        if not (self.rest_s[same] >= rest_s).any():
            self.paths = np.concatenate([self.paths, count])
            self.rest_s = np.append(self.rest_s, rest_s)

    def _counts(self, nodes: Sequence[int]) -> Floats:
        """Return the number of the given nodes of each stage and kind, shape (stages, kinds)."""
        rows = self.row[list(nodes)]
        size = self.stages * len(self.kinds)
        return np.bincount(rows[rows >= 0], minlength=size).reshape(self.stages, len(self.kinds)).astype(float)

    def _least_s(self) -> Floats:
        """Return a lower bound on the time if a stage has the layers i to j [s]."""
        behind_s = self.before_s[:, -1:] - self.before_s
        result = np.zeros_like(self.bytes)
        for path, rest_s in zip(self.paths, self.rest_s, strict=True):
            for stage in range(self.stages):
                # There are no layers before the first stage and after the last one.
                first = path[: stage or 1].min(axis=0) @ self.before_s
                last = path[min(stage + 1, self.stages - 1) :].min(axis=0) @ behind_s
                time_s = first[:, None] + _between(path[stage] @ self.before_s) + last + rest_s
                result[stage] = np.maximum(result[stage], time_s)
        return result

    def _fastest(self) -> tuple[EvaluatedCut, float]:
        """Return the fastest cut found, and a lower bound on the time of any cut [s]."""
        best, bound_s = min(self.starts, key=self._time_s), 0.0
        known = 0
        for _ in range(_MOST_ROUNDS):
            if known == len(self.paths):  # only with paths found since does another round have better bounds
                break
            known = len(self.paths)
            best = self._improved(best)
            best_s = self._time_s(best)
            self.least_s = np.where(self.allowed, self._least_s(), np.inf)
            for bound_s, cut in _in_order(self.least_s, self.paths @ self.before_s, self.rest_s):
                if bound_s >= best_s * (1 - _SAME) or not cut:
                    break
                if float(self._lengths_s(cut).max()) >= best_s * (1 - _SAME):
                    continue
                self._add_path(self._times_s(cut))
                if self._time_s(cut) < best_s:
                    best_s, best = self._time_s(cut), cut
            else:
                bound_s = best_s
        if bound_s < best_s * (1 - _SAME):  # the search was stopped early
            bound_s = max(bound_s, self._divided_s())
        return self._evaluate(best), min(bound_s, best_s)

    def _fastest_moved(self) -> tuple[EvaluatedCut, float]:
        """Return the fastest cut found by moving layers, and a lower bound on the time of any cut [s].

        Repeatedly, layers of the best cut are moved at random before others are moved to make it faster.
        """
        best = min((self._improved(cut) for cut in dict.fromkeys(self.starts)), key=self._time_s)
        draw = np.random.default_rng(0)
        while self.evaluated < min(_MOST_EVALUATED, _MOST_NODES // len(self.row)):
            self.evaluated += 1
            cut = np.array(best)
            for giver, taker in draw.integers(self.stages, size=(1 + self.stages // 4, 2)):
                cut[[giver, taker]] += (-1, 1) if giver != taker else (0, 0)
            if cut.min() > 0 and self._fits(moved := tuple(cut.tolist())):
                best = min(best, self._improved(moved), key=self._time_s)
        return self._evaluate(best), min(self._divided_s(), self._time_s(best))

    def _divided_s(self) -> float:
        """Return a lower bound on the time if layers may be divided among stages [s]."""
        layers, counts = np.unique(np.diff(self.before_s), axis=1, return_counts=True)
        size = self.stages * len(counts)
        # The time that a layer of each kind adds to each path on each stage. The last variable is the time.
        of_paths = np.concatenate([(self.paths @ layers).reshape(-1, size), -np.ones((len(self.paths), 1))], axis=1)
        all_placed = np.concatenate([np.tile(np.eye(len(counts)), self.stages), np.zeros((len(counts), 1))], axis=1)
        a_layer = np.concatenate(
            [np.repeat(np.eye(self.stages), len(counts), axis=1), np.zeros((self.stages, 1))], axis=1
        )
        result = linprog(
            np.eye(size + 1)[-1],
            A_ub=np.concatenate([of_paths, -a_layer]),
            b_ub=np.concatenate([-self.rest_s, -np.ones(self.stages)]),
            A_eq=all_placed,
            b_eq=counts,
        )
        return float(result.fun) if result.success else 0.0

    def _improved(self, cut: Cut) -> Cut:
        """Return a cut that cannot be made faster by moving one layer to another stage."""
        best_s, better = self._time_s(cut), True
        self._add_path(self._times_s(cut))
        while better:
            better = False
            for bound_s, moved in self._moves(cut):
                if bound_s >= best_s * (1 - _SAME):
                    break
                time_s = self._time_s(moved)
                self._add_path(self._times_s(moved))
                if time_s < best_s * (1 - _SAME):
                    best_s, cut, better = time_s, moved, True
                    break
        return cut

    def _moves(self, cut: Cut) -> Iterator[tuple[float, Cut]]:
        """Yield the cuts with one layer on another stage, in the order of the bound by known paths [s]."""
        pairs = np.array(list(permutations(range(self.stages), 2)), dtype=int).reshape(-1, 2)
        moved = np.tile(np.array(cut), (len(pairs), 1))
        moved[np.arange(len(pairs)), pairs[:, 0]] -= 1
        moved[np.arange(len(pairs)), pairs[:, 1]] += 1
        moved = moved[(moved > 0).all(axis=1)]
        ends = np.pad(moved.cumsum(axis=1), ((0, 0), (1, 0)))
        fits = self.allowed[np.arange(self.stages), ends[:, :-1], ends[:, 1:]].all(axis=1)
        moved, ends = moved[fits], ends[fits]
        times_s = np.diff(self.before_s[:, ends], axis=2)  # shape (kinds, cuts, stages)
        lengths_s = np.tensordot(self.paths, times_s, axes=([2, 1], [0, 2])) + self.rest_s[:, None]
        bounds_s = lengths_s.max(axis=0, initial=0.0)
        for number in np.argsort(bounds_s, kind="stable"):
            yield float(bounds_s[number]), tuple(moved[number].tolist())

    def _fits(self, cut: Cut) -> bool:
        return all(self.allowed[place] for place in _places(cut))

    def _most_frugal(self, fastest: EvaluatedCut, time_bound_s: float) -> tuple[EvaluatedCut, float | None]:
        """Return the most frugal of the fastest cuts found, and a bound on their energy [J].

        Prices for one cut may not suit other cuts that are as fast. So each round computes the prices of a mixture of
        cuts, and the cut of least energy at these prices, which is added to the mixture. Each round's prices, and the
        mean of all prices, prove a bound, and the cuts are candidates.
        """
        best, deadline_s = fastest, fastest.time_s * (1 + _SAME)
        if not self.is_planned:
            return best, None
        in_time = np.where(self.least_s <= deadline_s, 0.0, np.inf)
        shares, seen, bound_j = shares_of(fastest.cut), {fastest.cut}, 0.0
        mean_w = np.zeros(len(self.dag.nodes) + 1)
        for number in range(_PRICES):
            price_w = self._price_w(shares, deadline_s)
            mean_w += (price_w - mean_w) / (number + 1)
            for prices_w in (mean_w, price_w):
                constant_j, sums_j = self._priced(prices_w, deadline_s, time_bound_s)
                # The cut is empty if a long search was stopped.
                in_order = _in_order(in_time, sums_j)
                least_j, cut = next(
                    (least_j, cut)
                    for least_j, cut in in_order
                    if not cut or (self._lengths_s(cut).max() <= deadline_s and self._time_s(cut) <= deadline_s)
                )
                bound_j = max(bound_j, constant_j + least_j)
            if not cut:  # no cut as fast was found among those of less energy
                break
            if cut not in seen:
                best = min(best, self._evaluate(cut, deadline_s), key=lambda each: each.planned_j)
            seen.add(cut)
            shares = shares + (shares_of(cut) - shares) / (number + 2)
        return best, min(bound_j, best.planned_j)

    def _lengths_s(self, cut: Cut) -> Floats:
        result: Floats = (self.paths * self._times_s(cut)).sum(axis=(1, 2)) + self.rest_s
        return result

    def _price_w(self, shares: Floats, deadline_s: float) -> Floats:
        """Return the price of a second of each node that takes time and, as the last element, of the iteration [W]."""
        problem = Problem(self.dag, self.costs.profile(shares), PlanningSettings())
        network = Network(problem)
        relaxed = Relaxation(network).solve(max(deadline_s, problem.t_min_s) * (1 + _LATER))
        flow_w = np.maximum(relaxed.flow_w, 0.0)
        takes_time = network.work >= 0
        prices_w = np.bincount(network.work[takes_time], flow_w[takes_time], len(self.dag.nodes))
        return np.append(prices_w, ending_w(network, flow_w))

    def _priced(self, price_w: Floats, deadline_s: float, time_bound_s: float) -> tuple[float, Floats]:
        """Return the energy bound at these prices: a constant, and sums over layers by stage [J]."""
        least_j = np.zeros((1, self.stages, self.costs.layers))
        for row in range(self.stages * len(self.kinds)):
            stage, kind = divmod(row, len(self.kinds))
            of_row_w = price_w[:-1][self.row == row]
            least_j[0, stage] += [corners.least_j(of_row_w).sum() for corners in self.corners[kind]]
        # Nodes that do not depend on layers are priced too.
        fixed_j = float(price_w[:-1] @ self.least_fixed_s)
        waiting_w = self.costs.blocking_power_w * len(self.schedule.ranks)
        if waiting_w > price_w[-1]:
            # A plan may end earlier, but not before the bound with all instructions at their fastest clocks.
            fastest = min(float((t.min(axis=1) / t[:, -1]).min()) for t in self.costs.time_s.values())
            deadline_s = time_bound_s * fastest
        return float(waiting_w - price_w[-1]) * deadline_s + fixed_j, _sums(least_j)

    @cached_property
    def corners(self) -> list[list[Corners]]:
        """By kind and layer, the clocks that are optimal at some price."""
        costs, clocks_mhz = self.costs, np.array(self.costs.clocks_mhz)

        def of_layer(time_s: Floats, energy_j: Floats) -> Corners:
            options = ClockOptions(clocks_mhz, time_s, energy_j).pareto(costs.blocking_power_w)
            return Corners.of(options.time_s, options.effective_energy_j(costs.blocking_power_w))

        return [list(map(of_layer, costs.time_s[kind], costs.energy_j[kind])) for kind in self.kinds]

    def _time_s(self, cut: Cut) -> float:
        self.evaluated += 1
        return self.dag.makespan_s(self._durations_s(self._times_s(cut)))

    def _evaluate(self, cut: Cut, deadline_s: float | None = None) -> EvaluatedCut:
        profile = self.costs.profile(shares_of(cut))
        instructions = [instruction for stream in self.schedule.instructions for instruction in stream]
        of_rows = [profile.at_highest_clock(i.stage, i.kind) for i in instructions if (i.stage, i.kind) in profile.keys]
        time_s, waiting_w = self._time_s(cut), self.costs.blocking_power_w
        rank_s, busy_s = len(self.schedule.ranks) * time_s, sum(row.time_s for row in of_rows)
        energy_j = planned_j = sum(row.energy_j for row in of_rows) + waiting_w * (rank_s - busy_s)
        if self.is_planned:
            frontier = solve(Problem(self.dag, profile, PlanningSettings(plans=_PLANS)))
            planned_j = frontier.lookup((deadline_s or time_s) * (1 + _SAME)).energy_j
        memory_bytes = max(float(self.bytes[place]) for place in _places(cut))
        counts = self._counts(range(len(self.row)))
        on_path = self._counts(self.dag.critical_path(self._durations_s(self._times_s(cut))))
        return EvaluatedCut(
            cut,
            time_s,
            energy_j,
            planned_j,
            memory_bytes,
            bubble=1 - busy_s / rank_s,
            on_path=np.repeat(on_path, cut, axis=0),
            runs=np.repeat(counts, cut, axis=0),
        )


def uniform_cut(layers: int, stages: int) -> Cut:
    """Return a cut with equally many layers on each stage, or one more on the first stages.

    Raises:
        ConfigError: If there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"The model has {layers} layers, so 1 to {layers} stages, not {stages}.")
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def _places(cut: Cut) -> Iterator[tuple[int, int, int]]:
    """Yield each stage with the range i to j of its layers."""
    return ((stage, i, j) for stage, (i, j) in enumerate(pairwise(accumulate(cut, initial=0))))


def shares_of(cut: Sequence[int]) -> Floats:
    """Return the share of each layer that each stage of a cut has, shape (stages, layers)."""
    return np.repeat(np.eye(len(cut)), cut, axis=1)


def _sums(values: Floats) -> Floats:
    return np.concatenate([np.zeros_like(values[..., :1]), values.cumsum(axis=-1)], axis=-1)


def _between(sums: Floats) -> Floats:
    """Return the sum of the values from i to j for every i and j."""
    return sums[None, :] - sums[:, None]


def _in_order(worst: Floats, sums: Floats | None = None, rest: Floats | None = None) -> Iterator[tuple[float, Cut]]:
    """Yield all cuts, each with its value, in the order of this value.

    The value is the maximum of the stages' values and of several sums. If the search is stopped early, the last cut is
    empty, and no remaining cut has a lower value.

    Args:
        worst: Value of each stage if it has the layers from i to j, shape (stages, layers + 1, layers + 1); infinite
            if it may not have them.
        sums: Cumulative sums over layers of each layer's contribution on a stage, shape (sums, stages, layers + 1).
        rest: Constant part of each sum.
    """
    stages, ends = worst.shape[:2]
    worst = np.where(np.triu(np.ones((ends, ends), dtype=bool), 1), worst, np.inf)  # a stage has at least one layer
    sums = np.zeros((0, stages, ends)) if sums is None else sums
    # The least contribution of stages s, s + 1, … if they have all layers from i on.
    worst_left = np.full((stages + 1, ends), np.inf)
    sums_left = np.full((stages + 1, len(sums), ends), np.inf)
    worst_left[-1, -1], sums_left[-1, :, -1] = 0.0, 0.0
    for s in reversed(range(stages)):
        worst_left[s] = np.maximum(worst[s], worst_left[s + 1]).min(axis=1)
        for n, of_layers in enumerate(sums[:, s]):
            added = np.where(np.isfinite(worst[s]), _between(of_layers), np.inf)
            sums_left[s, n] = (added + sums_left[s + 1, n]).min(axis=1)
    if not np.isfinite(worst_left[0, 0]):
        return
    # Longer partial cuts come first among equals, so that a complete cut is found early.
    no_layer = np.zeros(len(sums)) if rest is None else rest
    queue: list[tuple[float, int, tuple[int, ...], float, Floats]] = [(0.0, 0, (0,), 0.0, no_layer)]
    for searched in count():
        if not queue:
            return
        bound, _, cut, so_far, added = heapq.heappop(queue)
        if searched == _MOST_SEARCHED:
            yield bound, ()
            return
        s, begin = len(cut) - 1, cut[-1]
        if s == stages:
            yield bound, tuple(b - a for a, b in pairwise(cut))
            continue
        most = np.maximum(so_far, worst[s, begin])
        totals = added[:, None] + sums[:, s] - sums[:, s, begin, None]
        bounds = np.maximum(most, worst_left[s + 1])
        bounds = np.maximum(bounds, (totals + sums_left[s + 1]).max(axis=0, initial=0.0))
        for end in np.flatnonzero(np.isfinite(bounds)).tolist():
            entry = (float(bounds[end]), -s - 1, (*cut, end), float(most[end]), totals[:, end])
            heapq.heappush(queue, entry)
