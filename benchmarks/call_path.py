"""Counts the functions of Perseus between ``train_batch`` and the driver, and for a record.

    python benchmarks/call_path.py
    python benchmarks/call_path.py --count    # how many functions are called for each pass, and for each iteration

One rank of DeepSpeed trains under a plan that changes the clock at every pass, on the tests' stub driver. One iteration
is traced with ``sys.setprofile``, the agent's part being a thread of this process. Printed are the functions that are
open when the training thread marks a pass, those that are open on the agent's thread when the driver is called, and the
same for a record; and how many functions were called on each side, those that have returned included.

Counted are all functions that the training thread calls, written in Python or in C, less those that it calls for the
same engine without Perseus. Iterations with two numbers of micro-batches tell what is for each pass, loads of
micro-batches included, from what is for each iteration. Under the plan, the clock changes at every pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = str(ROOT / "perseus_ds") + os.sep
_DRIVER = "nvmlDeviceSetGpuLockedClocks"
_WAITS = ("threading.py", "timebase.py", "queue.py", "selectors.py")
_MICRO_BATCHES, _PASS_S, _WARM_UP = 4, 0.05, 6
_COUNTED_MICRO_BATCHES, _COUNTED = (8, 24), 4


class Trace:
    """The calls of Perseus's functions on every thread.

    Attributes:
        at_driver: Of each call of the driver: functions that are open, functions called since the thread last waited.
        at_write: The same for each line of ``run.jsonl``.
        at_request: The same, on the training thread, for each mark; counted from the engine's call.
        at_record: The same for each record handed over; counted from there.
    """

    def __init__(self) -> None:
        self.at_driver: list[tuple[list[str], int]] = []
        self.at_write: list[tuple[list[str], int]] = []
        self.at_request: list[tuple[list[str], int]] = []
        self.at_record: list[tuple[list[str], int]] = []
        self._calls: dict[int, int] = {}
        self._training = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note an event of :func:`sys.setprofile`."""
        thread = threading.get_ident()
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call":
            if file.startswith(_PACKAGE):
                if thread == self._training and not _is_ours(frame.f_back):
                    self._calls[thread] = 0  # the engine's own call: earlier calls belong to another one
                self._calls[thread] = self._calls.get(thread, 0) + 1
                if thread == self._training and name == "mark" and file.endswith("layout.py"):
                    self._note(self.at_request, frame)
            elif name == _DRIVER:
                self._note(self.at_driver, frame.f_back)
        elif event == "return" and name in ("wait", "get", "select") and Path(file).name in _WAITS:
            if thread != self._training:
                self._calls[thread] = 0
        elif event == "c_call" and file.startswith(_PACKAGE):
            called = getattr(argument, "__name__", "")
            if thread != self._training and called == "write" and argument is os.write:
                self._note(self.at_write, frame)
            elif thread == self._training and called in ("put", "append") and "write" in name:
                self._note(self.at_record, frame)

    def _note(self, found: list[tuple[list[str], int]], frame: FrameType | None) -> None:
        found.append((_open(frame), self._calls.get(threading.get_ident(), 0)))


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


def _open(frame: FrameType | None) -> list[str]:
    """Return the functions of Perseus that are open, the outermost first."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            names.append(f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names[::-1]


def main() -> None:
    """Run a job on the stub driver in a separate process."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from stub_nvml.controller import StubNvml, build  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        stub = StubNvml(build(Path(folder)), Path(folder) / "state", 1)
        folders = (ROOT, ROOT / "benchmarks", ROOT / "tests" / "support")
        path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **stub.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

        def child(*arguments: object) -> list[str]:
            command = [sys.executable, __file__, "--child", *map(str, arguments)]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            return done.stdout.splitlines()

        if sys.argv[1:] == ["--count"]:
            for mode in ("observe", "run"):
                _print_counts(mode, [json.loads(child(mode, number)[-1]) for number in _COUNTED_MICRO_BATCHES])
        else:
            print("\n".join(child()))


