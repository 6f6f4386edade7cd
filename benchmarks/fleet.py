"""Of the energy that a job could have saved, how much did auto mode really save? One figure for a fleet of jobs.

    python benchmarks/fleet.py                          # all scenarios, each with its own number of seeds
    python benchmarks/fleet.py --seeds 1                # all scenarios once
    python benchmarks/fleet.py --only quiet "noise 2 %" --seeds 3 --first-seed 10 --json fleet.json

Each scenario is an ordinary job with an ordinary trouble, on SIMULATED GPUs in virtual time: the real server, clients
and agents run without processes (``tests/support/virtual``). All figures are the emulation's ground truth, energy of
the GPUs and virtual time, and not what the server believes.

- ``E_job``, ``T_job``: the job under ``"mode": "auto"``, from before the first measurement at its start to the end of
  its last iteration, with everything in between (measuring the GPUs, profiling, comparisons).
- ``E_default``, ``T_default``: the same iterations, all at default clocks.
- ``E_oracle``: the same iterations, from the first one on under the best plan for their own order. It is the plan of
  ``perseus_ds.optimizer`` from the true, noiseless profile of all clocks, within the allowed slowdown relative to
  default clocks, with a dwell time of two latencies of the driver. The oracle knows what lasts, such as limits of GPUs
  or a slower pipeline, but not the lengths of the inputs of the next iteration.
- *realised* = (E_default - E_job) / (E_default - E_oracle). At default clocks it is 0, and a loss is negative.
- *late* = T_job / T_default - 1 - allowed slowdown. Under a power limit, the oracle's time is allowed.

``E_default`` and ``E_oracle`` are computed pass by pass (``fleet_reference.py``), with the same noise.

2 000 iterations of two stages take 7 to 15 s of processor time, and 150 iterations of eight stages take 23 s.

A job of fewer than 2 000 iterations is not part of the mean: it is shorter than what its start costs pays for.

Simplifications: plans are computed at once; a lost server is replaced after four iterations, in which GPUs are at
default clocks; a checkpoint is a pause between iterations; a stall of the data loader lengthens the first pass; heat
limits a GPU to 1275 MHz or not at all; of published profiles only the times are used.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in auto mode
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.fleet_jobs import Cost, FleetJob, Goal, Machine, State, goal_in_block, set_goal  # noqa: E402
from benchmarks.fleet_reference import iteration  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402

NOTHING_TO_SAVE = 0.002
"""A job whose oracle saves at most this fraction has nothing to save."""
DROPPED_FOR = 50
"""A plan counts as dropped if the job returns to default clocks for this many iterations."""


class Moment(NamedTuple):
    """When something may happen: before iteration ``number`` of ``total``."""

    job: FleetJob
    number: int
    total: int
    random: random.Random

    @property
    def now_s(self) -> float:
        """Time since the begin of the job [s]."""
        return self.job.used().time_s

    def is_every(self, iterations: int) -> bool:
        return self.number > 0 and self.number % iterations == 0

    @property
    def third(self) -> int:
        return 3 * self.number // self.total


Trouble = Callable[[Moment], dict[str, Any] | None]
"""Does something to the job before an iteration, or returns values of its :class:`State`."""


def slowly_varying(deviation: float) -> Trouble:
    """Vary all times by a factor that changes within some 30 iterations."""
    kept = 1 - 1 / 30

    def vary(moment: Moment) -> dict[str, Any]:
        before = moment.job.state.factor - 1 if moment.number else 0.0
        step = deviation * math.sqrt(1 - kept**2) * moment.random.gauss(0, 1)
        return {"factor": 1 + kept * before + step}

    return vary


def drift(by: float, period_s: float) -> Trouble:
    """Vary all times by a sine."""
    return lambda moment: {"factor": 1 + by * math.sin(2 * math.pi * moment.now_s / period_s)}


def cool(rank: int, factor: float, until_s: float) -> Trouble:
    """Let a GPU be faster at first."""

    def be_cool(moment: Moment) -> dict[str, Any] | None:
        if moment.now_s >= until_s:
            return None
        return {"slow": tuple(factor if each == rank else 1.0 for each in range(moment.job.machine.ranks))}

    return be_cool


def heat(every_s: float) -> Trouble:
    """Limit another set of GPUs after some time, again and again."""

    def limit(moment: Moment) -> dict[str, Any]:
        period = random.Random(f"{moment.job.seed} {moment.now_s // every_s}")
        return {"hot": tuple(rank for rank in range(moment.job.machine.ranks) if period.random() < 0.5)}

    return limit


def fault(name: str, rank: int, at: int) -> Trouble:
    """Let a GPU's driver fail permanently."""
    return lambda moment: moment.job.gpus[rank].begin(name) if moment.number == at else None


