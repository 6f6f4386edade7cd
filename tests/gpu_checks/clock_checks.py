"""Spans of operations by CUDA events, delays of clock requests after marks of the GPU, and signals."""

import os
import pkgutil
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from functools import partial

from gpu_checks.results import percentile

from perseus_ds.client.signals import SignalPipe
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import Program

_PASS = Compute(Instruction(0, Kind.FORWARD, 0))
_LENGTHS_S = (0.002, 0.005, 0.003, 0.004)
_OPERATIONS = 1000
_PASSES, _AHEAD, _ROUNDS = 30, 5, 2
"""Passes of an iteration, iterations launched one after the other, and rounds."""
_BETWEEN_S, _LATENCY_S = 0.02, 0.008
_TOLERANCE_S = 0.005


def spans(machine, results):
    """Spans of a thousand kernels of known length launched ahead, and waits for another stream."""
    _calibrate(machine)
    execution, now_s = machine.execution(), machine.timebase.now_s
    lengths_s = [_LENGTHS_S[number % len(_LENGTHS_S)] for number in range(_OPERATIONS)]
    began_s = now_s()
    execution.start_iteration()
    for length_s in lengths_s:
        _launch_pass(machine, execution, length_s)
    finished = execution.finish_iteration()
    launched_s = now_s()
    measured_s = [span.time_s for span in finished.spans()]
    ended_s = now_s()
    ratios = [measured / length for measured, length in zip(measured_s, lengths_s, strict=True)]
    results.add("operations", len(measured_s))
    results.add("how far the host was ahead of the GPU", ended_s - launched_s, "s")
    results.add("span to length, median", statistics.median(ratios), at_least=0.99, at_most=1.01)
    results.add("span to length, 1st percentile", percentile(ratios, 0.01), at_least=0.99)
    results.add("span to length, 99th percentile", percentile(ratios, 0.99), at_most=1.01)
    results.add("sum of spans to the host's time", sum(measured_s) / (ended_s - began_s), at_least=0.98, at_most=1.001)
    results.attempt("other stream", partial(_other_stream, machine, results))
    results.attempt("host 4 s ahead", partial(_far_ahead, machine, results))


def _calibrate(machine):
    """Make :meth:`sleep` measure the GPU's speed before anything is timed."""
    machine.sleep(0.001)
    machine.synchronize()


def _launch_pass(machine, execution, length_s):
    execution.begin(_PASS)
    machine.sleep(length_s)
    return execution.end(_PASS)


def _far_ahead(machine, results):
    execution, now_s, length_s = machine.execution(), machine.timebase.now_s, 0.04
    execution.start_iteration()
    for _ in range(100):
        ended = _launch_pass(machine, execution, length_s)
    finished, launched_s = execution.finish_iteration(), now_s()
    ended.synchronize()
    results.add("how far the host was ahead, longer kernels", now_s() - launched_s, "s", at_least=3.5)
    ratio = statistics.median(span.time_s for span in finished.spans()) / length_s
    results.add("span to length then, median", ratio, at_least=0.99, at_most=1.01)


def _other_stream(machine, results):
    execution, length_s = machine.execution(), 0.02
    execution.start_iteration()
    beside = machine.start_beside(10 * length_s)
    _launch_pass(machine, execution, length_s)
    machine.wait_for(beside)
    _launch_pass(machine, execution, length_s)
    during, after = execution.finish_iteration().spans()
    results.add("span while another stream is busy, to its length", during.time_s / length_s, at_most=1.02)
    results.add("span after a wait for another stream, to its length", after.time_s / length_s, at_most=1.02)
    results.add("that wait, between the spans", (after.start_s - during.end_s) / length_s, "lengths", at_least=8)


def requests(machine, results):
    """Delay from the end of a pass on the GPU to the agent's request of a clock, and early raises."""
    for name, occupy, at_most_ms in (
        ("launching", machine.launch_for, 2),
        ("in pure Python", machine.count_for, 2),
        ("waiting in a full launch queue", machine.fill_queue_for, None),
        ("waiting there with Triton's kernels", machine.fill_queue_with_triton_for, None),
    ):
        what = f"from event to request, main thread {name}"
        results.attempt(what, partial(_delays, machine, results, what, occupy, at_most_ms))
    results.attempt("early raises", partial(_early_raises, machine, results))


