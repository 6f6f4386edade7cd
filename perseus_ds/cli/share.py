"""``perseus-ds share``: one power limit for several jobs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Divide a power limit among jobs, so that the weighted sum of their speeds is highest.

    Each job follows the file power_cap in its output folder, by "policy": {"name": "power_cap", "signal":
    "OUTPUT_DIR/power_cap"} in its perseus block. This command writes these files, wherever the folders can be written
    to, until it is interrupted; jobs then stay at their last caps, and it may be started again at any time. Start it
    before the jobs, which need the file. A job without plans has its power at default clocks reserved.
    """

    examples = (
        "perseus-ds share limit=40kW jobs=[runs/gpt3,runs/bert,runs/t5]",
        "perseus-ds share limit=40kW jobs=[runs/gpt3,runs/bert] weights=[2,1]",
    )

    limit: str = argument("power of all GPUs of the jobs together: 40kW, 40000W or 40000")
    jobs: list[Path] = argument("output folders of the jobs, those that have not begun too")
    weights: list[float] = argument(
        "what the speed of each job counts, relative to its own default clocks; by default 1 for each", [], at_least=0
    )


_UNITS_W = {"": 1.0, "W": 1.0, "kW": 1e3, "MW": 1e6}
_PERIOD_S = 1.0


def run(arguments: Arguments) -> int:
    """Share the limit until interrupted."""
    from perseus_ds.policy.share import Share, SharingJob

    limit_w = _watts(arguments.limit)
    weights = arguments.weights or [1.0] * len(arguments.jobs)
    if len(weights) != len(arguments.jobs) or 0 in weights:
        raise ConfigError(
            f"weights: expected a number above 0 for each of the {len(arguments.jobs)} jobs, got {weights}."
        )
    if len({folder.resolve() for folder in arguments.jobs}) < len(arguments.jobs):
        raise ConfigError("jobs: a folder is named twice. Give each job an output_dir of its own.")
    for folder in arguments.jobs:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"jobs: {folder} is a file; expected the output_dir of a training run.")
    for folder in arguments.jobs:
        _lock(folder)
    jobs = [SharingJob(folder, weight) for folder, weight in zip(arguments.jobs, weights, strict=True)]
    share = Share(jobs, limit_w, say=lambda text: print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True))
    while True:
        share.step()
        time.sleep(_PERIOD_S)


def _lock(folder: Path) -> None:
    """Lock a job's folder while this process lives, where its disk can do that: no two processes write its cap.

    Raises:
        ConfigError: Another process shares with this job.
    """
    with contextlib.suppress(OSError):  # what cannot be written is said, as at any time later
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"jobs: another perseus-ds share gives {folder} its cap. End that one first.") from None


def _watts(text: str) -> float:
    """Return the limit, which is written with its unit or in watts [W].

    Raises:
        ConfigError: It is no power.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?) ?(W|kW|MW|)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"limit={text}: expected a power such as 40kW, 40000W or 40000.")
    return float(found[1]) * _UNITS_W[found[2]]
