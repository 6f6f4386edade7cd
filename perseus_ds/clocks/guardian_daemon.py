"""The guardian, a process of its own that ranks start; their side, and what it is for, is in ``guardian.py``.

It imports neither torch nor DeepSpeed, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import syslog
from functools import partial

from perseus_ds.clocks.lock_records import LockRecord, all_records, guardian_path, lock
from perseus_ds.errors import GpuError
from perseus_ds.gpu.base import Gpu
from perseus_ds.timebase import REAL_TIME, Timebase

_FIRST_RANK_TIMEOUT_S = 10.0
_POLL_S = 0.1
_HUNG_S = 10.0
_RETRY_S, _INSIST_S = 0.5, 120.0
"""How often a driver that refuses to reset a clock is asked again, and for how long."""


def open_gpu(address: str) -> Gpu:
    """Return the GPU of an address.

    Raises:
        GpuError: It cannot be opened.
    """
    device, _, identity = address.partition(":")
    if device == "nvml":
        from perseus_ds.gpu.nvml import NvmlGpu, index_of_uuid

        return NvmlGpu(index_of_uuid(identity))
    if device == "zeus":
        from perseus_ds.gpu.zeus import open_address

        return open_address(identity)
    raise GpuError(f"Unknown GPU address {address!r}: expected nvml:… or zeus:….")


class ClockRestorer:
    """Resets the clocks that processes of a job have left locked, each GPU's on a thread, because a driver may hang."""

    def __init__(self, job: str, timebase: Timebase = REAL_TIME) -> None:
        self._job = job
        self._time = timebase
        # By address: the records of dead processes, while there is no living one; and until when they are waited for.
        self._left: dict[str, list[LockRecord]] = {}
        self._living: dict[str, list[LockRecord]] = {}
        self._until_s: dict[str, float] = {}
        self._watched: set[str] = set()

    def serve(self) -> None:
        """Serve until the last process of the job is gone, or none came."""
        now_s = self._time.now_s()
        first_by_s, is_needed = now_s + _FIRST_RANK_TIMEOUT_S, True
        while is_needed:
            self._time.sleep(_POLL_S)
            try:
                is_needed = self._look() or not (self._watched or self._time.now_s() >= first_by_s)
                now_s = self._time.now_s()
            except (OSError, RuntimeError):  # too many files or threads, or no folder: tried again
                is_needed = self._time.now_s() < now_s + _INSIST_S
        if self._left:
            gpus = ", ".join(self._left)
            syslog.syslog(syslog.LOG_ERR, f"perseus-ds: clocks of {gpus} may stay locked: run `perseus-ds reset`")

    def _look(self) -> bool:
        """See which clocks are left; returns whether this process is still needed."""
        records = all_records()
        held = {record.address for record, lives in records if lives}
        left: dict[str, list[LockRecord]] = {}
        living: dict[str, list[LockRecord]] = {}
        for record, lives in records:
            if record.job != self._job:
                continue
            if lives:
                living.setdefault(record.address, []).append(record)
            elif record.address in held:
                record.forget()  # by the record of the living process the clock is reset later
            else:
                left.setdefault(record.address, []).append(record)
        now_s = self._time.now_s()
        self._until_s.update(dict.fromkeys(left.keys() - self._left.keys(), now_s + _HUNG_S))
        self._left = left
        self._living = living
        for address in (living.keys() | left.keys()) - self._watched:
            self._time.thread(partial(self._keep, address), f"perseus-{address}").start()
            self._watched.add(address)
        return bool(living) or any(now_s < self._until_s[address] for address in left)

    def _keep(self, address: str) -> None:
        """Reset the clock of a GPU whenever it is left, and tell its processes that this can be done."""
        gpu: Gpu | None = None
        end_s = math.inf
        told: set[LockRecord] = set()
        while True:
            pause_s = _POLL_S
            new = [record for record in self._living.get(address, ()) if record not in told]
            left = [record for record in self._left.get(address, ()) if record.path.exists()]
            now_s = self._time.now_s()
            end_s = min(end_s, now_s + _INSIST_S) if left else math.inf
            if (left or new or gpu is None) and now_s < end_s:
                self._until_s[address] = now_s + _HUNG_S
                try:
                    gpu = gpu or open_gpu(address)
                    for record in new:
                        record.tell_watched()
                        told.add(record)
                    if left:
                        gpu.reset_clock()
                    for record in left:
                        record.forget()
                except Exception:  # whatever it is, nobody else would try again
                    pause_s = _RETRY_S
            self._time.sleep(pause_s)


def main() -> None:
    """Become the guardian of a job, unless another process is; some GPUs are opened first to see whether that works."""
    job, *addresses = sys.argv[1:]
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ.pop(variable, None)  # Each rank may see another part of the node's GPUs.
    for address in addresses:
        open_gpu(address).close()
    if os.fork():
        return  # The guardian is the child, an orphan: it is not in the job's process tree.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    path = guardian_path(job)
    with contextlib.suppress(OSError):  # another rank has started it already
        lock(path)
        ClockRestorer(job).serve()
        path.unlink(missing_ok=True)