def _delays(machine, results, what, occupy, at_most_ms):
    clocks_mhz = tuple(machine.gpu.supported_clocks_mhz()[-2:]) * (_PASSES // 2)
    passes, changes = _followed(machine, Program(0, None, clocks_mhz), occupy)
    due = [(clocks_mhz[(number + 1) % _PASSES], ended_s) for number, (_, ended_s) in enumerate(passes)][_PASSES:-1]
    late_s = _late_s(due, changes)
    results.add(f"{what}: requests made", len(late_s), at_least=len(due))
    results.add_times(what, late_s, p99_at_most_ms=at_most_ms)


def _early_raises(machine, results):
    clocks_mhz = tuple(machine.gpu.supported_clocks_mhz()[-2:]) * (_PASSES // 2)
    spans_s = tuple((number * _BETWEEN_S, (number + 1) * _BETWEEN_S) for number in range(_PASSES))
    program = Program(0, None, clocks_mhz, spans_s, _PASSES * _BETWEEN_S)
    passes, changes = _followed(machine, program, machine.launch_for, _LATENCY_S)
    early_s = _BETWEEN_S - _LATENCY_S  # from the begin of a pass at the lower clock
    due = [(clocks_mhz[1], begun_s + early_s) for begun_s, _ in passes[_PASSES::2]]
    late_s = _late_s(due, changes)
    results.add("early raises: requests made", len(late_s), at_least=len(due))
    results.add("early raises, earliest", min(late_s) * 1e3, "ms after due", at_least=-2)
    results.add_times("early raises, after due", late_s, p99_at_most_ms=2)


def _followed(machine, program, occupy, latency_s=None):
    """Have an agent follow iterations of a program, and return the passes and the changes.

    The agent learns from the first iteration when to expect marks. The GPU is idle at the begin of each round
    of iterations, so that the first event passes when it is recorded. Passes have begin and end on the host's clock
    [s].
    """
    _calibrate(machine)
    occupy(0.01)  # loads kernels before the GPU is busy
    passes = []
    with machine.clocks(latency_s) as recorded:
        clocks = recorded.clocks
        recorded.follow(program)
        for _ in range(_ROUNDS):
            machine.synchronize()
            execution, origin_s = machine.execution(), machine.timebase.now_s()
            execution.start_iteration()
            for _ in range(_AHEAD):
                iteration = clocks.begin_iteration(program.number, _PASSES)
                for position in range(_PASSES):
                    clocks.mark(2 * position)
                    _launch_pass(machine, execution, _BETWEEN_S)
                    clocks.mark(2 * position + 1)
                clocks.end_iteration(iteration)
            finished = execution.finish_iteration()
            occupy(_AHEAD * _PASSES * _BETWEEN_S + 0.2)
            passes += [(origin_s + span.start_s, origin_s + span.end_s) for span in finished.spans()]
        machine.timebase.sleep(0.1)  # for the last request
        changes = recorded.changes()
        if clocks.mark_error is not None:
            raise clocks.mark_error
        if recorded.failures:
            raise RuntimeError(recorded.failures[0].error)
    return passes, changes


def _late_s(due, changes):
    """Return the delay of each due clock that was requested before it was due again."""
    late_s = []
    for clock_mhz, due_s in due:
        asked_s = (change.at_s for change in changes if change.clock_mhz == clock_mhz)
        found = [at_s - due_s for at_s in asked_s if -_TOLERANCE_S <= at_s - due_s < 2 * _BETWEEN_S - _TOLERANCE_S]
        late_s += found[:1]
    return late_s


def memory(machine, results):
    """GPU memory used by the agent, and by the marks and events of a long iteration."""
    _calibrate(machine)
    before, execution = machine.free_bytes(), machine.execution()
    with machine.clocks() as recorded:
        clocks = recorded.clocks
        recorded.follow(Program(0, None, machine.gpu.supported_clocks_mhz()[-1:]))
        iteration = clocks.begin_iteration(0, 1)
        execution.start_iteration()
        for position in range(_OPERATIONS):
            execution.begin(_PASS)
            clocks.mark(2 * position)
            execution.end(_PASS)
            clocks.mark(2 * position + 1)
        execution.finish_iteration().end.synchronize()
        clocks.end_iteration(iteration)
        taken = before - machine.free_bytes()
    results.add("GPU memory taken", taken / 2**20, "MiB", at_most=16)


_VICTIM = "import sys; from gpu_checks.clock_checks import wait_for_the_gpu; wait_for_the_gpu(*sys.argv[1:])"


def sigterm(machine, results):
    """Send SIGTERM to a process while its main thread waits for a kernel of half a minute."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    place = f"{type(machine).__module__}:{type(machine).__name__}"
    command = [sys.executable, "-c", _VICTIM, place, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        killer = threading.Timer(60.0, process.kill)  # only ends a check that hangs
        killer.start()
        try:
            theirs.close()
            assert process.stdout.readline() == b"waiting\n", "the process ended"
            _, (pipe,), _, _ = socket.recv_fds(ours, 1, 1)
            time.sleep(0.5)  # the main thread is in the driver by then
            began_s = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            select.select([pipe], [], [])
            received = os.read(pipe, 1)
            os.close(pipe)
            results.add("from SIGTERM until the agent receives it", time.perf_counter() - began_s, "s", at_most=1)
            results.add_fact("the agent receives the signal's number", received == bytes([signal.SIGTERM]))
        finally:
            killer.cancel()
            process.kill()


def wait_for_the_gpu(machine, agent):
    """Send the pipe of signals to a socket, as a lease does, and wait for the GPU on the main thread."""
    machine, connection = pkgutil.resolve_name(machine)(), socket.socket(fileno=int(agent))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signals = SignalPipe()
    socket.send_fds(connection, [b"\0"], [signals.reader])
    machine.sleep(0.001)
    machine.synchronize()
    machine.sleep(30.0)
    os.write(1, b"waiting\n")
    machine.synchronize()
