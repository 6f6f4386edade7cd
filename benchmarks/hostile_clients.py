"""What clients of the control socket that mean harm cost a job's iterations.

    python benchmarks/hostile_clients.py [seconds=10]

One process trains: iterations of Python and NumPy work of some ms, with the control socket of a job that runs under
plans. Another process attacks over the Unix socket: 10 000 connections one after the other, half-open ones, lines of
100 MB without end, random bytes, and eight clients that send orders without pause. It attacks in turns the training
process and the same server in a third process, so that it takes as much of the processors in both. Printed for each
attack are the median and the quartiles of iteration times in both cases, and at the end whether handles or threads are
left.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from perseus_ds.policy.control_socket import ADDRESS_FILE, ControlServer, send_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.policies import SlowdownPolicy

ATTACKS = ("connections", "half-open", "long lines", "garbage", "orders")
_ROUNDS = 4
_CONNECTIONS = 10_000
_HALF_OPEN = 500
_LINE_BYTES = 100_000_000


def main() -> None:
    seconds = float(sys.argv[1].partition("=")[2]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as folder:
        control = JobControl(SlowdownPolicy(), pipelines=4)
        server = ControlServer(Path(folder), control.carry_out)
        address = json.loads((Path(folder) / ADDRESS_FILE).read_text())["socket"]
        process = psutil.Process()
        train(1.0)
        before = (process.num_fds(), process.num_threads())
        other = subprocess.Popen([sys.executable, __file__, "serve", folder], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        elsewhere = other.stdout.readline().strip()
        for attack in ATTACKS:
            times: dict[str, list[float]] = {address: [], elsewhere: []}
            shares: list[float] = []
            for _ in range(_ROUNDS):
                for target in times:
                    attacker = subprocess.Popen(
                        [sys.executable, __file__, "attack", attack, target, str(2 * seconds + 60)],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    assert attacker.stdout is not None
                    attacker.stdout.readline()  # it attacks from now on
                    used_s = served_s()
                    times[target] += train(seconds / _ROUNDS)
                    if target == address:
                        shares.append((served_s() - used_s) / (seconds / _ROUNDS))
                        began_s = time.perf_counter()
                        send_order(Path(folder), {"command": "status"})
                        answer_s = time.perf_counter() - began_s
                    attacker.kill()
                    attacker.communicate()
            print(
                f"{attack:12} {summary(times[address], times[elsewhere])}; "
                f"server's thread {statistics.mean(shares):.2%} of a processor; status after {answer_s:.1f} s",
                flush=True,
            )
        other.kill()
        other.communicate()
        time.sleep(6.0)  # for as long as a silent client is kept
        after = (process.num_fds(), process.num_threads())
        print(f"handles and threads: {before} before, {after} after")
        server.close()


def served_s() -> float:
    """Return the processor time of all threads but the one that trains, which calls this [s]."""
    return time.process_time() - time.thread_time()


def train(seconds: float) -> list[float]:
    """Return the times of iterations [s]."""
    times, end_s = [], time.perf_counter() + seconds
    matrix = np.random.default_rng(0).random((160, 160))
    while (begin_s := time.perf_counter()) < end_s:
        for _ in range(30):
            matrix = matrix @ matrix
            matrix /= matrix.max()
            sum(number * number for number in range(4_000))
        times.append(time.perf_counter() - begin_s)
    return times


def summary(attacked: list[float], spared: list[float]) -> str:
    def spread(times: list[float]) -> tuple[float, float, float]:
        low, _, high = statistics.quantiles(times, n=4)
        return low * 1e3, statistics.median(times) * 1e3, high * 1e3

    change = statistics.median(attacked) / statistics.median(spared) - 1
    ours, theirs = spread(attacked), spread(spared)
    return (
        f"{ours[1]:6.2f} ms ({ours[0]:.2f} to {ours[2]:.2f}), elsewhere {theirs[1]:6.2f} ms ({theirs[0]:.2f} to "
        f"{theirs[2]:.2f}): {change:+.2%}"
    )


def attack(kind: str, address: str, seconds: float) -> None:
    """Attack until it is ended, or for so long."""
    threading.Timer(seconds, os._exit, [0]).start()
    print(flush=True)
    if kind == "half-open":
        kept = [connected(address, b'{"command":') for _ in range(_HALF_OPEN)]
        time.sleep(seconds)
        del kept
    threads = [threading.Thread(target=_one_client, args=[kind, address]) for _ in range(8 if kind == "orders" else 1)]
    for thread in threads:
        thread.start()


def _one_client(kind: str, address: str) -> None:
    draw = random.Random(0)
    for number in range(_CONNECTIONS if kind == "connections" else 10**9):
        slower = {"name": "slowdown", "max_slowdown": number % 2 / 10}
        sent = {
            "connections": b"",
            "long lines": b"x" * _LINE_BYTES if kind == "long lines" else b"",
            "garbage": draw.randbytes(1000) + b"\n",
            "orders": json.dumps({"command": "policy", "policy": slower}).encode() + b"\n",
        }[kind]
        try:
            with connected(address, sent) as connection:
                if kind == "orders":
                    connection.recv(65536)
        except OSError:
            pass


def connected(address: str, sent: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(sent)
    except OSError:
        connection.close()
        raise
    return connection


if __name__ == "__main__":
    if sys.argv[1:2] == ["attack"]:
        attack(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    elif sys.argv[1:2] == ["serve"]:
        with tempfile.TemporaryDirectory(dir=sys.argv[2]) as own:
            ControlServer(Path(own), JobControl(SlowdownPolicy(), pipelines=4).carry_out)
            print(json.loads((Path(own) / ADDRESS_FILE).read_text())["socket"], flush=True)
            threading.Event().wait()
    else:
        main()
