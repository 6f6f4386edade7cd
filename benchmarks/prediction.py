"""Deviation of real ranks from the predictions of a profile and its plans, and its variation.

    python benchmarks/prediction.py                    # all cases, 3 runs each: about 15 minutes
    python benchmarks/prediction.py --case rows tail --repeat 5

DeepSpeed's engine or Megatron-Core runs on real ranks with SIMULATED GPUs, whose true times and powers are known. They
are simulated in real time, so other jobs on the machine affect the results. Use an idle machine with two cores or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]

from frontiers import MODEL, save_mixed_plan, save_true_frontier  # type: ignore[import-not-found]  # noqa: E402
from job import QUICK_PROFILE, Running, run, run_jobs, run_while  # type: ignore[import-not-found]  # noqa: E402
from run_log import events, iterations, records  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.profile import StageProfile  # noqa: E402
from perseus_ds.optimizer import optimize  # noqa: E402
from perseus_ds.optimizer.problem import problem_for  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402
from perseus_ds.pipeline.instruction import Kind  # noqa: E402
from perseus_ds.units import percent, plain  # noqa: E402

Figures = dict[str, float]
"""Deviations as fractions, by name."""

MEGATRON_JOB = Path(__file__).resolve().parents[1] / "tests" / "integration" / "megatron_job.py"
STRAGGLER = 1.2
LATER = 100_000


def profiled(folder: Path, block: dict[str, Any], job: dict[str, Any]) -> StageProfile:
    """Measure a profile on real ranks."""
    run(folder / "profile", perseus={"mode": "profile", **block}, steps=LATER, until=["observe", 1], **job)
    return StageProfile.load(folder / "profile" / "perseus")


def trained(folder: Path, steps: int, block: dict[str, Any], job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of iterations under a plan."""
    block = {"mode": "run", "frontier": str(folder / "frontier"), **block}
    return run(folder / "run", perseus=block, steps=steps, **job).iterations("run")  # type: ignore[no-any-return]


def predicted_over_measured(ran: list[dict[str, Any]]) -> Figures:
    """Return the relative deviations of the promised time and energy of all GPUs from the medians."""
    keys = {"time": "time_s", "energy": "energy_j"}
    return {what: ran[0][f"predicted_{key}"] / statistics.median(r[key] for r in ran) - 1 for what, key in keys.items()}


def rows(folder: Path) -> Figures:
    """Compare the rows of a profile with the device model: times and powers as functions of the clock."""
    job = {"ranks": 4, "stages": 2, "work": [4, 2, 2, 1]}
    profile = profiled(folder, {"profile": QUICK_PROFILE}, job)
    times, powers = [], []
    for stage, kind in profile.keys:
        if kind is Kind.TAIL:  # runs on this machine and not on a simulated GPU
            continue
        options = profile.options(stage, kind)
        top_s = options.time_s[-1] / MODEL.slowdown(int(options.clock_mhz[-1]))
        for clock, time_s, energy_j in zip(options.clock_mhz, options.time_s, options.energy_j, strict=True):
            times.append(abs(time_s / (top_s * MODEL.slowdown(int(clock))) - 1))
            powers.append(abs(energy_j / time_s / MODEL.power_w(int(clock)) - 1))
    blocking = (profile.info.blocking_power_w or 0.0) / MODEL.blocking_power_w - 1
    return {"time, worst row": max(times), "power, worst row": max(powers), "blocking power": blocking}


def mixed_plan(folder: Path, schedule: str, ranks: int, micro_batches: int) -> Figures:
    """Compare predicted and measured figures of a plan with random clocks, on unequal stages."""
    job = {"ranks": ranks, "work": [4, 2, 1, 3], "micro_batches": micro_batches, "dualpipev": schedule == "dualpipev"}
    simulated = {"simulated": {"longest_instruction_s": 0.06}}
    measured = {"min_clock_mhz": 900, "warm_up": 5}
    profile = profiled(folder, {"profile": measured, **simulated}, job)
    streams = read_schedule(schedule_class(schedule), ranks=ranks, micro_batches=micro_batches)
    save_mixed_plan(folder / "frontier", streams, profile)
    return predicted_over_measured(trained(folder, 13, simulated, job))


def megatron(folder: Path, ranks: int, **job: Any) -> Figures:
    """Compare the same for a GPT trained with Megatron-Core."""

    def train(mode: str, perseus: dict[str, Any], **more: Any) -> Path:
        # Longer than the real computation of four ranks.
        common = {"device": "simulated", "simulated": {"longest_instruction_s": 0.15}}
        block = {"mode": mode, "output_dir": str(folder / mode), **common, **perseus}
        run_jobs(folder / f"{mode} job", ranks, MEGATRON_JOB, {mode: {**job, **more, "perseus": block}})
        return folder / mode

    measured = {"min_clock_mhz": 900, "warm_up": 5}
    profile = StageProfile.load(train("profile", {"profile": measured}, until=["observe", 1]))
    assert profile.info.streams is not None
    save_mixed_plan(folder / "frontier", profile.info.streams.to_schedule(), profile)
    ran = iterations(records(train("run", {"frontier": str(folder / "frontier")}, steps=14)), "run")
    return predicted_over_measured(ran)


