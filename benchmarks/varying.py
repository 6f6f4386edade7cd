"""Compares auto mode with default clocks for numbers of micro-batches that vary, on SIMULATED GPUs.

    python benchmarks/varying.py                # 1 minute

The job has four unequal stages on SIMULATED A100s in virtual time, and the real runtime. It trains with 8 and 4
micro-batches alternately, and with 2, 4, 6 and 8, each for a quarter of the job, as in a warm-up of the batch size. In
the first case the last 100 of 500 iterations are compared with those of the same job in observe mode, in the second
case all of them. Energies are the true ones of the simulated GPUs.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from virtual.job import VirtualJob  # type: ignore[import-not-found]  # noqa: E402

from perseus_ds.artifacts.run_iterations import Sums  # noqa: E402
from perseus_ds.pipeline.commands import read_schedule, schedule_class  # noqa: E402

ITERATIONS, COMPARED = 500, 100
STAGES_S = (0.036, 0.034, 0.034, 0.05)


def _figures(sums: Sums) -> str:
    assert sums.saved is not None
    assert sums.slowdown is not None
    return f"energy {-sums.saved:+7.1%}   time {sums.slowdown:+6.1%}"


def main() -> None:
    """Print the savings of auto mode with varying numbers of micro-batches."""
    for name, counts, compared in (
        ("8 and 4 in turns, the last 100", [8, 4] * (ITERATIONS // 2), COMPARED),
        ("2, 4, 6 and 8, all 500", np.repeat([2, 4, 6, 8], ITERATIONS // 4).tolist(), ITERATIONS),
    ):
        jobs = {}
        for mode in ("observe", "auto"):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                jobs[mode] = job = VirtualJob(Path(folder), stages_s=STAGES_S, micro_batches=counts[0], mode=mode)
                for count in counts:
                    job.schedule = read_schedule(schedule_class("1f1b"), ranks=len(STAGES_S), micro_batches=count)
                    job.train()
                job.close()
        (time_s, energy_j), (default_s, default_j) = (
            np.sum([taken[1:] for taken in jobs[mode].taken[-compared:]], axis=0) for mode in ("auto", "observe")
        )
        phases = Counter(phase for phase, _, _ in jobs["auto"].taken)
        saving = Sums(compared_s=time_s, compared_j=energy_j, default_s=default_s, default_j=default_j)
        print(f"{name}: {_figures(saving)}   of all, {', '.join(f'{n} {phase}' for phase, n in phases.items())}")


if __name__ == "__main__":
    main()
