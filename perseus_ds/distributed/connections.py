"""Whether ranks are still connected: once one connection is lost, no rank waits for what may never come.

Who loses a connection tells it to all by the job's store, at which those look who wait for long. So all ranks leave
Perseus, and training, which does not use these connections, goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from perseus_ds.errors import ConnectionLostError

# Short, so that handlers of signals run while a thread waits.
_SLICE_S = 1.0
# A store answers all ranks of a job one after the other.
_LOOK_AFTER_S, _LOOK_EVERY_S = 2.0, 10.0
# Where the job's own is not known: that of NCCL.
_TIMEOUT_S = 600.0


class Connections:
    """Of one rank with others, all of which make it alike; may be used from any thread.

    Args:
        name: The same on all ranks; no other connections have it.
    """

    def __init__(self, name: str) -> None:
        self._store = c10d._get_default_store()
        self._key = f"perseus/{name}/lost"
        self._rank = dist.get_rank()
        self._groups: list[Any] = []
        self._random = random.Random()  # training has its own numbers
        self._cause = ""
        # Before the job's own collectives, which wait for ranks that wait here, end the job.
        self._longest_s = _timeout_s() / 2

    def add(self, group: Any) -> None:
        """Take charge of a group of torch."""
        self._groups.append(group)

    def check(self) -> None:
        """Raise an error if a connection is lost.

        Raises:
            ConnectionLostError: It is.
        """
        if self._cause:
            raise ConnectionLostError(self._cause)

    def lose(self, cause: object) -> ConnectionLostError:
        """Give up all connections because of what has failed on this rank; return the error that says so."""
        told = f"rank {self._rank}: {cause}".splitlines()[0]
        if not self._cause:
            with contextlib.suppress(RuntimeError):  # the store of a job that ends
                self._store.set(self._key, told)
        return self._give_up(told)

    def _give_up(self, cause: str) -> ConnectionLostError:
        if not self._cause:
            self._cause = f"a connection between ranks is lost ({cause})"
            for group in self._groups:
                # Never destroyed: that would wait, at the end of the job, for collectives of which ranks have left.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return ConnectionLostError(self._cause)

    def wait(self, is_over_within: Callable[[float], bool]) -> None:
        """Wait for what other ranks send.

        Args:
            is_over_within: Waits for it for some time [s]; returns whether there is nothing left to wait for.

        Raises:
            ConnectionLostError: It may never come.
        """
        waited_s, look_s = 0.0, _LOOK_AFTER_S
        while True:
            self.check()
            if is_over_within(_SLICE_S):
                return
            waited_s += _SLICE_S  # not by the clock: a scheduler may stop all ranks for hours
            if waited_s >= look_s:
                look_s = waited_s + self._random.uniform(0.5, 1.0) * _LOOK_EVERY_S
                self._look()
            if waited_s > self._longest_s:
                raise self.lose(f"nothing has arrived for {waited_s:.0f} s")

    def _look(self) -> None:
        try:
            is_lost = self._store.check([self._key])
        except RuntimeError as error:
            raise self.lose(f"the job's store does not answer: {error}") from error
        if is_lost:
            raise self._give_up(self._store.get(self._key).decode())


def _timeout_s() -> float:
    """Return how long the job's own collectives may take."""
    try:
        device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
        backend = c10d._get_default_group()._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError, ValueError):
        return _TIMEOUT_S
