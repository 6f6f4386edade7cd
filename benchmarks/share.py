"""Three jobs under one power limit, on SIMULATED GPUs in virtual time: ``perseus-ds share`` against fixed shares.

    python benchmarks/share.py

The jobs run the real runtime: four A100s, two H100s and two A40s in pipelines whose stages differ. Each profiles
itself once. Then all run at the same time under each limit and each rule: caps by ``perseus-ds share``, equal caps,
and caps in proportion to the powers at default clocks. After two minutes the job on H100s ends, two minutes later it
comes back, and two more minutes later the run is over. The speed of a job is its iterations in a time, over those
that default clocks would make. The exit code is 1 where the mean power of all under caps by ``share`` is more than 2
% above the limit in any ten seconds but those in which a job begins.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from virtual.job import VirtualJob, WorkerAtOnce  # type: ignore[import-not-found]  # noqa: E402
from virtual.time import VirtualTime  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.frontier import Frontier  # noqa: E402
from perseus_ds.policy.share import CAP_FILE, Share, SharingJob  # noqa: E402

JOBS: dict[str, dict[str, Any]] = {
    "a100": {"device": "a100-sxm", "stages_s": (0.05, 0.06, 0.055, 0.045), "micro_batches": 6},
    "h100": {"device": "h100-sxm", "stages_s": (0.08, 0.06), "micro_batches": 5},
    "a40": {"device": "a40", "stages_s": (0.1, 0.08), "micro_batches": 4},
}
COMES_AND_GOES = "h100"
PART_S = 120.0
SETTLING_S = 20.0
WINDOW_S = 10
MOST_ABOVE = 0.02


@dataclass
class Known:
    """What a job's profile says, and what its GPUs draw at default clocks by it."""

    frontier: Path
    default_s: float
    default_w: float
    least_w: float


@dataclass
class Run:
    """What came of one limit and one rule.

    Attributes:
        ended_s: By job, when each iteration ended [s].
        energies_j: What all GPUs had used at each second since the beginning [J].
        began_s: When the job that comes and goes began again [s].
        said: What ``share`` said.
    """

    ended_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in JOBS})
    energies_j: list[float] = field(default_factory=list)
    began_s: float = 0.0
    said: list[str] = field(default_factory=list)

    def speed(self, name: str, part: int, default_s: float) -> float:
        begin_s, end_s = part * PART_S + SETTLING_S, (part + 1) * PART_S
        ended = [moment for moment in self.ended_s[name] if begin_s <= moment <= end_s]
        return (len(ended) - 1) * default_s / (ended[-1] - ended[0]) if len(ended) > 1 else 0.0

    def powers_w(self, begin_s: float, end_s: float) -> list[float]:
        """Return the mean powers over ten seconds, of each that lies between two times [W]."""
        last = min(int(end_s), len(self.energies_j) - 1)
        return [
            (self.energies_j[begin + WINDOW_S] - self.energies_j[begin]) / WINDOW_S
            for begin in range(int(begin_s), last - WINDOW_S + 1)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="+", type=float, default=[0.95, 0.88, 0.8], help="of the default power")
    parser.add_argument("--say", action="store_true", help="print what share says")
    arguments = parser.parse_args()
    logging.getLogger("perseus_ds").setLevel(logging.ERROR)
    is_kept = True
    with tempfile.TemporaryDirectory() as folder, patch("perseus_ds.runtime.frontiers.OptimizeWorker", WorkerAtOnce):
        known = {name: profiled(Path(folder) / "profiles" / name, job) for name, job in JOBS.items()}
        default_w = sum(job.default_w for job in known.values())
        print("SIMULATED; at default clocks, and at the plan that draws least:")
        for name, job in known.items():
            print(f"  {name:5} {job.default_s:.3f} s an iteration, {job.default_w:.0f} W, {job.least_w:.0f} W")
        for number, fraction in enumerate(arguments.limits):
            limit_w = fraction * default_w
            rules: dict[str, Callable[[Known], float] | None] = {
                "share": None,
                "equal": lambda job, limit_w=limit_w: limit_w / len(JOBS),  # type: ignore[misc]
                "proportional": lambda job, fraction=fraction: fraction * job.default_w,  # type: ignore[misc]
            }
            runs = {
                rule: run(Path(folder) / f"{number}-{rule}", known, limit_w, cap_of) for rule, cap_of in rules.items()
            }
            is_kept &= show(known, limit_w, fraction, runs)
            if arguments.say:
                print("\n".join(f"    {text}" for text in runs["share"].said))
    return 0 if is_kept else 1


