"""Marks that the GPU writes into shared memory in stream order, as seen by another process."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from gpu_checks.results import Results, add_times

from perseus_ds.client.lease import SharedMemory
from perseus_ds.client.marks import StreamWrites

_SLOTS = 64
_LENGTH_S = 0.002
_PAUSE_S = 0.001  # between two polls of an agent

# Reads the words in a loop and outputs each change: slot, value, monotonic time [ns].
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

    def __init__(self, machine: Any) -> None:
        self.memory = SharedMemory(4096)
        self.words = np.frombuffer(self.memory.view, np.uint32)
        self.writes = StreamWrites(self.memory, machine.stream_write_names)
        self._machine = machine

    def mark(self, slot: int, value: int, stream: Any = None) -> None:
        self.writes.write(self._machine.stream_handle(stream), 4 * slot, value)

    @contextmanager
    def polled(self, pause_s: float) -> Iterator[list[tuple[int, int, float]]]:
        """Poll the slots in another process.

        Afterwards, the list has slot, value and time [s] of each change.
        """
        self.words[: _SLOTS + 1] = 0
        command = [sys.executable, "-c", _POLLER, str(self.memory.file), str(_SLOTS), str(pause_s)]
        seen: list[tuple[int, int, float]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[self.memory.file]) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield seen
                time.sleep(max(0.02, 3 * pause_s))
            finally:
                self.words[_SLOTS] = 1
            rows = np.frombuffer(process.stdout.read(), np.int64).reshape(-1, 3)
        seen += [(slot, value, at_ns / 1e9) for slot, value, at_ns in rows.tolist()]


def marks(machine: Any, results: Results) -> None:
    """Latency and cost of marks, and their use with graphs, several streams and a full queue."""
    made = _Marks(machine)
    results.add_fact("anonymous shared memory can be mapped for the GPU", True)
    results.add_fact("its address is the same on the GPU", made.writes.base == made.memory.address)
    for name, part in _PARTS.items():
        results.attempt(name, lambda part=part: part(machine, made, results))  # type: ignore[misc]


def _idle_stream(machine: Any, made: _Marks, results: Results) -> None:
    machine.synchronize()
    calls_s, delays_s = [], []
    for number in range(1, machine.turns(1000) + 1):
        began_s = time.perf_counter()
        made.mark(0, number)
        called_s = time.perf_counter()
        while made.words[0] != number:
            pass
        delays_s.append(time.perf_counter() - began_s)
        calls_s.append(called_s - began_s)
        time.sleep(0.0005)
    add_times(results, "idle stream, from the call until the mark is visible", delays_s, p99_at_most_ms=0.5)
    add_times(results, "idle stream, the call", calls_s)


def _busy_stream(machine: Any, made: _Marks, results: Results) -> None:
    marks = machine.turns(500)
    for what, pause_s in (("polled without a pause", 0.0), ("polled at 1 kHz", _PAUSE_S)):
        machine.sleep(_LENGTH_S)
        machine.synchronize()
        with made.polled(pause_s) as seen:
            origin, ends = machine.timed_event(), []
            for number in range(1, marks + 1):
                machine.sleep(_LENGTH_S)
                ends.append(machine.timed_event())
                made.mark(number % 20, number)
            machine.synchronize()
        since_s = {number: origin.elapsed_time(event) / 1e3 for number, event in enumerate(ends, 1)}
        late_s = [at_s - since_s[value] for _, value, at_s in seen]
        results.add(f"busy stream, {what}: marks seen", len({value for _, value, _ in seen}), at_least=marks)
        in_order = all(one[2] <= next_[2] for one, next_ in pairwise(seen))
        results.add_fact(f"busy stream, {what}: in order", in_order)
        add_times(
            results,
            f"busy stream, {what}: from the event until it is seen, beyond the least",
            [each - min(late_s) for each in late_s],
            p99_at_most_ms=5,
        )


def _gpu_time(machine: Any, made: _Marks, results: Results) -> None:
    """GPU time of a mark between two kernels, of clearing all slots, and of an event."""
    for after, launch, times in (("short", machine.launch_small, 400), ("long", lambda: machine.compute(0.001), 50)):
        for what, extra in (
            ("a mark", lambda: made.mark(3, 1)),
            ("clearing 20 slots at once", lambda: made.writes.fill(machine.stream_handle(), 0, 20)),
            ("an event", machine.timed_event),
        ):
            took_s: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(machine.turns(20)):
                machine.synchronize()
                machine.sleep(0.02)  # the host must be ahead
                begun = machine.timed_event()
                for _ in range(machine.turns(times)):
                    launch()
                    if turn % 2:
                        extra()
                ended = machine.timed_event()
                machine.synchronize()
                took_s[turn % 2 == 1].append(begun.elapsed_time(ended) / 1e3)
            with_s, without_s = (statistics.median(took_s[each]) / machine.turns(times) for each in (True, False))
            results.add(f"GPU time of {what} after a {after} kernel", (with_s - without_s) * 1e6, "µs")
        results.add(f"GPU time of the {after} kernel", without_s * 1e6, "µs")


def _after_a_copy(machine: Any, made: _Marks, results: Results) -> None:
    """Data copied to the host before a mark is visible when the mark is."""
    wrong = 0
    for number in range(1, machine.turns(1000) + 1):
        read = machine.copy_to_host(number)
        made.mark(4, number)
        while made.words[4] != number:
            pass
        wrong += read() != number
    results.add("copies that were not there when their mark was", wrong, at_most=0)


def _several_streams(machine: Any, made: _Marks, results: Results) -> None:
    streams = [machine.new_stream() for _ in range(3)]
    with made.polled(0.0) as seen:
        for number in range(1, machine.turns(100) + 1):
            for slot, stream in enumerate(streams):
                with machine.using(stream):
                    machine.sleep(_LENGTH_S / (slot + 1))
                    made.mark(slot, number, stream)
        machine.synchronize()
    for slot in range(3):
        values = [value for at, value, _ in seen if at == slot]
        results.add_fact(f"stream {slot}: all marks, in order", values == list(range(1, machine.turns(100) + 1)))


def _graph(machine: Any, made: _Marks, results: Results) -> None:
    """A graph of passes and marks, replayed ahead of the GPU between eager marks."""
    positions, iterations = 20, machine.turns(100)
    begin, end = 40, 41

    def body() -> None:
        for position in range(positions):
            machine.sleep(_LENGTH_S)
            made.mark(position, 7)

    graph = machine.captured(body)
    for what, pause_s in (("polled without a pause", 0.0), ("polled at 1 kHz", _PAUSE_S)):
        machine.synchronize()
        with made.polled(pause_s) as seen:
            began_s = time.perf_counter()
            for number in range(1, iterations + 1):
                made.writes.fill(machine.stream_handle(), 0, positions)
                made.mark(begin, number)
                graph.replay()
                made.mark(end, number)
            issued_s = time.perf_counter() - began_s
            machine.synchronize()
        results.add(f"graph, {what}: issuing an iteration", issued_s / iterations * 1e3, "ms")
        all_of_them, but_the_last = _complete(seen, positions, begin)
        results.add(f"graph, {what}: iterations all of whose marks were seen, in order", all_of_them)
        # The next iteration clears the last mark within microseconds; its begin mark implies the last one.
        results.add(f"graph, {what}: all but the last one", but_the_last, at_least=iterations)
    gaps_s = [later[2] - sooner[2] for sooner, later in pairwise(seen) if later[1] == 7]
    results.add("graph, polled at 1 kHz: between two marks, median", statistics.median(gaps_s) * 1e3, "ms")


def _complete(seen: list[tuple[int, int, float]], positions: int, begin: int) -> tuple[int, int]:
    """Return the number of iterations with all positions in order, and with all but the last."""
    complete, but_the_last, reached = 0, 0, []
    for slot, value, _ in [*seen, (begin, -1, 0.0)]:
        if slot == begin:
            complete += reached == list(range(positions))
            but_the_last += reached in (list(range(positions)), list(range(positions - 1)))
            reached = []
        elif slot < positions and value == 7:
            reached.append(slot)
    return complete, but_the_last


def _external_events(machine: Any, made: _Marks, results: Results) -> None:
    """Durations of passes inside a graph, by torch's external events."""
    events = [machine.external_event() for _ in range(5)]

    def body() -> None:
        events[0].record()
        for event in events[1:]:
            machine.sleep(_LENGTH_S)
            event.record()

    graph = machine.captured(body)
    ratios = []
    for _ in range(machine.turns(20)):
        graph.replay()
        machine.synchronize()
        ratios += [a.elapsed_time(b) / 1e3 / _LENGTH_S for a, b in pairwise(events)]
    results.add("external events in a graph: span to length, median", statistics.median(ratios), at_least=0.9)


