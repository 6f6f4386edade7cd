"""Time from a command that limits power until the power is reduced, in a real job on SIMULATED GPUs.

    python benchmarks/power_order.py                      # about 3 minutes
    python benchmarks/power_order.py --micro-batches 32   # iterations four times as long

Two pipelines of two stages: four DeepSpeed ranks on this machine, with simulated A100s. Their energy counters are
refreshed every 20 ms, so that the power over a second is known to 0.4 %. The table shows the seconds from the start of
the command until

- *noticed*: the job has received the command,
- *decided*: rank 0 has chosen the plan,
- *in force*: the next iteration of all ranks runs under it,
- *power*: a second begins in which the mean power is at most 2 % above the limit. According to the records, these are
  whole iterations that take at least a second.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "support")]

from frontiers import save_true_frontier  # type: ignore[import-not-found]  # noqa: E402
from job import Running, run_while  # type: ignore[import-not-found]  # noqa: E402
from run_log import events, iterations  # type: ignore[import-not-found]  # noqa: E402

Record = dict[str, Any]
RANKS, STAGES = 4, 2
BACKWARD_S = 0.06
ALLOWED = 1.02
LASTS_S = 12.0


def first_second_below(found: list[Record], watts: float, after: float) -> float | None:
    """Return the begin of the first second with at most the given mean power. None if there is none yet."""
    ran = [record for record in iterations(found) if record["ended"] - record["time_s"] >= after]
    for first, begin in enumerate(ran):
        time_s = energy_j = 0.0
        for record in ran[first:]:
            time_s, energy_j = time_s + record["time_s"], energy_j + record["energy_j"]
            if time_s >= 1.0:
                break
        if time_s >= 1.0 and energy_j / time_s <= ALLOWED * watts:
            return float(begin["ended"] - begin["time_s"])
    return None


def watch(job: Running, ordered: float, title: str) -> None:
    """Wait until the ordered power is reached, and print the time of each step."""

    def reached(found: list[Record]) -> tuple[list[Record], float, float] | None:
        caps = [event for event in events(found, "cap") if event["time"] >= ordered and event["watts"]]
        below = first_second_below(found, caps[0]["watts"], ordered) if caps else None
        return (found, caps[0]["time"], below) if below is not None else None

    found, decided, begins = job.wait_for(reached)
    commands = [event["time"] for event in events(found, "command") if event["time"] >= ordered]
    in_force = next((event["time"] for event in events(found, "plan") if event["time"] >= decided), None)
    steps = {"noticed": commands[0] if commands else None, "decided": decided, "in force": in_force, "power": begins}
    figures = "".join("         -" if at is None else f"{at - ordered:10.2f}" for at in steps.values())
    print(f"{title:24}{figures}", flush=True)


def by_command(job: Running, fraction: float) -> str:
    """Limit the power by a command, and return its answer."""
    command = [sys.executable, "-m", "perseus_ds", "control", "set", str(job.folder / "perseus")]
    arguments = ["--power-fraction", f"{fraction}", "--until", f"{LASTS_S}s"]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def returned(job: Running, after: float) -> None:
    """Wait until the job has run as before for several iterations."""

    def has(found: list[Record]) -> bool:
        ends = [event for event in events(found, "cap") if event["time"] > after]
        last = iterations(found)[-5:]
        return bool(ends) and not ends[-1]["watts"] and len({r["plan"] for r in last}) == 1 and last[0]["plan"] == 0

    job.wait_for(has)


def main() -> None:
    """Give the commands to one job and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_true_frontier(
            folder / "frontier", stages=STAGES, micro_batches=arguments.micro_batches, forward_s=BACKWARD_S / 2
        )

        def during(job: Running) -> None:
            # By then, default clocks have been measured in the job.
            ran = job.wait_for(lambda found: [r for r in iterations(found, "run") if r["default_measured"]][5:])
            print(f"iterations of {ran[-1]['time_s']:.2f} s; seconds from the command until it is")
            print(f"{'':24}" + "".join(f"{step:>10}" for step in ("noticed", "decided", "in force", "power")))
            for number in range(arguments.times):
                fraction = 0.8 - 0.02 * number
                ordered = time.time()
                answer = by_command(job, fraction)
                watch(job, ordered, f"{fraction:.0%}")
                if number == 0:
                    print(f"  answered: {answer}")
                returned(job, ordered)

        run_while(
            during,
            folder / "job",
            RANKS,
            stages=STAGES,
            micro_batches=arguments.micro_batches,
            perseus={
                "mode": "run",
                "frontier": str(folder / "frontier"),
                "simulated": {"longest_instruction_s": BACKWARD_S, "counter_period_s": 0.02, "lock_latency_s": 0.015},
            },
        )


if __name__ == "__main__":
    main()
