"""Ranks forked from a process that has imported torch and DeepSpeed already, which takes seconds for every rank.

Like torchrun: every rank is a process with the usual environment, and when one fails the others are ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from run_log import GIVE_UP_S

# Below those that Linux gives out itself (net.ipv4.ip_local_port_range).
_PORTS = range(20_000, 32_000)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pipeline_job", "perseus_ds.runtime.runtime"])


def run_ranks(
    folder: Path,
    ranks: int,
    environment: dict[str, str],
    command: Sequence[str],
    give_up_s: float = GIVE_UP_S,
) -> tuple[int, str]:
    """Run a Python script on as many processes as ranks.

    Args:
        folder: Where it runs, and where ``output.log`` is left.
        ranks: Number of processes.
        environment: Variables to set.
        command: The script and its arguments.
        give_up_s: After so long they are ended as hung [s].

    Returns:
        The first exit code that is not 0, else 0, and what the ranks printed; 124 where they had to be ended because
        they had hung.
    """
    # Not a file: a job may be out of disk space.
    log = Path(tempfile.mkdtemp()) / "output"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(log, os.O_WRONLY)
    output: list[bytes] = []
    thread = threading.Thread(target=_read_all, args=(reader, output))
    job = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = [
        fork(_rank, folder, log, command, {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    os.set_blocking(reader, True)
    thread.start()
    deadline_s = time.monotonic() + give_up_s
    while (alive := [p for p in processes if p.exitcode is None]) and not any(p.exitcode for p in processes):
        if time.monotonic() > deadline_s:
            break
        wait([p.sentinel for p in alive], timeout=0.1)
    failed = [p.exitcode for p in processes if p.exitcode]
    returncode = failed[0] if failed else 124 if alive else 0
    for process in alive:
        process.terminate()
    for process in processes:
        process.join(10)
        process.kill()
    os.close(writer)
    thread.join()
    os.close(reader)
    shutil.rmtree(log.parent)
    text = b"".join(output).decode(errors="replace")
    (folder / "output.log").write_text(text)
    return returncode, text


def _read_all(descriptor: int, output: list[bytes]) -> None:
    while part := os.read(descriptor, 65536):
        output.append(part)


def _rank(folder: Path, log: Path, command: Sequence[str], environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    live_in(environment)
    os.chdir(folder)
    sys.argv = list(command)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # data loaders' workers would each wait for a server of their own
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out


def fork(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a process that is a copy of one that has imported torch and DeepSpeed, and calls a function."""
    process = _CONTEXT.Process(target=_call, args=(os.environ.get("PYTHONPATH", ""), target, arguments))
    # The first time, this starts the process to copy: what that imports reads these, and is found by the second alone.
    with _environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}):
        process.start()
    return process


def _call(python_path: str, target: Callable[..., object], arguments: Sequence[Any]) -> None:
    os.environ["PYTHONPATH"] = python_path
    target(*arguments)


def live_in(environment: Mapping[str, str]) -> None:
    """Set variables in this process, and so in those that it starts.

    The linker has read those of this process before: it finds no stub of a driver, which agents alone may call.
    """
    os.environ.update(environment)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    """Return a port that no other test takes, and that the system gives to no socket that asks for any port.

    A port which the system chose is free only until another process asks: jobs that start meanwhile would meet in it.
    """
    with open(Path(tempfile.gettempdir()) / f"perseus-ds-ports-{os.getuid()}", "a+") as given:
        fcntl.flock(given, fcntl.LOCK_EX)
        given.seek(0)
        for turn in itertools.count(int(given.read() or 0)):
            port = _PORTS[turn % len(_PORTS)]
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                break
        given.truncate(0)
        given.write(str(turn + 1))
    return port
