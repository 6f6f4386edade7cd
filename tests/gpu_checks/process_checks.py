"""Capture of a CUDA graph with marks, and SIGTERM during a long kernel."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_checks.checks import place_of
from gpu_checks.results import Results

from perseus_ds.client.lease import SignalForwarder
from perseus_ds.client.operations import CapturedIteration
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import Program, Report

_POSITIONS, _LENGTH_S, _BESIDE_S = 10, 0.02, 1.0
_STORED = 7
_GIVE_UP_S = 60.0


def graph(machine: Any, results: Results) -> None:
    """Capture marks in CUDA's global mode while an agent follows others, and replay the graph."""
    threads = set(threading.enumerate())
    execution = machine.execution()
    with machine.clocks() as recorded:
        clocks = recorded.clocks
        clocks_mhz = machine.gpu.supported_clocks_mhz()[-2:]
        machine.sleep(0.001)
        machine.store(0)
        machine.synchronize()
        with machine.using(machine.new_stream()):
            recorded.follow(Program(0, None, clocks_mhz))
            beside = clocks.begin_iteration(0, len(clocks_mhz))
            machine.sleep(_BESIDE_S)
            clocks.mark(1)
            clocks.end_iteration(beside)
            clocks.send(Report(beside, 0, 0, 0, _BESIDE_S))

        times = execution.graph_times()
        assert times is not None, "torch.cuda.Event has no argument external"
        iteration = CapturedIteration(clocks, times)

        def body() -> None:
            for position in range(_POSITIONS):
                with iteration.operation(Compute(Instruction(0, Kind.FORWARD, position))):
                    machine.sleep(_LENGTH_S)
            machine.store(_STORED)
            _wait_until(lambda: beside in recorded.reports)
            is_asked = beside in recorded.reports and recorded.reports[beside].changes > 0
            results.add_fact("a clock was asked for during the capture", is_asked)

        captured = machine.captured_alone(body)
        machine.synchronize()
        results.add_fact("what is captured is not done", machine.stored() == 0)
        recorded.follow(Program(1, None, clocks_mhz * (_POSITIONS // 2)))
        asked, lasts_s = [], []
        for _ in range(machine.turns(20)):
            execution.start_iteration()
            number = clocks.begin_iteration(1, _POSITIONS)
            captured.replay()
            execution.replayed(times)
            clocks.end_iteration(number)
            finished = execution.finish_iteration()
            clocks.send(Report(number, 1, 0, 0, _POSITIONS * _LENGTH_S))
            machine.synchronize()
            _wait_until(lambda: number in recorded.reports)  # noqa: B023  # called immediately
            asked.append(recorded.reports[number].changes)
            lasts_s += [span.time_s for span in finished.spans()]
        results.add("clock changes in a replay, median", statistics.median(asked), at_least=_POSITIONS)
        results.add(
            "time of a pass in a replay to its length, median", statistics.median(lasts_s) / _LENGTH_S, at_least=0.9
        )
        results.add_fact("the captured graph computes what was captured", machine.stored() == _STORED)
        ours = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("perseus")]
        results.add("threads of Perseus in the training process", len(ours), at_most=0)
        errors = len(recorded.failures) + (clocks.mark_error is not None)
    results.add("errors of the agent", errors, at_most=0)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.perf_counter() + _GIVE_UP_S / 10
    while not is_so() and time.perf_counter() < end_s:
        time.sleep(0.001)


def sigterm(machine: Any, results: Results) -> None:
    """Send SIGTERM to a process while its main thread waits for a kernel of half a minute."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _VICTIM, place_of(type(machine)), str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        killer = threading.Timer(_GIVE_UP_S, process.kill)  # only ends a check that hangs
        killer.start()
        try:
            theirs.close()
            assert process.stdout is not None
            assert process.stdout.readline() == b"waiting\n", "the process ended"
            time.sleep(0.5)  # the main thread is in the driver by then
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
    """Forward signals to a socket, as a lease does, and wait for the GPU on the main thread."""
    connection = socket.socket(fileno=agent)
    connection.setblocking(False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    SignalForwarder().start(connection)
    machine.sleep(0.001)
    machine.synchronize()
    machine.sleep(30.0)
    os.write(1, b"waiting\n")
    machine.synchronize()
