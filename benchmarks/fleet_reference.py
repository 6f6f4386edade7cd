"""What the jobs of ``fleet.py`` use at default clocks and under the best plans, computed without a server or an agent.

An iteration is executed pass by pass, as the simulated GPUs do it: times with noise, and power by the clock of each
pass. Clocks change when a pass begins. Samples of an iteration with different noise are computed together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fleet_jobs import HOT_MHZ, LATENCY_S, Cost, Machine, State, lasting
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.schedule import Compute, Exchange, Launch, Transfer, Wait
from perseus_ds.planning import PlanningSettings

SAMPLES = 200
IN_TIME = 0.0005
"""Tolerance of the oracle's time: its plans have distinct times."""
DWELL_S = 2 * LATENCY_S
"""Shortest time at one clock in the oracle's plans [s]."""
LEAST_MHZ = 690
"""Lower clocks use more energy, so the oracle needs none of them [MHz]."""
Samples = NDArray[np.float64]
Clocks = tuple[tuple[int, ...], ...]
"""Clocks of the passes of each rank, in program order [MHz]."""


class Both(NamedTuple):
    """What an iteration costs at default clocks and under the oracle's plan."""

    default: Cost
    oracle: Cost

    def allowed_s(self, state: State) -> float:
        """Return the time that the user's goal allows [s]. Under a power limit, it is the oracle's."""
        goal = state.goal
        if goal.power is not None:
            return self.oracle.time_s
        return self.default.time_s * (1 + goal.allowed)


class _Pipeline(NamedTuple):
    """Samples of the time [s] and of the energy of its GPUs [J] in an iteration of one pipeline."""

    times_s: Samples
    energies_j: Samples


@lru_cache(maxsize=10_000)
def iteration(machine: Machine, state: State) -> Both:
    """Return the mean cost of an iteration in a state."""
    pipelines = _planned(machine, lasting(state))
    lengths = state.lengths or (1.0,) * machine.pipelines
    costs = []
    for samples in pipelines:
        times_s = np.array([pipeline.times_s * length for pipeline, length in zip(samples, lengths, strict=True)])
        longest_s = times_s.max(axis=0)
        waiting_s = (longest_s - times_s).sum(axis=0) * len(machine.forwards_s)
        energies_j = [pipeline.energies_j * length for pipeline, length in zip(samples, lengths, strict=True)]
        energy_j = np.sum(energies_j, axis=0) + machine.model.blocking_power_w * waiting_s
        time_s = state.factor * float(longest_s.mean()) + state.stall_s
        stalled_j = state.stall_s * machine.ranks * machine.model.blocking_power_w
        costs.append(Cost(time_s, state.factor * float(energy_j.mean()) + stalled_j))
    return Both(*costs)


@cache
def _planned(machine: Machine, state: State) -> tuple[list[_Pipeline], list[_Pipeline]]:
    """Return samples of each pipeline at default clocks, and under the oracle's plans.

    Plans are chosen by the true profile, which has no noise.
    """
    quiet = replace(machine, noise=0.0)
    at_default = [_execute(quiet, state, number, None) for number in range(machine.pipelines)]
    goal = state.goal
    if goal.power is None:
        default_s = max(pipeline.times_s[0] for pipeline in at_default)
        deadline_s = default_s * (1 + goal.allowed + IN_TIME)
        plans = [_cheapest_in_time(quiet, state, number, deadline_s) for number in range(machine.pipelines)]
    else:
        default_w = at_default[0].energies_j[0] / at_default[0].times_s[0]
        plans = [_fastest_within_power(quiet, state, goal.power * default_w)] * machine.pipelines
    default = [_execute(machine, state, number, None) for number in range(machine.pipelines)]
    oracle = [_execute(machine, state, number, plan) for number, plan in enumerate(plans)]
    return default, oracle


def _cheapest_in_time(machine: Machine, state: State, pipeline: int, deadline_s: float) -> Clocks | None:
    """Return the clocks of least energy that meet a deadline. None for default clocks."""
    found = None
    least_j = _execute(machine, state, pipeline, None).energies_j[0]
    changes_delay = _change_delay_s(machine, state) > 0
    for plan in _frontier(machine, state, pipeline).plans:
        candidates = [plan.clocks_mhz]
        if changes_delay:
            candidates.append(_raised_early(plan.clocks_mhz))
        for clocks_mhz in candidates:
            executed = _execute(machine, state, pipeline, clocks_mhz)
            if executed.times_s[0] <= deadline_s and executed.energies_j[0] < least_j:
                found, least_j = clocks_mhz, executed.energies_j[0]
    return found


def _raised_early(clocks_mhz: Clocks) -> Clocks:
    """Return the clocks with each rise one pass earlier, so that its delay precedes a pass that must be fast."""
    return tuple(tuple(map(max, clocks, (*clocks[1:], clocks[-1]))) for clocks in clocks_mhz)


def _change_delay_s(machine: Machine, state: State) -> float:
    return machine.change_delay_s if state.change_delay_s is None else state.change_delay_s


