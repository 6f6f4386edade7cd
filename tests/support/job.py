"""Starts jobs on real ranks: of ``pipeline_job.py``, of other engines and of examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import run_log
from forked import free_port, run_ranks
from run_log import Record

SCRIPT = Path(__file__).with_name("pipeline_job.py")
# Fast enough for a test, and long enough that simulated instructions dwarf the CPU's work.
SIMULATED = {"longest_instruction_s": 0.03, "counter_period_s": 0.02, "lock_latency_s": 0.002}
QUICK_PROFILE = {"min_clock_mhz": 1080, "sampling": "stride", "clock_stride": 8}
# Each job has its own cache, except for extensions compiled by DeepSpeed.
EXTENSIONS = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
SEARCH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": EXTENSIONS, "PATH": SEARCH}


@dataclass
class Finished:
    """A job that has ended."""

    folder: Path
    returncode: int
    output: str

    @property
    def printed(self) -> str:
        """Output of the job, which must have succeeded."""
        assert self.returncode == 0, self.output[-4000:]
        return self.output

    @property
    def ranks(self) -> list[Any]:
        """Reports of all ranks of a job, which must have succeeded."""
        assert self.returncode == 0, self.output[-4000:]
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def records(self) -> list[Record]:
        return run_log.records(self.folder / "perseus")

    def iterations(self, *phases: str) -> list[Record]:
        return run_log.iterations(self.records(), *phases)

    def events(self, *names: str) -> list[Record]:
        return run_log.events(self.records(), *names)


@dataclass
class Running:
    """A job that runs until it is stopped."""

    folder: Path

    def order(self, name: str, given: bool = True) -> None:
        """Create or remove one of the files that control the job."""
        file = self.folder / name
        file.touch() if given else file.unlink()

    def wait_for(self, condition: Callable[[list[Record]], Any]) -> Any:
        """Wait until the job's records meet a condition, and return the condition's result."""
        folder = self.folder / "perseus"
        return run_log.wait_until(lambda: condition(run_log.records(folder)), f"in {folder / 'run.jsonl'}")


DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))


def _launcher(name: str) -> list[str]:
    """Return the launcher's arguments before the number of ranks, with a port for the job."""
    if name == "deepspeed":
        return [DEEPSPEED, "--no_local_rank", "--master_port", str(free_port()), "--num_gpus"]
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def start(
    folder: Path,
    ranks: int,
    environment: dict[str, str] | None = None,
    launcher: str = "torchrun",
    output: int | IO[str] = subprocess.PIPE,
    **job: Any,
) -> subprocess.Popen[str]:
    """Start a job by one of the launchers, with its output in a pipe or a file."""
    _prepare(folder, ranks, job)
    return subprocess.Popen(
        [sys.executable, *_launcher(launcher), str(ranks), str(SCRIPT), str(folder)],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **_environment(folder), **(environment or {})},
    )


def run(
    folder: Path,
    ranks: int,
    environment: dict[str, str] | None = None,
    give_up_s: float = run_log.JOB_GIVE_UP_S,
    **job: Any,
) -> Finished:
    """Run a job to its end on forked ranks, which start faster than those of a launcher."""
    _prepare(folder, ranks, job)
    return run_script(folder, ranks, SCRIPT, folder, environment=environment, give_up_s=give_up_s)


def run_script(
    folder: Path,
    ranks: int,
    *command: Path | str,
    environment: dict[str, str] | None = None,
    give_up_s: float = run_log.JOB_GIVE_UP_S,
) -> Finished:
    """Run a script with its arguments to its end on forked ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**_environment(folder), **(environment or {})}
    return Finished(folder, *run_ranks(folder, ranks, variables, [*map(str, command)], give_up_s))


def run_jobs(folder: Path, ranks: int, script: Path | str, jobs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs one after the other on the same ranks, and return the reports of each rank by job.

    The script calls ``job_parts.train_jobs``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps([*jobs.values()]))
    return [dict(zip(jobs, done, strict=True)) for done in run_script(folder, ranks, script, folder).ranks]


def block_in(folder: Path, mode: str, **keys: Any) -> dict[str, Any]:
    """Return a ``perseus`` block for a mode, with fast simulated GPUs and an output folder."""
    simulated = {"longest_instruction_s": 0.012, "counter_period_s": 0.01, "lock_latency_s": 0.001}
    common = {"device": "simulated", "simulated": simulated, "profile": QUICK_PROFILE, "cache": False}
    return {"mode": mode, "output_dir": str(folder / mode), **common, **keys}


def in_modes(folder: Path, modes: Sequence[str], frontier: Path, **job: Any) -> dict[str, dict[str, Any]]:
    """Return a job in each mode, and finally without Perseus."""
    of_modes: dict[str, dict[str, Any]] = {
        "auto": {"until": ["run", 3], "perseus": block_in(folder, "auto", goal={"max_slowdown": None})},
        "run": {"until": ["run", 6], "perseus": block_in(folder, "run", frontier=str(frontier))},
        "without": {},
    }
    return {mode: {**job, **of_modes[mode]} for mode in (*modes, "without")}


def assert_untouched(jobs: dict[str, dict[str, Any]]) -> None:
    """Assert that jobs in all modes have the same bits as without Perseus, and leave no changes."""
    for mode, done in jobs.items():
        assert len(done["weights"]) > 2, mode
        for what in ("losses", "norms", "weights", "random_after", "generators"):
            ours, theirs = done.get(what, []), jobs["without"].get(what, [])
            assert len(ours) <= len(theirs), (mode, what)
            for step, (our, their) in enumerate(zip(ours, theirs, strict=False)):
                assert our == their, (mode, what, step)
        assert not any(done["left"]), mode


def run_while(during: Callable[[Running], None], folder: Path, ranks: int, **job: Any) -> Finished:
    """Run a job while a function controls and watches it."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Running(folder)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(run, folder, ranks, **{"steps": 1_000_000, **job})
        try:
            during(running)
        finally:
            running.order("stop")
        return result.result()


def assert_same_without_perseus(finished: Finished, ranks: int, **job: Any) -> None:
    """Train without Perseus for as many steps, and assert that losses, weights and random numbers are the same."""
    steps = len(finished.ranks[0]["losses"]) - ("evaluate_after" in job)
    without = run(finished.folder.with_name("without"), ranks, **{**job, "steps": steps})
    for ours, theirs in zip(finished.ranks, without.ranks, strict=True):
        assert repr(ours["losses"]) == repr(theirs["losses"])  # repr, since NaN is not equal to itself
        assert ours["weights"] == theirs["weights"]
        assert ours["random"] == theirs["random"]
        assert ours["skipped_steps"] == theirs["skipped_steps"]


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
