"""What the hours of a price are worth: a week of prices, and the plans of the paper's profiles (GPT-3 175B).

python benchmarks/price_signal.py

Prices are made up by ``price``; profiles were measured on real GPUs by the paper's authors; the job is simulated by the
decisions that a training job takes, iteration by iteration, in a time that passes at once.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.policy.decisions import Decision, Situation, decide, options_of
from perseus_ds.policy.hourly_programme import CostAccount, Option, cheapest
from perseus_ds.policy.policies import CheapestPolicy
from perseus_ds.policy.signals import MOST_SIGNAL_VALUES, Numbers, Signal

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "sosp24" / "stage_profile"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
MONDAY = datetime(2026, 11, 23, tzinfo=timezone.utc)
WEEK_H = 168
GPUS_PER_STAGE = 8
TIMES_AS_LONG = 10
"""The profiles are of a tenth of each stage."""
FILE = "prices"


def price(hour: int) -> float:
    """Return a made-up price [EUR/MWh]: a morning and an evening peak, cheap nights, sun at noon, cheaper weekends."""
    of_day, weekend = hour % 24, hour // 24 % 7 >= 5
    peaks = 35 * math.exp(-(((of_day - 8) / 2) ** 2)) + 60 * math.exp(-(((of_day - 18.5) / 2.2) ** 2))
    sun = 45 * math.exp(-(((of_day - 13) / 2.5) ** 2))
    return 75 + peaks - sun - (25 if weekend else 0) + 8 * math.sin(2 * math.pi * hour / 61)


@dataclass
class Outcome:
    """What a job cost, and when it ended.

    Attributes:
        cost: In price times kWh.
        ended_h: After so many hours.
        halted_h: For how long it stood still.
        bound: No assignment of plans to hours costs less; NaN where none was computed.
        decided_ms: The longest decision [ms].
    """

    cost: float
    ended_h: float
    halted_h: float = 0.0
    bound: float = math.nan
    decided_ms: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", nargs="+", choices=BLOCKING_POWER_W, default=list(BLOCKING_POWER_W))
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.7, 0.85, 0.95])
    arguments = parser.parse_args()
    begin_s = MONDAY.timestamp()
    hours = range(WEEK_H)
    signal = Signal(tuple(begin_s + 3600.0 * h for h in hours), tuple(map(price, hours)), begin_s + 3600 * WEEK_H)
    print(f"prices {min(signal.values):.0f} to {max(signal.values):.0f}, mean {signal.mean:.0f} EUR/MWh (made up)")
    for gpu in arguments.gpus:
        frontier = frontier_of(gpu, arguments.micro_batches)
        slowest = frontier.plans[-1].time_s / frontier.plans[0].time_s
        print(f"\n{gpu}, {arguments.micro_batches} micro-batches; T*/T_min {slowest:.3f}")
        for load in arguments.loads:
            compare(frontier, signal, round(load * WEEK_H * 3600 / frontier.plans[0].time_s), load)
        decide_with_the_largest_file(frontier)
        beside_highs(frontier, signal)


def beside_highs(frontier: Frontier, signal: Signal) -> None:
    """Print the processor time of the cheapest assignment of plans to hours, and of HiGHS for its linear programme.

    HiGHS gets only the programme of the hour in which the job ends best, which it would have to search as well.
    """
    options = [Option(n, 1 / plan.time_s, plan.energy_j / plan.time_s) for n, plan in enumerate(frontier.plans)]
    rates, powers_w = np.array([(option.rate, option.power_w) for option in options]).T
    for count in (24, WEEK_H):
        edges_s: Numbers = MONDAY.timestamp() + 3600.0 * np.arange(count + 1, dtype=np.float64)
        prices = np.array(signal.values[:count])
        steps = 0.85 * 3600 * count * rates.max()
        begin_s = time.process_time()
        ours = cheapest(options, edges_s, prices, steps)
        between_s = time.process_time()
        assert ours is not None
        hours = ours.last + 1
        in_hour = sparse.kron(sparse.eye_array(hours), np.ones((1, len(options))), format="csr")
        highs = linprog(
            np.outer(prices[:hours], powers_w).ravel(),
            A_eq=sparse.vstack([in_hour[:-1], np.tile(rates, hours)[None]]),
            b_eq=[*np.diff(edges_s)[: hours - 1], steps],
            A_ub=in_hour[-1:],
            b_ub=[3600.0],
            method="highs",
        )
        ours_s, highs_s = between_s - begin_s, time.process_time() - between_s
        print(
            f"  {count} hours x {len(options)} plans: ours {1e3 * ours_s:.1f} ms, HiGHS {1e3 * highs_s:.0f} ms "
            f"(ratio {highs_s / ours_s:.0f}); cost {ours.cost / highs.fun:.9f} of HiGHS's"
        )


def frontier_of(gpu: str, micro_batches: int) -> Frontier:
    """Return the plans of a profile, for whole stages."""
    profile = StageProfile.load(DATA / f"gpt3-175b_{gpu}.csv")
    schedule = read_schedule(schedule_class("1f1b"), ranks=profile.num_stages, micro_batches=micro_batches)
    found = optimize(schedule, profile, blocking_power_w=BLOCKING_POWER_W[gpu])
    plans = tuple(replace(p, time_s=TIMES_AS_LONG * p.time_s, energy_j=TIMES_AS_LONG * p.energy_j) for p in found.plans)
    return replace(found, plans=plans, t_min_s=TIMES_AS_LONG * found.t_min_s)


def compare(frontier: Frontier, signal: Signal, steps: int, load: float) -> None:
    """Print each policy's cost divided by that of the plan of ``slowdown: 0`` throughout."""
    week_s = 3600 * WEEK_H
    last = len(frontier.plans) - 1
    in_time = frontier.plans.index(frontier.lookup(week_s / steps))
    single = {"slowdown 0 throughout": 0, "energy-optimal throughout": last, "the best single plan": in_time}
    found = {name: run_one(frontier, plan, signal, steps) for name, plan in single.items()}
    for may_pause in (False, True):
        finish_by = MONDAY + timedelta(seconds=week_s)
        policy = CheapestPolicy(
            name="cheapest", finish_by=finish_by, total_steps=steps, signal=FILE, may_pause=may_pause
        )
        found["cheapest, may pause" if may_pause else "cheapest"] = run_cheapest(frontier, policy, signal)
    print(f"  {steps} iterations, {load:.0%} of the week at T_min")
    for name, outcome in found.items():
        line = f"    {name:26} cost {outcome.cost / found['slowdown 0 throughout'].cost:.3f}"
        line += f", ends after {outcome.ended_h:6.1f} h{' (late)' if outcome.ended_h > WEEK_H else ''}"
        if math.isfinite(outcome.bound):
            line += f", {outcome.cost / outcome.bound - 1:.2%} above the bound, {outcome.halted_h:.1f} h standing still"
            line += f", longest decision {outcome.decided_ms:.0f} ms"
        print(line)


