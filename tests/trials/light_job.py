"""A small job for trials: a launcher and two ranks, without DeepSpeed's engine.

Everything that changes or restores clocks is real: Perseus's runtime on gloo, its agent, and pynvml on the stub driver.
A pass is a short sleep. Processes are forked from one that has imported torch.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from trials.cgroups import join

import perseus_ds
from perseus_ds.client import lease
from perseus_ds.errors import GpuError
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Kind

RANKS = 2
_MICRO_BATCHES = 4
_PASS_S = 0.002
_GRACE_S = 2.0
"""Time from SIGTERM, which the launcher sends when a rank has failed, to SIGKILL."""
_POLL_S = 0.01
_LAST_STEPS = 3
_CLONE_NEWPID = 0x20000000


@dataclass(frozen=True)
class LightJob:
    """Settings of a job.

    Attributes:
        folder: Folder that it writes to: ``output.log``, an empty file for each phase that it has reached, and
            ``closing`` some steps before its end.
        environment: Environment variables to set.
        perseus: The ``perseus`` block.
        end_by: Key in :data:`ENDS` of the way in which the last rank ends itself, after it has written the time of
            ``time.monotonic`` into ``ended_s``. None if it does not.
        end_after_s: Time until then, from its first iteration in phase ``run`` [s].
        workers: Number of processes of each rank's data loader.
        ignores_term: Whether the script has a handler of SIGTERM after which it continues.
        is_container: Whether the ranks have their own PID namespace, with rank 0 as its first process.
        small_cgroup: Control group with little memory, for the rank that ends by exceeding it.
        trouble: Key in :data:`TROUBLES` of what happens on each rank in its first iteration in phase ``run``.
        differing_variables: Whether each rank has another XDG_RUNTIME_DIR and TMPDIR.
    """

    folder: Path
    environment: Mapping[str, str]
    perseus: Mapping[str, Any]
    steps: int = 1_000_000
    end_by: str | None = None
    end_after_s: float = 0.0
    workers: int = 0
    ignores_term: bool = False
    cgroup: Path | None = None
    is_container: bool = False
    small_cgroup: Path | None = None
    trouble: str | None = None
    differing_variables: bool = False


def launch(job: LightJob) -> None:
    """Start the ranks in a new process group, and end all of them when one fails, as torchrun does."""
    os.setsid()
    if job.cgroup is not None:
        join(job.cgroup)
    os.environ.update(job.environment)  # the linker has read this process's: only its children find the stub driver
    if job.is_container and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "no PID namespace can be made")
    output = os.open(job.folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks = [_fork(job, rank) for rank in range(RANKS)]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: _send(ranks, signal.SIGTERM))
    os._exit(_wait(ranks))


def _fork(job: LightJob, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _run(job, rank)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            atexit._run_exitfuncs()  # os._exit does not run them
            os._exit(status)
    return pid


def _wait(ranks: list[int]) -> int:
    """Wait for the ranks. Returns 1 if one failed."""
    has_failed, kill_at_s = False, float("inf")
    while ranks:
        for pid in tuple(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
            if ended and status and not has_failed:
                has_failed, kill_at_s = True, time.monotonic() + _GRACE_S
                _send(ranks, signal.SIGTERM)
        if time.monotonic() > kill_at_s:
            _send(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return int(has_failed)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _run(job: LightJob, rank: int) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job.ignores_term:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)})
    if job.differing_variables:
        for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
            (job.folder / f"{variable}-{rank}").mkdir()
            os.environ[variable] = str(job.folder / f"{variable}-{rank}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule = read_schedule(schedule_class("1f1b"), ranks=RANKS, micro_batches=_MICRO_BATCHES)
    passes = [i for i in schedule.instructions[rank] if i.kind is not Kind.TAIL]
    perseus = perseus_ds.PerseusRuntime.for_loop(job.perseus, schedule, pipeline=range(RANKS))
    context = "fork" if job.workers else None
    data = iter(DataLoader(range(1 << 30), num_workers=job.workers, multiprocessing_context=context))
    end_s = float("inf")
    trouble = None if job.trouble is None else TROUBLES[job.trouble]
    for step in range(job.steps):
        if step == job.steps - _LAST_STEPS:
            (job.folder / "closing").touch()
        next(data)
        with perseus.iteration():
            for instruction in passes:
                with perseus.instruction(instruction):
                    time.sleep(_PASS_S)
                if time.monotonic() > end_s:
                    (job.folder / "ended_s").write_text(repr(time.monotonic()))
                    ENDS[str(job.end_by)](job)
            dist.all_reduce(torch.zeros(1))  # ranks wait for each other
        phase = perseus.phase
        (job.folder / phase).touch()
        if phase == "run" and trouble is not None:
            trouble(perseus)
            trouble = None
        if phase == "run" and job.end_by and rank == RANKS - 1:
            end_s = min(end_s, time.monotonic() + job.end_after_s)
    perseus.close()
    dist.barrier()
    dist.destroy_process_group()


def _raise(job: LightJob) -> None:
    raise RuntimeError("the user's own mistake")


def _interrupt(job: LightJob) -> None:
    raise KeyboardInterrupt


def _ask_for_too_much(job: LightJob) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), most))
    _use_memory()


def _use_more_than_allowed(job: LightJob) -> None:
    assert job.small_cgroup is not None
    join(job.small_cgroup)
    _use_memory()


def _use_memory() -> None:
    kept = []
    while True:
        kept.append(b"x" * (1 << 20))


def _become_another_program(job: LightJob) -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1)"])


def _leave_a_copy(job: LightJob) -> None:
    """End, except for a forked process that continues for a while with all open files."""
    if os.fork() == 0:
        time.sleep(0.3)
    os._exit(0)


ENDS: Mapping[str, Callable[[LightJob], object]] = {
    "segfault": lambda job: ctypes.string_at(0),
    "os._exit": lambda job: os._exit(3),
    "os._exit(0)": lambda job: os._exit(0),
    "abort": lambda job: os.abort(),
    "exception": _raise,
    "sys.exit": lambda job: sys.exit(3),
    "KeyboardInterrupt": _interrupt,
    "MemoryError": _ask_for_too_much,
    "out-of-memory killer": _use_more_than_allowed,
    "exec": _become_another_program,
    "fork": _leave_a_copy,
}


def _break_a_mark(perseus: Any) -> None:
    """Make the next mark of a pass fail."""
    clocks = perseus.clocks
    working = clocks._marks

    class FailsOnce:
        begin, end = working.begin, working.end

        def mark(self, slot: int) -> None:
            clocks._marks = working
            raise GpuError("The GPU cannot write marks: writing a mark failed with CUDA_ERROR_INVALID_HANDLE.")

    clocks._marks = FailsOnce()


def _prevent_agents(perseus: Any) -> None:
    """Make agents fail that this rank starts from now on."""
    lease._CODE = "raise SystemExit(1)"


def _work_in_a_pool(perseus: Any) -> None:
    """Use a pool of processes, which it ends with SIGTERM, as data loaders do."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, range(100))


TROUBLES: Mapping[str, Callable[[Any], object]] = {
    "a mark fails": _break_a_mark,
    "agents cannot start": _prevent_agents,
    "a pool": _work_in_a_pool,
}
"""What happens to a rank in mid-training."""
