"""Measures ``run.jsonl`` of a long job with many ranks: bytes, and the time and memory of a report.

    python benchmarks/records.py --days 30

Records are synthetic. They are written as a job writes them, with iterations that are summed up, and the first day also
without. Times are given relative to those of reading each iteration of a day.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from perseus_ds.artifacts.run_events import PlanJudged, Started
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import Record, to_line
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.progress.facts import facts_of
from perseus_ds.progress.thinning import KEPT, MORE, summed
from perseus_ds.report.inputs import read_run
from perseus_ds.server.recorder import lists_every

RANKS, PIPELINES = 10_240, 160
ITERATION_S = 0.5
_DRAW = random.Random(0)
# As random values, without the time to draw them.
_BY_RANK = tuple(round(_DRAW.uniform(50_000.0, 60_000.0), 3) for _ in range(RANKS))
_BY_PIPELINE = tuple(round(_DRAW.uniform(100_000.0, 120_000.0), 3) for _ in range(PIPELINES))
_CLOCKS = (1305,) * RANKS


def records(iterations: int) -> Iterator[Record]:
    """Yield the records of a job, with an event every half hour."""
    yield Started(time=1.0, mode="auto", ranks=RANKS, pipelines=PIPELINES, micro_batches=256)
    for number in range(1, iterations + 1):
        trial = TrialState(
            pairs=number // 100, verdict="good", slowdown=0.001, slowdown_error=0.002, saved=0.12, saved_error=0.003
        )
        is_planned = number % 50 > 5
        ranks, pipelines = number % lists_every(RANKS) == 0, number % lists_every(PIPELINES) == 0
        yield IterationRecord(
            iteration=number,
            ended=1.8e9 + ITERATION_S * number,
            phase="run" if is_planned else "default",
            plan=12 if is_planned else None,
            time_s=round(_DRAW.gauss(ITERATION_S, 0.002), 6),
            energy_j=round(_DRAW.gauss(1.8e6, 1e4), 6),
            energy_by_pipeline_j=_BY_PIPELINE if pipelines else None,
            energy_by_rank_j=_BY_RANK if ranks else None,
            predicted_time_s=0.500123,
            predicted_energy_j=1_810_123.123456,
            default_time_s=0.500321,
            default_energy_j=2_010_123.123456,
            default_measured=True,
            tokens=4_194_304,
            trial=trial if is_planned else None,
            drift=0.0123,
            clock_changes=120_000,
            clocks_asked_mhz=_CLOCKS if ranks else None,
            clocks_reached_mhz=_CLOCKS if ranks else None,
        )
        if number % 3600 == 0:
            yield PlanJudged(time=1.8e9 + ITERATION_S * number, plan=12, kept=True, trial=trial)


def as_written(iterations: int) -> Iterator[Record]:
    """Yield the records in the file of a job shortly before its first iterations are summed up again."""
    every = records(iterations)
    kept = min(iterations, KEPT + MORE)
    yield from summed(_up_to(every, iterations - kept))
    yield from every


def _up_to(every: Iterator[Record], iterations: int) -> Iterator[Record]:
    """Yield the records up to a number of iterations."""
    while iterations:
        record = next(every)
        iterations -= isinstance(record, IterationRecord)
        yield record


def measured(folder: Path, written: Iterator[Record]) -> tuple[int, float]:
    """Write records, and return the bytes of the file and the processor time of reading it for a report [s]."""
    with (folder / "run.jsonl").open("w") as file:
        file.writelines(map(to_line, written))
    began_s = time.process_time()
    job = read_run(folder).job
    facts_of(job, "job", 1.8e9)
    read_s = time.process_time() - began_s
    saving = job.under_plans
    print(f"  {job.total().iterations} iterations, {saving.in_words() if saving is not None else 'no saving'}")
    return (folder / "run.jsonl").stat().st_size, read_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30.0)
    days = parser.parse_args().days
    of_day = round(86_400 / ITERATION_S)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{RANKS} ranks, {PIPELINES} pipelines, iterations of {ITERATION_S} s:")
        bytes_, every_s = measured(folder, records(of_day // 8))
        print(f"a day of single iterations: {8 * bytes_ / 1e9:.3f} GB (from three hours)")
        bytes_, read_s = measured(folder, as_written(round(days * of_day)))
        most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{days:g} days as written: {bytes_ / 1e9:.3f} GB")
        print(f"time to read: {read_s / (8 * every_s):.3f} of that of a day of single iterations")
        print(f"time to read: {read_s:.1f} s of a processor; largest memory {most_mib:.0f} MiB")


if __name__ == "__main__":
    main()