def ramp(*sizes: int) -> Trouble:
    """Increase the number of micro-batches in the first half of the job."""

    def grow(moment: Moment) -> dict[str, Any]:
        step = 2 * len(sizes) * moment.number // moment.total
        return {"micro_batches": sizes[min(step, len(sizes) - 1)]}

    return grow


def random_batches(least: int, most: int) -> Trouble:
    """Draw the number of micro-batches of each iteration but the first, whose schedule the engine declares."""
    return lambda moment: {"micro_batches": moment.random.randint(least, most)} if moment.number else None


def lengths(*factors: float) -> Trouble:
    """Draw the lengths of the inputs of each iteration, independently for each pipeline."""
    return lambda moment: {"lengths": tuple(moment.random.choice(factors) for _ in range(moment.job.machine.pipelines))}


def restarts(every: int) -> Trouble:
    """End the job and start it again, again and again."""
    return lambda moment: moment.job.restart_first() if moment.is_every(every) else None


def servers_killed(every: int) -> Trouble:
    """Kill the server, which is replaced four iterations later, again and again."""

    def kill(moment: Moment) -> None:
        if moment.is_every(every):
            moment.job.lose_server()
        elif moment.number > every and moment.number % every == 4:
            moment.job.renew()

    return kill


def agent_hangs(rank: int, every: int, for_s: float) -> Trouble:
    """Let an agent see nothing for a while, again and again."""

    def hang(moment: Moment) -> None:
        moment.job.agent_link(rank).late_s = for_s if moment.is_every(every) else 0.0

    return hang


def checkpoints(every: int, for_s: float) -> Trouble:
    """Write a checkpoint between iterations, again and again."""
    return lambda moment: moment.job.pause(for_s) if moment.is_every(every) else None


def stalls(share: float, longest_s: float) -> Trouble:
    """Let some iterations wait for their data."""
    return lambda moment: {"stall_s": moment.random.uniform(0, longest_s) if moment.random.random() < share else 0.0}