def decide_with_the_largest_file(frontier: Frontier) -> None:
    """Print how long decisions take with as many prices as a file may have, throughout the time that they are for."""
    generator = np.random.default_rng(0)
    begin_s, end_s = MONDAY.timestamp(), MONDAY.timestamp() + 900 * MOST_SIGNAL_VALUES
    values = [price(quarter // 4) + generator.normal(0, 5) for quarter in range(MOST_SIGNAL_VALUES)]
    signal = Signal(tuple(begin_s + 900.0 * quarter for quarter in range(MOST_SIGNAL_VALUES)), tuple(values), end_s)
    steps = round(0.85 * (end_s - begin_s) / frontier.plans[0].time_s)
    for may_pause in (False, True):
        finish_by = datetime.fromtimestamp(end_s, timezone.utc)
        policy = CheapestPolicy(
            name="cheapest", finish_by=finish_by, total_steps=steps, signal=FILE, may_pause=may_pause
        )
        job = _Job(frontier, policy, signal)
        took_ms = []
        for done in np.linspace(0, 0.95, 100):
            job.step, job.now_s = round(done * steps), begin_s + done * (end_s - begin_s)
            job.decide(iterations_ahead=1)
            took_ms.append(1e3 * job.took_s[-1])
        print(
            f"  {MOST_SIGNAL_VALUES} prices{', may pause' if may_pause else ''}: decisions take "
            f"{min(took_ms):.1f} to {max(took_ms):.1f} ms, median {np.median(took_ms):.1f} ms"
        )


def situation_of(frontier: Frontier, signal: Signal, step: int, now_s: float) -> Situation:
    gpus = GPUS_PER_STAGE * len(frontier.instructions)
    return Situation(
        step,
        datetime.fromtimestamp(now_s, timezone.utc),
        gpus_per_rank=GPUS_PER_STAGE,
        idle_power_w=frontier.provenance.blocking_power_w * gpus,
        signals={FILE: signal},
    )


def run_one(frontier: Frontier, plan: int, signal: Signal, steps: int) -> Outcome:
    """Run one plan throughout."""
    begin_s, time_s = MONDAY.timestamp(), frontier.plans[plan].time_s
    energy_j = frontier.plans[plan].energy_j * GPUS_PER_STAGE * steps
    cost = signal.mean_between(begin_s, begin_s + steps * time_s) * energy_j / 3.6e6
    return Outcome(cost, steps * time_s / 3600)


def run_cheapest(frontier: Frontier, policy: CheapestPolicy, signal: Signal) -> Outcome:
    """Train by the policy's decisions, each of which counts for the iteration after the next one."""
    job = _Job(frontier, policy, signal)
    choice = job.decide(iterations_ahead=0)
    following = choice
    while job.step < policy.total_steps:
        if choice.halts:
            job.stand_still()
        job.iterate(choice)
        choice, following = following, job.decide(iterations_ahead=1)
    halted_h = job.costs.halted_s / 3600
    return Outcome(job.costs.cost, (job.now_s - MONDAY.timestamp()) / 3600, halted_h, job.bound, 1e3 * max(job.took_s))


class _Job:
    def __init__(self, frontier: Frontier, policy: CheapestPolicy, signal: Signal) -> None:
        self._frontier, self._policy, self._signal = frontier, policy, signal
        self._before: Decision | None = None
        self.now_s = MONDAY.timestamp()
        self.step = 0
        self.bound = math.nan
        self.took_s: list[float] = []
        self.costs = CostAccount()

    def decide(self, iterations_ahead: int) -> Decision:
        known = situation_of(self._frontier, self._signal, self.step, self.now_s)
        known = replace(known, iterations_ahead=iterations_ahead, before=self._before)
        begin_s = time.perf_counter()
        decision = decide(self._policy, self._frontier, known)
        self.took_s.append(time.perf_counter() - begin_s)
        self._before = decision
        if decision.timetable is not None and math.isnan(self.bound):
            self.bound = decision.timetable.bound
        return decision

    def stand_still(self) -> None:
        begin_s = self.now_s
        while self.decide(iterations_ahead=0).halts:
            self.now_s += 10.0
        options = options_of(
            self._policy, self._frontier, situation_of(self._frontier, self._signal, self.step, begin_s)
        )
        energy_j = options[-1].power_w * (self.now_s - begin_s)
        self.costs.add_halt(self._signal, begin_s=begin_s, end_s=self.now_s, energy_j=energy_j)

    def iterate(self, choice: Decision) -> None:
        plan, fastest = self._frontier.plans[choice.plan], self._frontier.plans[0]
        self.now_s += plan.time_s
        self.step += 1
        self.costs.add_iteration(
            self._signal,
            ended_s=self.now_s,
            time_s=plan.time_s,
            energy_j=plan.energy_j * GPUS_PER_STAGE,
            fastest_time_s=fastest.time_s,
            fastest_energy_j=fastest.energy_j * GPUS_PER_STAGE,
        )


if __name__ == "__main__":
    main()
