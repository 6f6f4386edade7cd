"""Clocks that follow late: what it is worth to ask for higher clocks early.

    python benchmarks/clock_following.py --repeat 5    # about 2 minutes

One rank that never waits, on a SIMULATED A40 whose clock follows 23.5 ms after the request. Its plan has backwards at
the highest clock and forwards at a lower one, with time to change the clock and to come back. The alternative in the
same run has the same plan without durations, so that each clock is asked for when the instruction before it ends. Run
it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from job import run  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.frontier import Frontier, Provenance  # noqa: E402
from perseus_ds.artifacts.plan import FrequencyPlan  # noqa: E402
from perseus_ds.gpu.device_models import DEVICES  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402

A40 = DEVICES["a40"]
LATENCY_S = 0.0235
BACKWARD_S = 0.06
# Twelve linear layers: the first one's input needs no gradient.
TOP_CLOCK_S = {Kind.FORWARD: BACKWARD_S * 12 / 23, Kind.BACKWARD: BACKWARD_S}
LOW_MHZ, TOP_MHZ = 750, 1740
"""There is time to visit the lower clock for a forward and to come back."""
SETTLED = 3
"""Iterations after which the latency has been measured."""


def frontier() -> Frontier:
    """Return the plan."""
    (stream,) = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=4).instructions
    stream = tuple(i for i in stream if i.kind is not Kind.TAIL)
    clocks = tuple(TOP_MHZ if i.kind is Kind.BACKWARD else LOW_MHZ for i in stream)
    times_s = {
        (0, kind, clock): top_s * A40.slowdown(clock)
        for kind, top_s in TOP_CLOCK_S.items()
        for clock in (LOW_MHZ, TOP_MHZ)
    }
    time_s = sum(times_s[i.stage, i.kind, clock] for i, clock in zip(stream, clocks, strict=True))
    plan = FrequencyPlan((stream,), (clocks,), time_s, 100.0)
    provenance = Provenance(
        schedule="1f1b", micro_batches=4, stages=1, blocking_power_w=70.0, solver="none", simulated=True
    )
    return Frontier((plan,), time_s, plan, provenance, times_s)


def trained(folder: Path, plans: Frontier) -> list[dict[str, Any]]:
    """Return the records of the iterations, once the latency is known."""
    plans.save(folder / "frontier")
    simulated = {"gpu": "a40", "longest_instruction_s": BACKWARD_S, "lock_latency_s": LATENCY_S}
    block = {"mode": "run", "frontier": str(folder / "frontier"), "simulated": simulated}
    records: list[dict[str, Any]] = run(folder, 1, perseus=block, steps=20).iterations("run")
    return records[SETTLED:]


def main() -> None:
    """Run both variants in turns and print iteration times over the planned one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    early = frontier()
    ways = {"early": early, "late": dataclasses.replace(early, instruction_times_s={})}
    planned_s = early.plans[0].time_s
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    counts: dict[str, Counter[tuple[int, int]]] = {name: Counter() for name in ways}
    for _ in range(arguments.repeat):
        for name, plans in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                records = trained(Path(folder), plans)
            ratios[name].append(statistics.median(r["time_s"] for r in records) / planned_s - 1)
            counts[name].update((r["clock_changes"], r["clock_skips"]) for r in records)
    print(f"SIMULATED A40, planned iteration {planned_s:.4f} s; median (least to most) of {arguments.repeat} runs")
    for name, found in ratios.items():
        usual, times = counts[name].most_common(1)[0]
        print(
            f"  {name:6} time over planned {statistics.median(found):+.2%} ({min(found):+.2%} to {max(found):+.2%}), "
            f"{usual[0]} changes and {usual[1]} left out in {times} of {counts[name].total()} iterations"
        )
    early_s, late_s = (1 + statistics.median(ratios[name]) for name in ("early", "late"))
    print(f"  iteration time, early over late: {early_s / late_s:.3f}")


if __name__ == "__main__":
    main()
