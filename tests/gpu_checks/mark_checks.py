"""Marks that the GPU writes into shared memory in stream order, also from a CUDA graph."""

import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np

from perseus_ds.client.lease import SharedMemory
from perseus_ds.client.marks import StreamWrites
from perseus_ds.client.operations import CapturedIteration
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute
from perseus_ds.protocol.job_messages import Program, Report

_SLOTS = 64
_LENGTH_S = 0.002

# Reads the words with pauses, and outputs each change: slot, value, monotonic time [ns].
_POLLER = """
import sys, time
import numpy as np
import mmap
fd, slots, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
words = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint32)
last, seen = words[:slots].copy(), []
print("ready", flush=True)
while True:
    is_over = words[slots]
    now = words[:slots].copy()
    changed = np.flatnonzero(now != last)
    if changed.size:
        at = time.monotonic_ns()
        seen.extend((slot, int(now[slot]), at) for slot in changed.tolist())
        last = now
    if is_over:  # what was written before has now been seen, however rarely this process runs
        break
    if pause_s:
        time.sleep(pause_s)
sys.stdout.buffer.write(np.array(seen, np.int64).tobytes())
"""


class _Marks:
    """Shared memory that begins with slots for marks, followed by a word that ends the poller."""

    def __init__(self, machine):
        self.memory = SharedMemory(4096)
        self.words = np.frombuffer(self.memory.view, np.uint32)
        self.writes = StreamWrites(self.memory, machine.stream_write_names)
        self._machine = machine

    def mark(self, slot, value, stream=None):
        self.writes.write(self._machine.stream_handle(stream), 4 * slot, value)

    def clear(self, slots):
        self.writes.fill(self._machine.stream_handle(), 0, slots)

    def wait_for(self, slot, value):
        while self.words[slot] != value:
            pass

    @contextmanager
    def polled(self, pause_s=0.001):
        """Poll the slots in another process, by default as often as an agent.

        Afterwards, the list has slot, value and time [s] of each change.
        """
        self.words[: _SLOTS + 1] = 0
        command = [sys.executable, "-c", _POLLER, str(self.memory.file), str(_SLOTS), str(pause_s)]
        seen = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[self.memory.file]) as process:
            process.stdout.readline()
            try:
                yield seen
                time.sleep(max(0.02, 3 * pause_s))
            finally:
                self.words[_SLOTS] = 1
            rows = np.frombuffer(process.stdout.read(), np.int64).reshape(-1, 3)
        seen += [(slot, value, at_ns / 1e9) for slot, value, at_ns in rows.tolist()]


def _timed_s(call, *arguments):
    began_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began_s


def marks(machine, results):
    """Latency and cost of marks, and their use with graphs, several streams and a full queue."""
    made = _Marks(machine)
    results.add_fact("anonymous shared memory can be mapped for the GPU", True)
    results.add_fact("its address is the same on the GPU", made.writes.base == made.memory.address)
    for name, part in {
        "idle stream": _idle_stream,
        "busy stream": _busy_stream,
        "GPU time": _gpu_time,
        "after a copy": _after_a_copy,
        "several streams": _several_streams,
        "graph": _graph,
        "busy thread": _busy_thread,
        "full queue": _full_queue,
    }.items():
        results.attempt(name, partial(part, machine, made, results))


def _idle_stream(machine, made, results):
    """Time of the call, and until the mark is visible, after a pause. After a long one, caches are cold."""
    for pause_s, at_most_ms in ((0.0005, 0.5), (0.008, None)):
        machine.synchronize()
        calls_s, delays_s = [], []
        for number in range(1, machine.turns(500) + 1):
            time.sleep(pause_s)
            calls_s.append(_timed_s(made.mark, 0, number))
            delays_s.append(calls_s[-1] + _timed_s(made.wait_for, 0, number))
        what = f"idle stream, {pause_s * 1e3:g} ms after the last mark"
        results.add_times(f"{what}, the call", calls_s)
        results.add_times(f"{what}, from the call until the mark is visible", delays_s, p99_at_most_ms=at_most_ms)


def _busy_stream(machine, made, results):
    marks = machine.turns(500)
    machine.sleep(_LENGTH_S)
    machine.synchronize()
    with made.polled() as seen:
        origin, ends = machine.timed_event(), []
        for number in range(1, marks + 1):
            machine.sleep(_LENGTH_S)
            ends.append(machine.timed_event())
            made.mark(number % 20, number)
        machine.synchronize()
    since_s = {number: origin.elapsed_time(event) / 1e3 for number, event in enumerate(ends, 1)}
    late_s = [at_s - since_s[value] for _, value, at_s in seen]
    results.add("busy stream: marks seen", len({value for _, value, _ in seen}), at_least=marks)
    results.add_fact("busy stream: in order", all(a[2] <= b[2] for a, b in pairwise(seen)))
    beyond_s = [each - min(late_s) for each in late_s]
    results.add_times("busy stream: from the event until it is seen, beyond the least", beyond_s, p99_at_most_ms=5)


def _gpu_time(machine, made, results):
    """GPU time of a mark between two short kernels, of clearing all slots, and of an event."""
    times = machine.turns(400)
    for what, extra in (
        ("a mark", lambda: made.mark(3, 1)),
        ("clearing 20 slots at once", lambda: made.clear(20)),
        ("an event", machine.timed_event),
    ):
        took_s = [], []
        for turn in range(machine.turns(20)):
            machine.synchronize()
            machine.sleep(0.02)  # the host must be ahead
            begun = machine.timed_event()
            for _ in range(times):
                machine.launch_small()
                if turn % 2:
                    extra()
            ended = machine.timed_event()
            machine.synchronize()
            took_s[turn % 2].append(begun.elapsed_time(ended) / 1e3)
        without_s, with_s = (statistics.median(each) / times for each in took_s)
        results.add(f"GPU time of {what} after a short kernel", (with_s - without_s) * 1e6, "µs")
    results.add("GPU time of the kernel", without_s * 1e6, "µs")