def _fastest_within_power(machine: Machine, state: State, power_w: float) -> Clocks:
    """Return the clocks of the fastest plan with at most this power of a pipeline."""
    for plan in _frontier(machine, state, 0).plans:
        executed = _execute(machine, state, 0, plan.clocks_mhz)
        if executed.energies_j[0] <= power_w * executed.times_s[0]:
            return plan.clocks_mhz
    raise ValueError(f"No plan needs only {power_w:.0f} W.")


@cache
def _frontier(machine: Machine, state: State, pipeline: int) -> Frontier:
    schedule = machine.schedule(state.micro_batches or machine.micro_batches)
    return optimize(schedule, _true_profile(machine, state, pipeline), PlanningSettings(least_dwell_s=DWELL_S))


def _true_profile(machine: Machine, state: State, pipeline: int) -> StageProfile:
    """Return the noiseless profile of a pipeline at all clocks."""
    model, rows = machine.model, []
    stages = len(machine.forwards_s)
    for stage, kind, top_s, workload in machine.passes():
        rank = pipeline * stages + stage
        own_s = top_s * (state.slow[rank] if state.slow else 1.0)
        for clock_mhz in (each for each in model.clocks_mhz if each >= LEAST_MHZ):
            reached_mhz = min(clock_mhz, HOT_MHZ) if rank in state.hot else clock_mhz
            # Of clocks with equal times the optimizer keeps only one, so lower ones are slower by a millionth a step.
            steps = (model.top_clock_mhz - clock_mhz) / model.clock_step_mhz
            time_s = own_s * model.slowdown(reached_mhz, workload)
            if steps and rank == machine.without_permission:
                time_s *= 10  # so that no plan uses another clock
            energy_j = time_s * model.power_w(reached_mhz, workload)
            rows.append(Measurement(stage, kind, clock_mhz, time_s * (1 + 1e-6 * steps), energy_j))
    return StageProfile(rows, ProfileInfo(simulated=True, blocking_power_w=model.blocking_power_w))


def _execute(machine: Machine, state: State, pipeline: int, clocks_mhz: Clocks | None) -> _Pipeline:
    """Execute an iteration of a pipeline with clocks for the passes of each rank. None for default clocks."""
    model, stages = machine.model, len(machine.forwards_s)
    work = {(stage, kind): (time_s, workload) for stage, kind, time_s, workload in machine.passes()}
    noise = np.random.default_rng(pipeline)
    change_delay_s = _change_delay_s(machine, state)
    schedule = machine.schedule(state.micro_batches or machine.micro_batches)
    samples = SAMPLES if machine.noise else 1
    now_s = [np.zeros(samples) for _ in range(stages)]
    busy_s = np.zeros(samples)
    passes_j = np.zeros(samples)
    launched_s: dict[Transfer, dict[int, Samples]] = {}
    clocks_left = [list(reversed(clocks)) for clocks in clocks_mhz or ()]
    last_mhz = [clocks[0] for clocks in clocks_left]  # of the previous iteration
    positions = [0] * stages
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for stage, operations in enumerate(schedule.ranks):
            rank = pipeline * stages + stage
            while positions[stage] < len(operations):
                operation = operations[positions[stage]]
                if isinstance(operation, Exchange | Launch):
                    for transfer in operation.transfers:
                        launched_s.setdefault(transfer, {}).setdefault(stage, now_s[stage])
                if isinstance(operation, Exchange | Wait):
                    sides = [launched_s.get(transfer, {}) for transfer in operation.transfers]
                    if any(len(side) < 2 for side in sides):
                        break
                    for side in sides:
                        now_s[stage] = np.maximum(now_s[stage], np.maximum(*side.values()))
                if isinstance(operation, Compute):
                    instruction = operation.instruction
                    top_s, workload = work[stage, instruction.kind]
                    clock_mhz: float = model.top_clock_mhz
                    if clocks_left:
                        chosen_mhz = clocks_left[stage].pop()
                        if change_delay_s and chosen_mhz != last_mhz[stage]:
                            now_s[stage] = now_s[stage] + change_delay_s
                        last_mhz[stage] = chosen_mhz
                        clock_mhz = chosen_mhz
                    if rank in state.hot:
                        clock_mhz = min(clock_mhz, HOT_MHZ)
                    own_s = top_s * (state.slow[rank] if state.slow else 1.0)
                    factors = np.maximum(0.0, 1 + machine.noise * noise.standard_normal(samples))
                    time_s = own_s * model.slowdown(clock_mhz, workload) * factors
                    now_s[stage] = now_s[stage] + time_s
                    busy_s += time_s
                    passes_j += time_s * model.power_w(clock_mhz, workload)
                positions[stage] += 1
                is_stuck = False
    assert all(position == len(rank) for position, rank in zip(positions, schedule.ranks, strict=True)), "deadlock"
    times_s = np.max(now_s, axis=0)
    return _Pipeline(times_s, passes_j + model.blocking_power_w * (stages * times_s - busy_s))