def _full_queue(machine: Any, made: _Marks, results: Results) -> None:
    """Time of a call when the launch queue is full, and how long another thread stalls during it."""
    longest_s, stop = [0.0], threading.Event()

    def count() -> None:
        before_s = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0002)
            now_s = time.perf_counter()
            longest_s[0] = max(longest_s[0], now_s - before_s)
            before_s = now_s

    for what, mark in (("without marks", False), ("with marks", True)):
        machine.synchronize()
        stop.clear()
        longest_s[0] = 0.0
        watch = threading.Thread(target=count)
        watch.start()
        launches_s, marks_s = [], []
        for number in range(machine.turns(4000)):
            began_s = time.perf_counter()
            machine.sleep(0.0003)
            launched_s = time.perf_counter()
            if mark:
                made.mark(5, number + 1)
                marks_s.append(time.perf_counter() - launched_s)
            launches_s.append(launched_s - began_s)
        stop.set()
        watch.join()
        machine.synchronize()
        add_times(results, f"full queue, {what}: a launch", launches_s[len(launches_s) // 2 :])
        if marks_s:
            add_times(results, "full queue: a mark", marks_s[len(marks_s) // 2 :])
        results.add(f"full queue, {what}: longest pause of another Python thread", longest_s[0] * 1e3, "ms")


def _ahead(machine: Any, made: _Marks, results: Results) -> None:
    """Number of kernels that the driver accepts before a launch waits, by what follows each."""
    recorded: list[Any] = []  # an event that has been freed might be recorded again
    for what, extra in (
        ("nothing", lambda: None),
        ("a mark", lambda: made.mark(5, 1)),
        ("an event", lambda: recorded.append(machine.timed_event())),
        ("a blocking event", lambda: recorded.append(machine.timed_event(blocking=True))),
    ):
        machine.synchronize()
        for _ in range(machine.turns(1500)):
            machine.sleep(_LENGTH_S)
            extra()
        issued_s = time.perf_counter()
        machine.synchronize()
        ahead = (time.perf_counter() - issued_s) / _LENGTH_S
        results.add(f"kernels that the host is ahead, with {what} after each", ahead)


def _busy_thread(machine: Any, made: _Marks, results: Results) -> None:
    """Time of the call next to a thread of pure Python, with and without the interpreter's lock."""
    libraries: dict[str, Callable[[str], Any]] = {"kept": ctypes.PyDLL, "released": ctypes.CDLL}
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    busy = threading.Thread(target=count)
    busy.start()
    try:
        for what, load in libraries.items():
            write = getattr(load(machine.stream_write_names.library), machine.stream_write_names.write)
            write.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            stream, address = machine.stream_handle(), made.writes.base + 24
            calls_s = []
            for number in range(1, machine.turns(200) + 1):
                time.sleep(0.001)
                began_s = time.perf_counter()
                write(stream, address, number, 0)
                calls_s.append(time.perf_counter() - began_s)
            add_times(results, f"beside a busy Python thread, the interpreter's lock {what}: the call", calls_s)
    finally:
        stop.set()
        busy.join()


def _hot_call(machine: Any, made: _Marks, results: Results) -> None:
    """The client's call, with stream lookup, back to back and after 8 ms of sleep."""
    for what, marks, pause_s in (("back to back", 500, 0.0), ("after 8 ms of sleep", 200, 0.008)):
        machine.synchronize()
        calls_s = []
        for number in range(1, machine.turns(marks) + 1):
            if pause_s:
                time.sleep(pause_s)
            began_s = time.perf_counter()
            made.mark(7, number)
            calls_s.append(time.perf_counter() - began_s)
        add_times(results, f"a mark, {what}", calls_s)


_PARTS: dict[str, Callable[[Any, _Marks, Results], None]] = {
    "idle stream": _idle_stream,
    "hot call": _hot_call,
    "busy stream": _busy_stream,
    "GPU time": _gpu_time,
    "after a copy": _after_a_copy,
    "several streams": _several_streams,
    "graph": _graph,
    "external events": _external_events,
    "kernels ahead": _ahead,
    "busy thread": _busy_thread,
    "full queue": _full_queue,
}
