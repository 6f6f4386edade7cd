"""Counts the function calls that Perseus adds to the training thread, per pass and per iteration.

    python benchmarks/call_path.py

One rank of DeepSpeed trains on the tests' stub driver, in observe mode and under a plan that changes the clock at every
pass. ``sys.setprofile`` counts all functions, in Python or C, that the training thread calls. Those that it calls for
the same engine without Perseus are subtracted. Two numbers of micro-batches distinguish the calls per pass, which
include loads of micro-batches, from the calls per iteration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MICRO_BATCHES, _WARM_UP, _COUNTED = (8, 24), 6, 4


def main() -> None:
    """Run jobs on the stub driver in separate processes."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from stub_nvml.controller import StubNvml, build  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        stub = StubNvml(build(Path(folder)), Path(folder) / "state", 1)
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **stub.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for mode in ("observe", "run"):
            counts = []
            for micro_batches in _MICRO_BATCHES:
                command = [sys.executable, __file__, mode, str(micro_batches)]
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                counts.append(json.loads(done.stdout.splitlines()[-1]))
            _print_counts(mode, counts)


def count(mode: str, micro_batches: int) -> None:
    """Print the numbers of function calls in Python and in C that Perseus adds to an iteration."""
    import overhead  # type: ignore[import-not-found]
    import torch

    import perseus_ds

    _, frontier = overhead._plan(micro_batches=micro_batches)
    block = {"mode": mode, "device": "nvml", "output_dir": tempfile.mkdtemp()}
    engine = overhead._engine({**block, "frontier": frontier} if mode == "run" else block, 0.004, micro_batches)
    data = iter(lambda: (torch.zeros(1, 8), torch.zeros(1, 8)), None)
    calls: Counter[str] = Counter()
    counted = []
    for attached in (True, False):
        if not attached:
            perseus_ds.detach(engine)
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
    few, many = (2 * micro_batches for micro_batches in _MICRO_BATCHES)
    for language, at_few, at_many in zip(("Python", "C"), *counts, strict=True):
        each = (at_many - at_few) / (many - few)
        print(f"{mode}, functions in {language}: {each:.1f} a pass, {at_few - few * each:.0f} an iteration", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count(sys.argv[1], int(sys.argv[2]))
    else:
        main()
