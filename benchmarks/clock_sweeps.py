"""Compares the clock model and simulated GPUs with published measurements at locked clocks.

    python benchmarks/clock_sweeps.py                                # reads ../shared/data/clock_sweeps
    python benchmarks/clock_sweeps.py --sweeps FOLDER

Reads ``firestarter.csv`` (matrix multiplication on A100, A40, H100, H200) and ``amber.csv`` (molecular dynamics on A100
and H100). These measurements have no licence that allows copying them. The README of the folder names their source.

The clock model of the profiler receives a third of the clocks of each sweep, at least 4: the lowest, the highest, and
one of each group of neighbouring clocks between them, in all combinations. It predicts time and power at the others.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perseus_ds.profiler.estimates import estimate_curves
from perseus_ds.profiler.physical_model import Series
from perseus_ds.simulation.device_models import DEVICES, Workload

Floats = npt.NDArray[np.float64]
SWEEPS = Path(__file__).resolve().parents[2] / "shared" / "data" / "clock_sweeps"
MODELS = {"A100": "a100-sxm", "A40": "a40", "H100": "h100-sxm", "H200": "h200"}


@dataclass(frozen=True)
class Sweep:
    """One GPU under one load, at one locked clock after the other.

    Attributes:
        gpu: Name of the GPU in the file.
        load: Description of the program.
        clock_mhz: Clocks, ascending, shape (n,) [MHz].
        time_s: Time of a unit of work, shape (n,) [s].
        power_w: Power, shape (n,) [W].
        is_limited: Whether the power limit kept the clock lower, shape (n,).
    """

    gpu: str
    load: str
    clock_mhz: Floats
    time_s: Floats
    power_w: Floats
    is_limited: npt.NDArray[np.bool_]


def read_sweeps(folder: Path) -> list[Sweep]:
    """Return all sweeps of the folder."""
    sweeps = []
    for file, load in (("firestarter.csv", "matrix products"), ("amber.csv", "molecular dynamics")):
        with (folder / file).open(encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            own = sorted((row for row in rows if row["gpu"] == gpu), key=lambda row: int(row["clock_mhz"]))
            lowest_mhz = DEVICES[MODELS[gpu]].lowest_clock_mhz
            times_s = [1 / float(row["gflops"]) if "gflops" in row else float(row["ms_per_step"]) / 1e3 for row in own]
            sweeps.append(
                Sweep(
                    gpu,
                    load,
                    # The H100 of amber.csv ran at its lowest clock when 210 MHz were requested.
                    np.array([max(float(row["clock_mhz"]), lowest_mhz) for row in own]),
                    np.array(times_s),
                    np.array([float(row["power_w"]) for row in own]),
                    np.array([row.get("limited_by") == "power" for row in own]),
                )
            )
    return sweeps


def prediction_errors(sweep: Sweep, *, below_limit: bool) -> tuple[list[float], list[float]]:
    """Return the relative errors of time and power at omitted clocks, for all choices of a third.

    Args:
        sweep: The measurements.
        below_limit: Whether to use only the clocks that the power limit permits, and the lowest one above them.
    """
    limited = np.flatnonzero(sweep.is_limited)
    count = limited[0] + 1 if below_limit and len(limited) else len(sweep.clock_mhz)
    groups = np.array_split(np.arange(1, count - 1), max(4, round(count / 3)) - 2)
    times, powers = [], []
    for inner in itertools.product(*(group.tolist() for group in groups)):
        kept = [0, *inner, count - 1]
        left_out = [index for index in range(count) if index not in kept]
        unknown = np.full(len(kept), np.nan)
        clocks = sweep.clock_mhz[kept]
        (time,), (power,) = estimate_curves(
            [Series(clocks, sweep.time_s[kept], unknown)],
            [Series(clocks, sweep.power_w[kept], unknown)],
            sweep.clock_mhz[left_out],
        )
        times += np.abs(time.value / sweep.time_s[left_out] - 1).tolist()
        powers += np.abs(power.value / sweep.power_w[left_out] - 1).tolist()
    return times, powers


def device_errors(sweep: Sweep) -> tuple[float, list[float], list[float]]:
    """Return the fitted dynamic power of the load, and the errors of time and power of a simulated GPU.

    Fitted are the dynamic power of the load, relative to the passes for which the device model was made, and the share
    of time that scales with the clock. Clocks at the power limit are omitted, because the limit differs between boards.
    """
    model = DEVICES[MODELS[sweep.gpu]]
    free = ~sweep.is_limited
    clocks = sweep.clock_mhz[free].tolist()
    dynamic_w = np.array([model.unlimited_power_w(c, Workload(1.0, 1.0)) for c in clocks]) - model.static_power_w
    weight = 1 / sweep.power_w[free]
    share = float(
        np.linalg.lstsq((dynamic_w * weight)[:, None], (sweep.power_w[free] - model.static_power_w) * weight)[0][0]
    )
    power_w = model.static_power_w + share * dynamic_w
    terms = np.column_stack([np.ones(len(clocks)), model.top_clock_mhz / np.array(clocks)]) / sweep.time_s[free, None]
    parts = np.linalg.lstsq(terms, np.ones(len(clocks)))[0]
    return (
        share,
        np.abs(terms @ parts - 1).tolist(),
        np.abs(power_w / sweep.power_w[free] - 1).tolist(),
    )


def describe(errors: list[float]) -> str:
    """Return the mean and the maximum of errors as text."""
    return f"{statistics.mean(errors):6.2%} {max(errors):6.1%}"


def main() -> None:
    """Print the errors of each GPU and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=Path, default=SWEEPS, help="folder with firestarter.csv and amber.csv")
    arguments = parser.parse_args()
    if not arguments.sweeps.is_dir():
        raise SystemExit(f"{arguments.sweeps} does not exist. Give the folder of the measurements with --sweeps.")
    sweeps = read_sweeps(arguments.sweeps)
    print("Clock model given a third of the clocks; errors at the rest, mean and worst")
    print(f"{'':27} {'up to the power limit':^31} {'all clocks':^31}")
    print(f"{'GPU, load':27} {'time':^15} {'power':^15} {'time':^15} {'power':^15}")
    for sweep in sweeps:
        cells = [describe(e) for below in (True, False) for e in prediction_errors(sweep, below_limit=below)]
        print(f"{sweep.gpu:5} {sweep.load:20} {'   '.join(cells)}")
    print("\nSIMULATED GPUs against real ones, below the power limit; mean and worst error")
    print(f"{'GPU, load':27} {'time':^15} {'power':^15} dynamic power of the load, relative to a pass")
    for sweep in sweeps:
        share, times, powers = device_errors(sweep)
        print(f"{sweep.gpu:5} {sweep.load:20} {describe(times)}   {describe(powers)}   {share:.2f}")


if __name__ == "__main__":
    main()
