"""Capture of a CUDA graph beside the clocks' thread, and SIGTERM while the main thread waits for a long kernel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from gpu_checks.checks import place_of
from gpu_checks.results import Results

from perseus_ds.client.lease import SignalForwarder
from perseus_ds.clocks.controller import ClockController
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute

_PASS = Compute(Instruction(0, Kind.FORWARD, 0))
_ADDITIONS = 500
_GIVE_UP_S = 60.0


def graph(machine: Any, results: Results) -> None:
    """Capture a graph in CUDA's global mode while the clocks' thread waits for an event that passes meanwhile."""
    import torch

    execution, errors = machine.execution(), []
    clocks = ClockController(machine.gpu, errors.append, on_start=execution.use_device, timebase=machine.timebase)
    value = torch.zeros(1, device=machine.device)
    own, side = torch.cuda.Stream(), torch.cuda.Stream()
    machine.sleep(0.001)
    value.add_(1)
    _capture(machine, own, value, 1)  # what a first capture loads may wait for the GPU
    torch.cuda.synchronize()
    value.zero_()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(side):
            execution.start_iteration()
            execution.begin(_PASS)
            machine.sleep(0.3)
            clocks.request(machine.gpu.supported_clocks_mhz()[-2], execution.end(_PASS))
        captured, began_s, ended_s = _capture(machine, own, value, _ADDITIONS)
        captured.replay()
        torch.cuda.synchronize()
        asked_s = [change.at_s for change in machine.gpu.changes]
    finally:
        clocks.close()
    results.add_fact("the captured graph computes what was captured", value.item() == _ADDITIONS)
    results.add_fact("a clock was asked for during the capture", any(began_s < at_s < ended_s for at_s in asked_s))
    results.add("errors of the clocks' thread", len(errors), at_most=0)


def _capture(machine: Any, stream: Any, value: Any, additions: int) -> tuple[Any, float, float]:
    """Capture additions to a value, one each millisecond; return the graph, and when the capture began and ended."""
    import torch

    captured = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        captured.capture_begin(capture_error_mode="global")
        began_s = machine.timebase.now_s()
        for _ in range(additions):
            value.add_(1)
            time.sleep(0.001)
        ended_s = machine.timebase.now_s()
        captured.capture_end()
    return captured, began_s, ended_s


def sigterm(machine: Any, results: Results) -> None:
    """Send SIGTERM to a process whose main thread waits for a kernel that takes half a minute."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _VICTIM, place_of(type(machine)), str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        killer = threading.Timer(_GIVE_UP_S, process.kill)  # only ends a check that hangs
        killer.start()
        try:
            theirs.close()
            assert process.stdout is not None
            assert process.stdout.readline() == b"waiting\n", "the process ended"
            time.sleep(0.5)  # by then the main thread is in the driver
            began_s = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            received = ours.recv(1)
            results.add("from SIGTERM until the agent receives it", time.perf_counter() - began_s, "s", at_most=1)
            results.add_fact("the agent receives the signal's number", received == bytes([signal.SIGTERM]))
        finally:
            killer.cancel()
            process.kill()


_VICTIM = """
import sys
from gpu_checks.checks import named
from gpu_checks.process_checks import wait_for_the_gpu
wait_for_the_gpu(named(sys.argv[1])(), int(sys.argv[2]))
"""


def wait_for_the_gpu(machine: Any, agent: int) -> None:
    """Report signals to a socket, as a lease does, and wait for the GPU on the main thread."""
    connection = socket.socket(fileno=agent)
    connection.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    SignalForwarder().start(connection)
    machine.sleep(0.001)
    machine.synchronize()
    machine.sleep(30.0)
    os.write(1, b"waiting\n")
    machine.synchronize()