def profiled(folder: Path, settings: dict[str, Any]) -> Known:
    """Let a job profile itself, and return what it found."""
    job = VirtualJob(folder, mode="auto", **settings)
    job.train_until("run")
    job.close()
    frontier = Frontier.load(folder)
    baseline, last = frontier.baseline, frontier.plans[-1]
    return Known(folder, baseline.time_s, baseline.mean_power_w, last.mean_power_w)


def run(folder: Path, known: dict[str, Known], limit_w: float, cap_of: Callable[[Known], float] | None) -> Run:
    """Run all jobs under a limit; without fixed caps, share gives them."""
    time, result = VirtualTime(), Run()
    begin_s, end_s = time.now_s(), time.now_s() + 3 * PART_S
    jobs: dict[str, Any] = {}
    for name in JOBS:
        (folder / name).mkdir(parents=True)
    if cap_of is None:
        sharing = [SharingJob(folder / name) for name in JOBS]
        share = Share(
            sharing, limit_w, lambda text: result.said.append(f"{time.now_s() - begin_s:5.0f} s  {text}"), time
        )
        share.step()
    else:
        for name in JOBS:
            (folder / name / CAP_FILE).write_text(f"{cap_of(known[name]):.1f}\n")

    def start(name: str) -> None:
        policy = {"name": "power_cap", "signal": str(folder / name / CAP_FILE)}
        block = {"mode": "run", "frontier": str(known[name].frontier), "policy": policy}
        jobs[name] = VirtualJob(folder / name, time=time, **JOBS[name], **block)

    def train(name: str, until_s: float) -> None:
        while time.now_s() < until_s:
            jobs[name].train()
            result.ended_s[name].append(time.now_s() - begin_s)

    def live(name: str) -> None:
        start(name)
        if name == COMES_AND_GOES:
            train(name, begin_s + PART_S)
            jobs[name].close()
            used_j.append(energy_of(jobs[name]))
            time.sleep(begin_s + 2 * PART_S - time.now_s())
            start(name)
            result.began_s = time.now_s() - begin_s
        train(name, end_s)
        jobs[name].close()

    used_j: list[float] = []

    def every_second(do: Callable[[], None]) -> None:
        while time.now_s() < end_s:
            do()
            time.sleep(1.0)

    def energy_of(job: Any) -> float:
        return float(sum(gpu.true_energy_j for gpu in job.gpus))

    def add_energy() -> None:
        present_j = sum(energy_of(job) for name, job in jobs.items() if not is_away(name))
        result.energies_j.append(present_j + sum(used_j))

    def share_limit() -> None:
        for name, job in jobs.items():
            if not is_away(name):
                job.runtime.carry_out({"command": "status"})  # records are written in real time: wait for them
        share.step()

    def is_away(name: str) -> bool:
        return name == COMES_AND_GOES and bool(used_j) and not result.began_s

    threads = [time.thread(lambda name=name: live(name), name) for name in JOBS]
    threads.append(time.thread(lambda: every_second(add_energy), "energy"))
    if cap_of is None:
        threads.append(time.thread(lambda: every_second(share_limit), "share"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def show(known: dict[str, Known], limit_w: float, fraction: float, runs: dict[str, Run]) -> bool:
    """Print what came of a limit; return whether share has kept it."""
    print(f"\nlimit {limit_w:.0f} W, {fraction:.0%} of the power at default clocks")
    sums: dict[str, list[float]] = {}
    for rule, done in runs.items():
        speeds = [{n: done.speed(n, part, job.default_s) for n, job in known.items()} for part in range(3)]
        sums[rule] = [sum(of_part.values()) for of_part in speeds]
        text = ", ".join(f"{name} {speed:.3f}" for name, speed in speeds[0].items())
        first, second, third = sums[rule]
        settled = [*done.powers_w(SETTLING_S, done.began_s), *done.powers_w(done.began_s + SETTLING_S, 3 * PART_S)]
        beginning = [*done.powers_w(0, SETTLING_S), *done.powers_w(done.began_s, done.began_s + SETTLING_S)]
        print(
            f"  {rule:12} {text}; sum {first:.3f}, with two jobs {second:.3f}, again {third:.3f}; "
            f"most in 10 s {max(settled) / limit_w - 1:+.1%}, as jobs begin {max(beginning) / limit_w - 1:+.1%}"
        )
    for rule in ("equal", "proportional"):
        ratios = [ours / theirs for ours, theirs in zip(sums["share"], sums[rule], strict=True)]
        print(f"  share over {rule}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    ours = runs["share"]
    settled = [*ours.powers_w(SETTLING_S, ours.began_s), *ours.powers_w(ours.began_s + SETTLING_S, 3 * PART_S)]
    return max(settled) <= (1 + MOST_ABOVE) * limit_w


if __name__ == "__main__":
    sys.exit(main())
