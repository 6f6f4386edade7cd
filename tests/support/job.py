"""Starts jobs of ``pipeline_job.py`` on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import run_ranks

SCRIPT = Path(__file__).with_name("pipeline_job.py")
# Fast enough for a test, long enough for simulated instructions to dwarf what the CPU does.
SIMULATED = {"longest_instruction_s": 0.03, "counter_period_s": 0.02, "lock_latency_s": 0.002}
QUICK_PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8, "max_window_s": 0.25}
# Jobs have a cache of their own, but for what DeepSpeed compiles.
EXTENSIONS = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": EXTENSIONS}


@dataclass
class Finished:
    """A job that has ended."""

    folder: Path
    returncode: int
    output: str

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What every rank reported; the job must have come to its end."""
        assert self.returncode == 0, self.output[-4000:]
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def records(self, name: str = "perseus") -> list[dict[str, Any]]:
        lines = (self.folder / name / "run.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"],
    "deepspeed": [str(Path(sys.executable).with_name("deepspeed")), "--no_local_rank", "--num_gpus"],
}


def start(
    folder: Path, ranks: int, environment: dict[str, str] | None = None, launcher: str = "torchrun", **job: Any
) -> subprocess.Popen[str]:
    """Start a job by one of the launchers."""
    _prepare(folder, ranks, job)
    return subprocess.Popen(
        [sys.executable, *LAUNCHERS[launcher], str(ranks), str(SCRIPT), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **_environment(folder), **(environment or {})},
    )


def run(folder: Path, ranks: int, environment: dict[str, str] | None = None, **job: Any) -> Finished:
    """Run a job to its end."""
    environment = environment or {}
    if "LD_LIBRARY_PATH" in environment:  # read when a program starts, so too late for a forked one
        process = start(folder, ranks, environment, **job)
        output, _ = process.communicate(timeout=240)
        return Finished(folder, process.returncode, output)
    _prepare(folder, ranks, job)
    command = [str(SCRIPT), str(folder)]
    return Finished(folder, *run_ranks(folder, ranks, {**_environment(folder), **environment}, command))


def _prepare(folder: Path, ranks: int, job: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job = {"stages": ranks, "micro_batches": 4, "steps": 6, "work": [3] * 4, **job}
    if job.get("perseus"):
        settings = {**SIMULATED, **job["perseus"].get("simulated", {})}
        job["perseus"] = {"output_dir": str(folder / "perseus"), "device": "simulated", **job["perseus"]}
        job["perseus"]["simulated"] = settings
    (folder / "job.json").write_text(json.dumps(job))


def _environment(folder: Path) -> dict[str, str]:
    return {**ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