def _after_a_copy(machine, made, results):
    """Data copied to the host before a mark is visible when the mark is."""
    wrong = 0
    for number in range(1, machine.turns(1000) + 1):
        read = machine.copy_to_host(number)
        made.mark(4, number)
        made.wait_for(4, number)
        wrong += read() != number
    results.add("copies that were not there when their mark was", wrong, at_most=0)


def _several_streams(machine, made, results):
    streams, numbers = [machine.new_stream() for _ in range(3)], range(1, machine.turns(100) + 1)
    with made.polled(0.0) as seen:
        for number in numbers:
            for slot, stream in enumerate(streams):
                with machine.using(stream):
                    machine.sleep(_LENGTH_S / (slot + 1))
                    made.mark(slot, number, stream)
        machine.synchronize()
    for slot in range(3):
        values = [value for at, value, _ in seen if at == slot]
        results.add_fact(f"stream {slot}: all marks, in order", values == [*numbers])


def _graph(machine, made, results):
    """A graph of passes and marks, replayed ahead of the GPU between eager marks."""
    positions, iterations, begin = 20, machine.turns(100), 40

    def body():
        for position in range(positions):
            machine.sleep(_LENGTH_S)
            made.mark(position, 7)

    replayed = machine.captured(body)
    machine.synchronize()
    with made.polled() as seen:
        for number in range(1, iterations + 1):
            made.clear(positions)
            made.mark(begin, number)
            replayed.replay()
            made.mark(begin + 1, number)
        machine.synchronize()
    complete, reached = 0, []
    for slot, value, _ in [*seen, (begin, -1, 0.0)]:
        if slot == begin:
            # The next iteration clears the last mark within microseconds; its begin mark implies the last one.
            complete += reached[: positions - 1] == [*range(positions - 1)]
            reached = []
        elif slot < positions and value == 7:
            reached.append(slot)
    results.add("graph: iterations all of whose marks but the last were seen, in order", complete, at_least=iterations)


@contextmanager
def _beside(work):
    """Repeat a function on another Python thread."""
    stop = threading.Event()

    def repeat():
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _busy_thread(machine, made, results):
    """Time of the call next to a thread of pure Python."""
    calls_s = []
    with _beside(lambda: None):
        for number in range(1, machine.turns(200) + 1):
            time.sleep(0.001)
            calls_s.append(_timed_s(made.mark, 6, number))
    results.add_times("beside a busy Python thread: the call", calls_s)


def _full_queue(machine, made, results):
    """Time of a call when the launch queue is full, and how long another thread stalls during it."""
    for what, marks in (("without marks", False), ("with marks", True)):
        machine.synchronize()
        launches_s, marks_s, woken_s = [], [], [time.perf_counter()]
        with _beside(partial(_wake, woken_s)):
            for number in range(1, machine.turns(4000) + 1):
                launches_s.append(_timed_s(machine.sleep, 0.0003))
                if marks:
                    marks_s.append(_timed_s(made.mark, 5, number))
        machine.synchronize()
        results.add_times(f"full queue, {what}: a launch", launches_s[len(launches_s) // 2 :])
        if marks:
            results.add_times("full queue: a mark", marks_s[len(marks_s) // 2 :])
        longest_s = max((after - before for before, after in pairwise(woken_s)), default=0.0)
        results.add(f"full queue, {what}: longest pause of another Python thread", longest_s * 1e3, "ms")


def _wake(woken_s):
    time.sleep(0.0002)
    woken_s.append(time.perf_counter())


_POSITIONS, _PASS_S, _BESIDE_S, _STORED = 10, 0.02, 1.0, 7


def graph(machine, results):
    """Capture marks in CUDA's global mode while an agent follows others, and replay the graph."""
    threads, execution = set(threading.enumerate()), machine.execution()
    with machine.clocks() as recorded:
        clocks, reports = recorded.clocks, recorded.reports
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

        def body():
            for position in range(_POSITIONS):
                with iteration.operation(Compute(Instruction(0, Kind.FORWARD, position))):
                    machine.sleep(_PASS_S)
            machine.store(_STORED)
            _wait_for(beside, reports)
            is_asked = beside in reports and reports[beside].status.changes > 0
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
            clocks.send(Report(number, 1, 0, 0, _POSITIONS * _PASS_S))
            machine.synchronize()
            _wait_for(number, reports)
            asked.append(reports[number].status.changes)
            lasts_s += [span.time_s for span in finished.spans()]
        ratio = statistics.median(lasts_s) / _PASS_S
        results.add("clock changes in a replay, median", statistics.median(asked), at_least=_POSITIONS)
        results.add("time of a pass in a replay to its length, median", ratio, at_least=0.9)
        results.add_fact("the captured graph computes what was captured", machine.stored() == _STORED)
        ours = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("perseus")]
        results.add("threads of Perseus in the training process", len(ours), at_most=0)
        errors = len(recorded.failures) + (clocks.mark_error is not None)
    results.add("errors of the agent", errors, at_most=0)


def _wait_for(number, reports):
    """Wait for the report of an iteration, but not longer than 6 s."""
    end_s = time.perf_counter() + 6.0
    while number not in reports and time.perf_counter() < end_s:
        time.sleep(0.001)
