"""Compares predicted and measured time and energy of a proposed layout, with Megatron-Core.

    python benchmarks/balance.py                      # four ranks, about 6 minutes on two cores
    python benchmarks/balance.py --ranks 2            # two ranks, which require two layouts, about 5 minutes

`examples/megatron/train.py` trains a GPT with a head that costs as much as several layers, on gloo ranks with
*simulated* A100s of a fixed number of operations per second. It trains with equally many layers on each stage in
profile mode, `perseus-ds partition` proposes a layout, and it trains with that layout in the same way. Times and
energies are those of a typical iteration in observe mode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from perseus_ds.cli.inputs import measured_job
from perseus_ds.errors import ConfigError
from perseus_ds.layouts.balance import Balance, MeasuredJob
from perseus_ds.layouts.notations import megatron_layout
from perseus_ds.report.inputs import read_run

_FLOPS_PER_S = 2.5e9
"""So slow that two cores compute for less than half of the time."""
_ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--keep", type=Path, help="folder for what the jobs write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        compare(arguments.keep or Path(temporary), arguments)


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    """Train with the uniform layout and with the proposed one, and print both."""
    train(folder / "uniform", None, arguments)
    job = job_in(folder / "uniform")
    try:
        balance = Balance(job)
    except ConfigError as error:  # two ranks do not suffice to distinguish embedding, layers and head
        print(error)
        second = str(error).split("'")[1]
        train(folder / "second", second, arguments)
        balance = Balance(job, [job_in(folder / "second")])
    found = balance.partition({"today": job.layout.cut})
    today, proposed = found.known["today"], found.most_frugal
    better = job.layout.cut_into(proposed.cut)
    train(folder / "proposed", megatron_layout(better), arguments)
    print("| layout | iteration, predicted | measured | | energy, predicted | measured | |")
    print("|---|---|---|---|---|---|---|")
    measured = []
    for name, layout, each in (("uniform", job.layout, today), ("proposed", better, proposed)):
        time_s, energy_j = measured_in(folder / name)
        measured.append((time_s, energy_j))
        time_error, energy_error = balance.errors((1.0, each))
        print(
            f"| `{megatron_layout(layout)}` | {each.time_s:.3f} ± {time_error:.3f} s | {time_s:.3f} s | "
            f"{each.time_s / time_s - 1:+.1%} | {each.energy_j:.0f} ± {energy_error:.0f} J | {energy_j:.0f} J | "
            f"{each.energy_j / energy_j - 1:+.1%} |"
        )
    (before_s, before_j), (after_s, after_j) = measured
    print(
        f"change: time {proposed.time_s / today.time_s - 1:+.1%} predicted, {after_s / before_s - 1:+.1%} measured; "
        f"energy {proposed.energy_j / today.energy_j - 1:+.1%} predicted, {after_j / before_j - 1:+.1%} measured"
    )


def train(output: Path, layout: str | None, arguments: argparse.Namespace) -> None:
    """Train the example under Perseus in profile mode."""
    block = {
        "enabled": True,
        "mode": "profile",
        "device": "simulated",
        "simulated": {"flops_per_s": _FLOPS_PER_S},
        "output_dir": str(output),
    }
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.ranks)]
    words += ["-m", "perseus_ds.launch", str(_ROOT / "examples/megatron/train.py"), "--log-every", "1000"]
    words += ["--layers", str(arguments.layers), "--vocabulary", str(arguments.vocabulary)]
    words += ["--steps", str(arguments.steps), *([] if layout is None else ["--layout", layout])]
    environment = {"PERSEUS": json.dumps(block), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    subprocess.run(words, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)


def job_in(folder: Path) -> MeasuredJob:
    return measured_job(folder, schedule=None, micro_batches=None, blocking_power_w=None)


def measured_in(folder: Path) -> tuple[float, float]:
    """Return time [s] and energy [J] of a mean iteration in observe mode."""
    mean = read_run(folder).job.at_default_clocks.mean()
    return mean.time_s, mean.energy_j


if __name__ == "__main__":
    main()