def trace() -> None:
    """Train until the plan runs, trace some iterations and print one of them."""
    import overhead  # type: ignore[import-not-found]
    import torch
    from virtual import agent  # type: ignore[import-not-found]

    from perseus_ds.runtime import runtime
    from perseus_ds.timebase import REAL_TIME

    runtime.clocks_of = lambda gpu, device: agent.clocks_of(gpu, REAL_TIME)  # type: ignore[attr-defined]
    _, frontier = overhead._plan(micro_batches=_MICRO_BATCHES)
    block = {"mode": "run", "device": "nvml", "output_dir": tempfile.mkdtemp(), "frontier": frontier}
    found = Trace()
    threading.setprofile(found)  # of threads that start from now on
    engine = overhead._engine(block, _PASS_S, _MICRO_BATCHES)
    data = iter(lambda: (torch.zeros(1, 8), torch.zeros(1, 8)), None)
    for _ in range(_WARM_UP):
        engine.train_batch(data)
    for name in ("at_driver", "at_write", "at_request", "at_record"):
        getattr(found, name).clear()
    sys.setprofile(found)
    engine.train_batch(data)
    engine.train_batch(data)
    time.sleep(1.0)
    sys.setprofile(None)
    _print("from train_batch to the driver", found.at_request, found.at_driver)
    _print("from the end of an iteration to its record", found.at_record, found.at_write)
    sys.stdout.flush()
    os._exit(0)


def count(mode: str, micro_batches: int) -> None:
    """Print how many functions, written in Python and in C, Perseus adds to an iteration."""
    import overhead
    import torch

    _, frontier = overhead._plan(micro_batches=micro_batches)
    block = {"mode": mode, "device": "nvml", "output_dir": tempfile.mkdtemp()}
    engine = overhead._engine({**block, "frontier": frontier} if mode == "run" else block, 0.004, micro_batches)
    data = iter(lambda: (torch.zeros(1, 8), torch.zeros(1, 8)), None)
    with_perseus = type(engine)
    calls: Counter[str] = Counter()
    counted = []
    for engine_class in (with_perseus, with_perseus.__mro__[2]):
        engine.__class__ = engine_class
        for _ in range(_WARM_UP):
            engine.train_batch(data)
        calls.clear()
        sys.setprofile(lambda frame, event, argument: calls.update((event,)))
        for _ in range(_COUNTED):
            engine.train_batch(data)
        sys.setprofile(None)
        counted.append([calls[event] / _COUNTED for event in ("call", "c_call")])
    print(json.dumps([ours - plain for ours, plain in zip(*counted, strict=True)]))
    sys.stdout.flush()
    os._exit(0)


def _print_counts(mode: str, counts: list[list[float]]) -> None:
    few, many = (2 * micro_batches for micro_batches in _COUNTED_MICRO_BATCHES)
    for language, at_few, at_many in zip(("Python", "C"), *counts, strict=True):
        each = (at_many - at_few) / (many - few)
        print(f"{mode}, functions in {language}: {each:.1f} a pass, {at_few - few * each:.0f} an iteration", flush=True)


def _print(what: str, before: list[tuple[list[str], int]], after: list[tuple[list[str], int]]) -> None:
    """Print one side after the other, of each the longest path of those seen."""
    (ours, ours_called), (theirs, theirs_called) = _longest(before), _longest(after)
    path = [*ours, *theirs]
    files = {function.partition(":")[0] for function in path}
    print(f"{what}: {len(path)} functions in {len(files)} files; called: {ours_called} + {theirs_called}")
    for function in ours:
        print(f"  training thread  {function}")
    for function in theirs:
        print(f"  beside it        {function}")


def _longest(found: list[tuple[list[str], int]]) -> tuple[list[str], int]:
    return max(found, key=lambda one: len(one[0]), default=([], 0))


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        trace()
    elif sys.argv[1:2] == ["--child"]:
        count(sys.argv[2], int(sys.argv[3]))
    else:
        main()
