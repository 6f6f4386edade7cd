"""What clients that mean harm cost a job's iterations, at its control socket and at its metrics port.

    python benchmarks/hostile_clients.py [seconds=10]

One process trains: iterations of Python and NumPy work of some ms, with the control socket and the metrics port of a
job that runs under plans. Another process attacks: 10 000 connections one after the other, half-open ones, lines of
100 MB without end, random bytes, and eight clients that send orders or ask for metrics without pause. It attacks in
turns the training process and the same servers in a third process, so that it takes as much of the processors in both.
Printed for each attack are the median and the quartiles of iteration times in both cases, and at the end whether
handles or threads are left.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from perseus_ds.policy.control_socket import ADDRESS_FILE, ControlServer, send_order
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.policies import SlowdownPolicy
from perseus_ds.runtime.config import MetricsConfig
from perseus_ds.runtime.metrics import MetricsReporter
from perseus_ds.runtime.progress import JobLog

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from live_records import BEGIN, auto_job  # type: ignore[import-not-found]

CONTROL, METRICS = "control", "metrics"
ATTACKS = {
    CONTROL: ("connections", "half-open", "long lines", "garbage", "orders"),
    METRICS: ("connections", "half-open", "long lines", "garbage", "requests"),
}
_ROUNDS = 4
_CONNECTIONS = 10_000
_HALF_OPEN = 500
_LINE_BYTES = 100_000_000
_CLIENTS = {"orders": 8, "requests": 8}
_GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def main() -> None:
    seconds = float(sys.argv[1].partition("=")[2]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as here:
        process = psutil.Process()
        train(1.0)
        before = (process.num_fds(), process.num_threads())
        other = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        elsewhere: dict[str, str] = json.loads(other.stdout.readline())
        for server, kinds in ATTACKS.items():
            for kind in kinds:
                print(f"{server:8} {kind:12} {under(server, kind, here, elsewhere, seconds)}", flush=True)
                began_s = time.perf_counter()
                send_order(Path(folder), {"command": "status"})
                print(f"{'':22}status after {time.perf_counter() - began_s:.1f} s", flush=True)
        other.kill()
        other.communicate()
        time.sleep(6.0)  # for as long as a silent client is kept
        after = (process.num_fds(), process.num_threads())
        print(f"handles and threads: {before} before, {after} after")


def under(server: str, kind: str, here: dict[str, str], elsewhere: dict[str, str], seconds: float) -> str:
    """Return what one kind of attack on one of the servers costs."""
    times: list[list[float]] = [[], []]
    shares: list[float] = []
    for _ in range(_ROUNDS):
        for own, target in zip(times, (here, elsewhere), strict=True):
            command = [sys.executable, __file__, "attack", kind, target[server], str(2 * seconds + 60)]
            attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it attacks from now on
            used_s = served_s()
            own.extend(train(seconds / _ROUNDS))
            if target is here:
                shares.append((served_s() - used_s) / (seconds / _ROUNDS))
            attacker.kill()
            attacker.communicate()
    return f"{summary(*times)}; servers' threads {statistics.mean(shares):.2%} of a processor"


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Serve as a job under plans does; yield the address of each server."""
    control = JobControl(SlowdownPolicy(), pipelines=4)
    log = JobLog("gpt3")
    log.add(auto_job())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = ControlServer(folder, control.carry_out)
    reporter = MetricsReporter(MetricsConfig(port=port, textfile=None), lambda: log.facts(BEGIN + 100), print)
    address = json.loads((folder / ADDRESS_FILE).read_text())["socket"]
    try:
        yield {CONTROL: address, METRICS: str(port)}
    finally:
        reporter.close()
        server.close()


def served_s() -> float:
    """Return the processor time of all threads but the one that trains, which calls this [s]."""
    return time.process_time() - time.thread_time()


def train(seconds: float) -> list[float]:
    """Return the times of iterations [s]."""
    times, end_s = [], time.perf_counter() + seconds
    numbers = np.random.default_rng(0).random(20_000)  # by functions of NumPy that use one thread
    while (begin_s := time.perf_counter()) < end_s:
        for _ in range(30):
            numbers = np.tanh(numbers) + 0.1
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
    for _ in range(_CLIENTS.get(kind, 1)):
        threading.Thread(target=_one_client, args=[kind, address]).start()


def _one_client(kind: str, address: str) -> None:
    draw = random.Random(0)
    for number in range(_CONNECTIONS if kind == "connections" else 10**9):
        slower = {"name": "slowdown", "max_slowdown": number % 2 / 10}
        sent = {
            "connections": b"",
            "long lines": b"x" * _LINE_BYTES if kind == "long lines" else b"",
            "garbage": draw.randbytes(1000) + b"\n",
            "orders": json.dumps({"command": "policy", "policy": slower}).encode() + b"\n",
            "requests": _GET,
        }[kind]
        try:
            with connected(address, sent) as connection:
                if kind in _CLIENTS:
                    connection.recv(65536)
        except OSError:
            pass


def connected(address: str, sent: bytes) -> socket.socket:
    """Connect to a socket's path or to a port of this machine, and send."""
    is_port = address.isdigit()
    connection = socket.socket(socket.AF_INET if is_port else socket.AF_UNIX)
    try:
        connection.connect(("127.0.0.1", int(address)) if is_port else address)
        connection.sendall(sent)
    except OSError:
        connection.close()
        raise
    return connection


if __name__ == "__main__":
    if sys.argv[1:2] == ["attack"]:
        attack(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    elif sys.argv[1:2] == ["serve"]:
        with tempfile.TemporaryDirectory() as own, servers(Path(own)) as addresses:
            print(json.dumps(addresses), flush=True)
            threading.Event().wait()
    else:
        main()
