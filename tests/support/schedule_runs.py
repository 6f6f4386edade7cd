"""Starts jobs of ``schedule_job.py`` on real ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import run_ranks

SCRIPT = Path(__file__).with_name("schedule_job.py")
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "LoopedBFS": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""The schedules of torch, and how many stages the tests put on each rank."""


@dataclass
class Ran:
    """Jobs that ran one after the other."""

    returncode: int
    output: str
    folder: Path

    @property
    def ranks(self) -> list[list[dict[str, Any]]]:
        """What each rank reported of each job; the jobs must have come to their end."""
        assert self.returncode == 0, self.output[-4000:]
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]


def run(folder: Path, jobs: list[dict[str, Any]], ranks: int = 2) -> Ran:
    """Run jobs one after the other on the same ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    ran = Ran(*run_ranks(folder, ranks, environment, [str(SCRIPT), str(folder)]), folder)
    if ran.returncode:
        raise AssertionError(ran.output[-4000:])
    return ran
