"""Ranks forked from a process that has imported torch and DeepSpeed, which saves seconds.

As with torchrun, every rank is a process with the usual environment, and if one fails the others are terminated.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from run_log import JOB_GIVE_UP_S

# Below the range of Linux's ephemeral ports (net.ipv4.ip_local_port_range).
_PORTS = range(20_000, 32_000)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pipeline_job", "perseus_ds.client.runtime"])


def run_ranks(
    folder: Path,
    ranks: int,
    environment: dict[str, str],
    command: Sequence[str],
    give_up_s: float = JOB_GIVE_UP_S,
) -> tuple[int, str]:
    """Run a Python script on one process per rank.

    Args:
        folder: Working directory, which receives ``output.log``.
        ranks: Number of processes.
        environment: Variables to set.
        command: The script and its arguments.
        give_up_s: Time after which processes are terminated as hung [s].

    Returns:
        The first nonzero exit code, or 0, and the ranks' output. The exit code is 124 if they were terminated as hung.
    """
    # A pipe instead of a file, since a job may be out of disk space.
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
    # The linker read this process's variables at its start, so only its children find the stub driver, such as agents.
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(command)
    # With "forkserver", each worker of a data loader would wait for its own server.
    multiprocessing.set_start_method("fork", force=True)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process skips these


def fork(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a copy of a process that has imported torch and DeepSpeed, which calls a function."""
    process = _CONTEXT.Process(target=_call, args=(os.environ.get("PYTHONPATH", ""), target, arguments))
    # The first call starts the process to copy: its imports read the first variable and are found through the second.
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}):
        process.start()
    return process


def _call(python_path: str, target: Callable[..., object], arguments: Sequence[Any]) -> None:
    os.environ["PYTHONPATH"] = python_path
    target(*arguments)


def free_port() -> int:
    """Return a port that no other test uses, and that the system does not assign to other sockets.

    A port chosen by the system is free only until another process requests one, so concurrent jobs could collide.
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