def straggler(pipeline: int, factor: float) -> Trouble:
    """Let a pipeline be slower in the second third of the job."""

    def be_slow(moment: Moment) -> dict[str, Any] | None:
        stages = len(moment.job.machine.forwards_s)
        slow = (factor if rank // stages == pipeline else 1.0 for rank in range(moment.job.machine.ranks))
        return {"slow": tuple(slow)} if moment.third == 1 else None

    return be_slow


def in_second_third(goal: Goal) -> Trouble:
    """Give the job another goal for a third of its time."""
    return lambda moment: {"goal": goal} if moment.third == 1 else None


def from_iteration(number: int, goal: Goal) -> Trouble:
    """Give the job another goal from an iteration on."""
    return lambda moment: {"goal": goal} if moment.number >= number else None


def changes_delay(by_s: float, begin: int, end: int) -> Trouble:
    """Let clock changes delay passes for some iterations."""
    return lambda moment: {"change_delay_s": by_s if begin <= moment.number < end else 0.0}


@dataclass(frozen=True, init=False)
class Scenario:
    """A job and what happens to it.

    Attributes:
        name: Its name.
        troubles: What happens, in this order.
        machine: The machine, of which keyword arguments set the attributes.
        goal: The user's goal.
        iterations: Length of the job.
        seeds: Number of seeds by default: more if a wrong decision is rare and expensive.
    """

    name: str
    troubles: tuple[Trouble, ...]
    machine: Machine
    goal: Goal
    iterations: int
    seeds: int

    def __init__(
        self,
        name: str,
        *troubles: Trouble,
        goal: Goal = Goal(),  # noqa: B008
        iterations: int = 2000,
        seeds: int = 3,
        **machine: Any,
    ) -> None:
        values = {"name": name, "troubles": troubles, "machine": Machine(**machine)}
        for key, value in {**values, "goal": goal, "iterations": iterations, "seeds": seeds}.items():
            object.__setattr__(self, key, value)


def times(seconds: float) -> dict[str, Any]:
    """Return the times of the usual machine for iterations of this length [s]."""
    usual = Machine()
    factor = seconds / 1.48
    return {"forwards_s": tuple(factor * each for each in usual.forwards_s), "tail_s": factor * usual.tail_s}


# The stages of GPT-3 175B at the top clock of an A100 (tests/data/sosp24/stage_profile).
GPT3: dict[str, Any] = {
    "forwards_s": (0.0502, 0.0502, 0.0502, 0.0502, 0.0502, 0.0502, 0.0502, 0.0540),
    "backwards_s": (0.0930, 0.0930, 0.0930, 0.0930, 0.0930, 0.0930, 0.0930, 0.0989),
    "micro_batches": 24,
}
# Like Bloom 3B: its vocabulary of 250 880 words makes the last stage longer. Assumed; no profile was published.
BLOOM: dict[str, Any] = {
    "forwards_s": (0.036, 0.032, 0.032, 0.032, 0.032, 0.032, 0.032, 0.046),
    "backwards_s": (0.074, 0.070, 0.070, 0.070, 0.070, 0.070, 0.070, 0.096),
    "micro_batches": 24,
    "gpu": "a40",
}
FOUR_STAGES: dict[str, Any] = {"forwards_s": (0.05, 0.05, 0.05, 0.06), "micro_batches": 8}
TWO_LENGTHS, MANY_LENGTHS = (1.0, 1.25), tuple(0.7 + 0.05 * number for number in range(13))

SCENARIOS = (
    Scenario("quiet", noise=0.0),
    Scenario("noise 0.1 %", noise=0.001),
    Scenario("noise 0.5 %"),
    Scenario("noise 2 %", noise=0.02, seeds=6),
    Scenario("noise 3 %, four stages", **FOUR_STAGES, noise=0.03),
    Scenario("slow noise 0.1 %", slowly_varying(0.001)),
    Scenario("slow noise 0.5 %", slowly_varying(0.005)),
    Scenario("slow noise 2 %", slowly_varying(0.02), seeds=6),
    Scenario("GPT-3, 8 stages, 24 micro-batches", **GPT3, seeds=1),
    Scenario("like Bloom, 8 stages, 24 micro-batches", **BLOOM, seeds=1),
    Scenario("flat tail", tail_s=0.1, flat_above_mhz=0.0),
    Scenario("flat forward above 1000 MHz", memory_bound=(Kind.FORWARD,), flat_above_mhz=1000.0),
    Scenario("drift of 3 % in an hour", drift(0.03, 3600.0)),
    Scenario("a GPU is cool for 10 minutes", cool(1, 0.97, 600.0)),
    Scenario("heat limits change every 100 s", heat(100.0), seeds=6),
    Scenario("a counter fails", fault("counter fails", 1, 150)),
    Scenario("a counter stands still", fault("counter stands still", 1, 150)),
    Scenario("a counter of a module", module_counter=1),
    Scenario("a GPU without permission", without_permission=1),
    Scenario("ramp of the batch size", ramp(2, 3, 4, 5, 6, 7, 8, 9, 10, 12), micro_batches=2, seeds=6),
    Scenario("6 to 14 micro-batches", random_batches(6, 14), seeds=6),
    Scenario("two lengths", lengths(*TWO_LENGTHS)),
    Scenario("many lengths", lengths(*MANY_LENGTHS)),
    Scenario("two lengths, two pipelines", lengths(*TWO_LENGTHS), pipelines=2),
    Scenario("many lengths, two pipelines", lengths(*MANY_LENGTHS), pipelines=2),
    Scenario("restart every 250", restarts(250)),
    Scenario("ramp, restart every 250", ramp(2, 4, 6, 8, 10, 12), restarts(250), micro_batches=2),
    Scenario("6 to 14, restart every 300", random_batches(6, 14), restarts(300)),
    Scenario("server killed every 150", servers_killed(150)),
    Scenario("an agent hangs for 30 s every 300", agent_hangs(1, 300, 30.0)),
    Scenario("a driver takes 1 s at times", slow_driver=1),
    Scenario("marks seen 30 ms late", late_marks=1),
    Scenario("checkpoint of 60 s every 50", checkpoints(50, 60.0)),
    Scenario("20 ms between iterations", checkpoints(1, 0.02)),
    Scenario("stalls of the data loader", stalls(0.05, 1.0)),
    Scenario("stalls of up to 10 s", stalls(0.02, 10.0)),
    Scenario("clock changes delay by 0.5 ms", change_delay_s=0.0005),
    Scenario("clock changes delay by 2 ms", change_delay_s=0.002),
    Scenario("host waits after each step", launches=True, waits_for_gpu=True),
    Scenario("host runs ahead", launches=True),
    Scenario("100 iterations", iterations=100),
    Scenario("200 iterations", iterations=200),
    Scenario("500 iterations", iterations=500),
    Scenario("20 000 iterations", iterations=20_000, seeds=1),
    Scenario("iterations of 0.1 s", **times(0.1)),
    Scenario("iterations of 1 s", **times(1.0)),
    Scenario("iterations of 20 s", **times(20.0)),
    Scenario("nothing to save", forwards_s=(0.1,)),
    Scenario("a pipeline 10 % slower for a third", straggler(1, 1.1), pipelines=2),
    Scenario("3 % slower allowed", goal=Goal(max_slowdown=0.03)),
    Scenario("10 % slower allowed", goal=Goal(max_slowdown=0.1)),
    Scenario("deadline at 105 %", goal=Goal(finish_in=1.05)),
    Scenario("80 % of the power for a third", in_second_third(Goal(power=0.8))),
    Scenario(
        "another goal while a dropped plan rests",
        changes_delay(0.02, 200, 600),
        from_iteration(600, Goal(max_slowdown=0.1)),
    ),
)
# The scenario "noise 0.5 %" is the usual job: all others have this noise, unless they say otherwise.


@dataclass(frozen=True)
class Result:
    """Figures of a job. Fractions of the energy or time at default clocks, unless stated otherwise.

    Attributes:
        saved: Energy saved.
        possible: Energy that the oracle saves.
        realised: ``saved / possible``.
        late: Time in addition to what is allowed.
        slower: Time in addition to default clocks.
        under_plan: Share of iterations under a plan.
        dropped: How many times the job returned to default clocks.
        first_plan: First iteration under a plan, from 1. 0 if there is none.
        start_s: Duration of the start, before the first iteration [s].
        lost_at_start_s: Time lost until the first plan, including the start [s].
        lost_at_start: Energy not saved until the first plan, as a fraction of what the whole job could have saved.
        cpu_s: Processor time of the emulation [s].
    """

    saved: float
    possible: float
    realised: float
    late: float
    slower: float
    under_plan: float
    dropped: int
    first_plan: int
    start_s: float
    lost_at_start_s: float
    lost_at_start: float
    cpu_s: float


def run(scenario: Scenario, seed: int, iterations: int | None = None) -> Result:
    """Train a job of a scenario, and compare it with default clocks and with the oracle."""
    begun_s = time.process_time()
    source = random.Random(f"{scenario.name} {seed}")
    total = iterations or scenario.iterations
    usual = State(goal=scenario.goal)
    one = iteration(scenario.machine, usual).default
    default = Cost(total * one.time_s, total * one.energy_j)
    with tempfile.TemporaryDirectory() as folder:
        goal = goal_in_block(scenario.goal, default, total)
        job = FleetJob(Path(folder) / "job", scenario.machine, seed, usual, goal)
        at_first_plan = None
        for number in range(total):
            moment = Moment(job, number, total, source)
            state = usual
            for trouble in scenario.troubles:
                state = replace(state, **(trouble(moment) or {}))
            if state.goal != job.state.goal:
                set_goal(job, state.goal, default)
            before = job.used() if at_first_plan is None else None
            job.go(state)
            if job.under_plan[-1] and before is not None:
                at_first_plan = before
        job.settle()
        used = job.used()
        job.close()
    costs = [iteration(job.machine, state) for state in job.history]
    idle = Cost(job.idle_s, job.idle_s * job.machine.ranks * job.machine.model.blocking_power_w)
    default_s = sum(cost.default.time_s for cost in costs) + idle.time_s
    default_j = sum(cost.default.energy_j for cost in costs) + idle.energy_j
    oracle_j = sum(cost.oracle.energy_j for cost in costs) + idle.energy_j
    allowed_s = sum(cost.allowed_s(state) for state, cost in zip(job.history, costs, strict=True)) + idle.time_s
    possible_j = default_j - oracle_j
    first_plan = job.under_plan.index(True) if any(job.under_plan) else 0
    lost_s = lost_j = 0.0
    if at_first_plan is not None:
        lost_s = at_first_plan.time_s - sum(cost.default.time_s for cost in costs[:first_plan])
        lost_j = at_first_plan.energy_j - sum(cost.oracle.energy_j for cost in costs[:first_plan])
    return Result(
        saved=1 - used.energy_j / default_j,
        possible=possible_j / default_j,
        realised=(default_j - used.energy_j) / possible_j if possible_j else math.nan,
        late=(used.time_s - allowed_s) / default_s,
        slower=used.time_s / default_s - 1,
        under_plan=statistics.fmean(job.under_plan),
        dropped=_times_dropped(job.under_plan),
        first_plan=first_plan + any(job.under_plan),
        start_s=job.start_s,
        lost_at_start_s=lost_s,
        lost_at_start=lost_j / possible_j if possible_j else math.nan,
        cpu_s=time.process_time() - begun_s,
    )


def _times_dropped(under_plan: Sequence[bool]) -> int:
    since_first = under_plan[under_plan.index(True) :] if any(under_plan) else []
    lengths_without = [len(list(group)) for is_planned, group in groupby(since_first) if not is_planned]
    return sum(length >= DROPPED_FOR for length in lengths_without)


def summary(scenario: Scenario, results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of a scenario for the JSON file. Shares are fractions."""
    can_save = results[0].possible > NOTHING_TO_SAVE
    realised = [result.realised for result in results]
    return {
        "name": scenario.name,
        "iterations": scenario.iterations,
        "seeds": len(results),
        "possible": statistics.fmean(result.possible for result in results),
        "realised_mean": statistics.fmean(realised) if can_save else None,
        "realised_worst": min(realised) if can_save else None,
        "late_worst": max(result.late for result in results),
        "slower_worst": max(result.slower for result in results),
        "lost_energy": max(0.0, *(-result.saved for result in results)),
        "under_plan": statistics.fmean(result.under_plan for result in results),
        "dropped": statistics.fmean(result.dropped for result in results),
        "first_plan": max(result.first_plan for result in results),
        "start_s": statistics.fmean(result.start_s for result in results),
        "lost_at_start_s": statistics.fmean(result.lost_at_start_s for result in results),
        "lost_at_start": statistics.fmean(result.lost_at_start for result in results) if can_save else None,
        "cpu_s": sum(result.cpu_s for result in results),
    }


def mean_realised(summaries: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean over scenarios of 2 000 iterations or more. If there is none, that of the others."""
    known = [each for each in summaries if each["realised_mean"] is not None]
    long = [each["realised_mean"] for each in known if each["iterations"] >= 2000]
    chosen = long or [each["realised_mean"] for each in known]
    return statistics.fmean(chosen) if chosen else None


COLUMNS = f"{'':41}possible  realised   worst    late  under plans  dropped  first plan    CPU"


def row(each: dict[str, Any]) -> str:
    """Return the line of the table for a scenario."""
    if each["realised_mean"] is None:
        realised = f"{'loses':>9} {each['lost_energy']:7.2%}"
    else:
        realised = f"{each['realised_mean']:9.1%} {each['realised_worst']:7.1%}"
    return (
        f"{each['name']:40} {each['possible']:8.1%} {realised} {each['late_worst']:+7.2%} {each['under_plan']:12.1%} "
        f"{each['dropped']:8.1f} {each['first_plan']:11} {each['cpu_s']:4.0f} s"
    )


def main() -> None:
    """Print a line for each scenario, and the mean of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios, by default all")
    parser.add_argument("--seeds", type=int, help="seeds of each scenario, by default 1 to 6")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in arguments.only or ():
        if name not in known:
            parser.error(f"--only {name!r}: expected some of {', '.join(map(repr, known))}")
    gc.set_threshold(100_000)  # most objects live as long as the job, so looking for others often is in vain
    print("SIMULATED GPUs, in virtual time")
    print(COLUMNS, flush=True)
    summaries = []
    for name in arguments.only or known:
        scenario = known[name]
        seeds = range(arguments.first_seed, arguments.first_seed + (arguments.seeds or scenario.seeds))
        with _without_output():
            results = [run(scenario, seed) for seed in seeds]
        summaries.append(summary(scenario, results))
        print(row(summaries[-1]), flush=True)
        if arguments.json:  # after each scenario, because all of them take long
            found = {"mean_realised": mean_realised(summaries), "scenarios": summaries}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(summaries, key=loss)
    mean = mean_realised(summaries)
    if mean is not None:
        print(f"mean realised {mean:.1%}", end="; ")
    print(f"worst loss of energy or time {loss(worst):.2%} ({worst['name']})")


def loss(each: dict[str, Any]) -> float:
    """Return the loss of a scenario in energy or time, whichever is larger."""
    return float(max(each["lost_energy"], each["late_worst"]))


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


if __name__ == "__main__":
    main()
