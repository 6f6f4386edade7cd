"""Effects of faults on a long job, on SIMULATED GPUs and on stubs of GPUs, by cause.

    python benchmarks/soak.py                            # both parts, an hour in all
    python benchmarks/soak.py --part virtual --minutes 600 --seed 3
    python benchmarks/soak.py --part real --minutes 10

`virtual`: four ranks in virtual time, so that hours of the job take minutes. Passes only take time and compute nothing.
Drivers refuse, hang and recover, the energy counter fails or stalls, ranks are slow, times drift, orders
arrive, and the job is restarted. `--minutes` is the duration of the job.

`real`: four DeepSpeed ranks on this machine, with the real pynvml on a stub driver. Drivers refuse and hang, the disk
is full, orders arrive, and ranks are killed and restarted from a checkpoint. `--minutes` is real time.

All faults are determined by the seed. The following promises are checked:

- Losses at every step equal those of the job without Perseus and without faults.
- Each rank warns at most once for a fault.
- The job runs under a plan again after each temporary fault.
- GPUs run at default clocks after a permanent fault and after a kill.

The exit code is 1 if one of them is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), *(str(TESTS / folder) for folder in ("support", "server", "integration"))]

from hostile_day import HostileDay  # type: ignore[import-not-found]  # noqa: E402
from hostile_ranks import RANKS, HostileRanks  # type: ignore[import-not-found]  # noqa: E402
from stub_nvml.controller import StubNvml, build  # type: ignore[import-not-found]  # noqa: E402


def virtual(folder: Path, seed: int, minutes: float) -> list[str]:
    """Run the part in virtual time and return the broken promises."""
    day = HostileDay(folder / "virtual", seed=seed)
    broken = day.run(minutes)
    show(f"virtual: {minutes:g} minutes of a job of 4 ranks on simulated GPUs, seed {seed}", day.outcomes)
    return list(broken)


def real(folder: Path, seed: int, minutes: float) -> list[str]:
    """Run the part with real ranks and return the broken promises."""
    stub = StubNvml(build(folder), folder / "stub_nvml_state", RANKS)
    job = HostileRanks(folder / "real", stub, seed=seed)
    broken = job.run(minutes)
    show(f"real: {minutes:g} minutes of {RANKS} DeepSpeed ranks on a stub driver, seed {seed}", job.outcomes)
    return list(broken)


def show(title: str, outcomes: dict[str, object]) -> None:
    """Print a table of causes."""
    print(f"\n{title}\n{'cause':22} times  warnings  back after at most [s]")
    for cause, outcome in outcomes.items():
        print(f"{cause:22} {outcome}", flush=True)


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("virtual", "real", "both"), default="both")
    parser.add_argument("--minutes", type=float, help="by default an hour in all: 30 real ones, and 600 of the job")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part != "real":
            broken += virtual(Path(folder), arguments.seed, arguments.minutes or 600.0)
        if arguments.part != "virtual":
            broken += real(Path(folder), arguments.seed, arguments.minutes or 30.0)
    print("\n" + "\n".join(f"NOT MET: {what}" for what in broken) if broken else "\nAll promises were met")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