def tail(folder: Path) -> Figures:
    """Compare predictions with and without transfers and tails, with slow links and a long tail."""
    block = {"simulated": {"longest_instruction_s": 0.06, "transfer_s": 0.012, "tail_s": 0.12}}
    job = {"ranks": 2, "work": [4, 2, 3, 3], "micro_batches": 6}
    measured = {"min_clock_mhz": 1050, "sampling": "stride", "clock_stride": 6, "warm_up": 5}
    profile = profiled(folder, {**block, "profile": measured}, job)
    streams = read_schedule(schedule_class("1f1b"), ranks=2, micro_batches=6)
    frontier = optimize(streams, profile, plans=20)
    plan = frontier.within(0.04)
    frontier.save(folder / "frontier")
    goal = {"goal": {"max_slowdown": 0.04}}
    ran = trained(folder, 16, {**block, **goal}, job)
    passes = StageProfile([m for m in profile.measurements if m.kind is not Kind.TAIL])
    clocks = tuple(
        tuple(c for c, i in zip(clocks, stream, strict=True) if i.kind is not Kind.TAIL)
        for clocks, stream in zip(plan.clocks_mhz, plan.instructions, strict=True)
    )
    alone_s = (
        problem_for(streams, passes, blocking_power_w=profile.info.blocking_power_w or 0.0).evaluate(clocks).time_s
    )
    time = predicted_over_measured(ran)["time"]
    return {"time": time, "time, forwards and backwards alone": (1 + time) * alone_s / plan.time_s - 1}


def straggler(folder: Path) -> Figures:
    """Slow one of two pipelines down by a factor of 1.2 for a time. The plans of the other one follow it."""
    save_true_frontier(folder / "frontier", forward_s=0.03)
    numbers: dict[str, int] = {}

    def during(job: Running) -> None:
        def note(name: str, least: int) -> None:
            job.wait_for(lambda records: len(iterations(records)) >= least)
            numbers[name] = len(iterations(job.wait_for(lambda records: records)))

        note("slow", 20)
        job.order("slow")
        job.wait_for(lambda records: [r for r in events(records, "plan") if r["straggler"] == 1])
        note("followed", 0)
        note("healthy", numbers["followed"] + 30)
        job.order("slow", False)
        job.wait_for(lambda records: events(records, "plan")[-1]["straggler"] is None)
        note("back", 0)
        note("end", numbers["back"] + 12)

    simulated = {"longest_instruction_s": 0.06}
    block = {"mode": "run", "frontier": str(folder / "frontier"), "simulated": simulated}
    job = {"stages": 2, "work": [3] * 4, "slow_pipeline": {"pipeline": 1, "factor": STRAGGLER}}
    records = run_while(during, folder / "job", 4, perseus=block, **job).iterations("run")

    def typical(begin: int, end: int, value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(r) for r in records if begin < r["iteration"] <= end)

    def healthy_j(record: dict[str, Any]) -> float:
        return float(record["energy_by_pipeline_j"][0])

    followed, healthy = numbers["followed"] + 3, numbers["healthy"]
    before_s = typical(3, numbers["slow"], lambda r: r["time_s"])
    return {
        "time while following, over 1.2": typical(followed, healthy, lambda r: r["time_s"]) / before_s / STRAGGLER - 1,
        "energy predicted while following": typical(
            followed, healthy, lambda r: r["predicted_energy_j"] / r["energy_j"] - 1
        ),
        "energy of the healthy pipeline, following over not": typical(followed, healthy, healthy_j)
        / typical(3, numbers["slow"], healthy_j)
        - 1,
        "time after it, over before": typical(numbers["back"] + 3, LATER, lambda r: r["time_s"]) / before_s - 1,
        "iterations until it is followed": float(numbers["followed"] - numbers["slow"]),
    }


CASES: dict[str, Callable[[Path], Figures]] = {
    "rows": rows,
    "1f1b": lambda folder: mixed_plan(folder, "1f1b", ranks=4, micro_batches=8),
    "dualpipev": lambda folder: mixed_plan(folder, "dualpipev", ranks=2, micro_batches=4),
    "tail": tail,
    "straggler": straggler,
    # The stages of examples/megatron: the last one has the head as well.
    "megatron": lambda folder: megatron(folder, ranks=2, stages=2, layers=5, first_layers=3),
    "megatron-4": lambda folder: megatron(folder, ranks=4, stages=4, layers=7, first_layers=1, micro_batches=8),
    "megatron-interleaved": lambda folder: megatron(folder, ranks=2, stages=2, chunks=2),
    "megatron-combined": lambda folder: megatron(
        folder, ranks=4, stages=2, chunks=2, experts=4, expert=2, combined=True
    ),
}


def main() -> None:
    """Run the cases and print each figure's median and range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"Real ranks, SIMULATED GPUs; median (least to most) of {arguments.repeat} runs")
    for name in arguments.case:
        found: dict[str, list[float]] = {}
        for _ in range(arguments.repeat):
            with tempfile.TemporaryDirectory() as folder:
                for what, value in CASES[name](Path(folder)).items():
                    found.setdefault(what, []).append(value)
        for what, values in found.items():
            figures = [f(values) for f in (statistics.median, min, max)]
            counts = what.startswith("iterations")
            median, least, most = (f"{figure:.0f}" if counts else plain(percent(figure, 2)) for figure in figures)
            print(f"  {name:20} {what:52} {median:>8} ({least} to {most})", flush=True)


if __name__ == "__main__":
    main()
