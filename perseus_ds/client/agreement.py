"""How the ranks of a job agree, or raise the same error: the only protocol for this, through the job's own store.

Each rank writes its part, or its error. Rank 0 waits for all parts, decides, and writes the answer, which may be an
error. All ranks return the answer, or raise the error. Rank 0 does so last, since the store ends with its process.
Ranks that are missing are named after 10 s, and in an error after the timeout of the store.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from perseus_ds import errors
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.2
_READ_WITHIN_S = 10.0
"""Time for which rank 0 waits for the others to read an answer [s]: one of them may have been killed."""
_NAMED_AFTER_S, _MOST_NAMED = 10.0, 4
"""Time after which missing ranks are named [s], and the maximum number of names."""


def store_of_job() -> Any:
    """Return the store with which the job's ranks have found each other."""
    return dist.distributed_c10d._get_default_store()


def agree(topic: str, step: str, part: Callable[[], bytes], decide: Callable[[list[bytes]], bytes]) -> bytes:
    """Return the same answer on all ranks. All of them call this together.

    Args:
        topic: What is agreed upon. The n-th call of each rank about a topic belongs to the n-th call of the others.
        step: What ranks that are missing have not done, for messages.
        part: Returns the part of this rank.
        decide: Returns the answer, from the parts of all ranks. Called on rank 0.

    Raises:
        PerseusError: On all ranks, the first error of a rank or of the decision.
    """
    store, rank, key = store_of_job(), dist.get_rank(), _next_key(topic)
    parts = [f"{key}/{other}" for other in range(dist.get_world_size())]
    store.set(parts[rank], _outcome(part))

    def has_come(other: int) -> bool:
        return bool(store.check([parts[other]]))

    def answer() -> bytes:
        return decide([_value(found) for found in await_ranks(store, parts, has_come, step)])

    if rank == 0:
        store.set(f"{key}/answer", _outcome(answer))
    found = await_ranks(store, [f"{key}/answer"], has_come, step)
    _leave(store, f"{key}/read")
    return _value(*found)


def withdraw(topic: str, error: PerseusError) -> None:
    """Raise an error on ranks that call :func:`agree` instead of this function. Does not wait for them."""
    store, rank, key = store_of_job(), dist.get_rank(), _next_key(topic)
    store.set(f"{key}/{rank}", _failure(error))
    store.add(f"{key}/read", 1)
    if rank == 0:
        store.set(f"{key}/answer", _failure(error))


def await_ranks(
    store: Any, keys: Sequence[str], has_come: Callable[[int], bool], step: str, timebase: Timebase = REAL_TIME
) -> list[bytes]:
    """Wait for values that the store has after all ranks have come, without blocking other users of the store.

    After 10 s, the first rank that waits names the ranks that are missing.

    Args:
        store: The job's store.
        keys: Keys of the values.
        has_come: Returns True if a rank, by its number, has come.
        step: What missing ranks have not done, for messages.
        timebase: Timebase for waiting.

    Raises:
        ConfigError: A value is missing after the timeout of the store.
    """
    look_s, begun_s, names_missing = _FIRST_LOOK_S, timebase.now_s(), True
    while not store.check(list(keys)):
        waited_s = timebase.now_s() - begun_s
        if waited_s > _timeout_s(store):
            raise ConfigError(
                f"perseus: {_missing(has_come) or 'a rank'} did not {step} within the timeout of the process "
                "group. Attach on all ranks together. If the variable PERSEUS is set, set it on all of them."
            )
        if names_missing and waited_s >= _NAMED_AFTER_S:
            names_missing = False
            if not any(has_come(other) for other in range(dist.get_rank())) and (missing := _missing(has_come)):
                logger.warning("perseus: waiting for %s to %s.", missing, step)
        timebase.sleep(look_s)
        look_s = min(2 * look_s, _LAST_LOOK_S)
    return [bytes(store.get(key)) for key in keys]


def _leave(store: Any, key: str) -> None:
    """Count this rank as one that has read the answer. On rank 0, wait for the others."""
    look_s, until_s = _FIRST_LOOK_S, REAL_TIME.now_s() + _READ_WITHIN_S
    with contextlib.suppress(RuntimeError):  # rank 0 may have been killed, and the store with it
        readers = store.add(key, 1)
        while dist.get_rank() == 0 and readers < dist.get_world_size() and REAL_TIME.now_s() < until_s:
            REAL_TIME.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
            readers = store.add(key, 0)


def _next_key(topic: str) -> str:
    number = store_of_job().add(f"perseus/{topic}/of/{dist.get_rank()}", 1)
    return f"perseus/{topic}/{number}"


def _outcome(function: Callable[[], bytes]) -> bytes:
    """Return the result of a function or its error, as one text."""
    try:
        return b"+" + function()
    except PerseusError as error:
        return _failure(error)
    except Exception as error:  # the other ranks wait
        return _failure(PerseusError(f"rank {dist.get_rank()}: {error!r}"))


def _failure(error: PerseusError) -> bytes:
    return f"-{type(error).__name__}:{error}".encode()


def _value(outcome: bytes) -> bytes:
    """Return the result of :func:`_outcome`, or raise its error."""
    if outcome.startswith(b"+"):
        return outcome[1:]
    kind, _, text = outcome[1:].decode().partition(":")
    raise getattr(errors, kind, PerseusError)(text)


def _missing(has_come: Callable[[int], bool]) -> str:
    """Return the names of ranks that have not come, such as ``ranks 1, 2, 3 and 4 others``. Empty if all have."""
    missing = [rank for rank in range(dist.get_world_size()) if not has_come(rank)]
    if not missing:
        return ""
    named = ", ".join(map(str, missing[:_MOST_NAMED]))
    others = len(missing) - _MOST_NAMED
    return f"rank{'s' * (len(missing) > 1)} {named}" + (f" and {others} others" if others > 0 else "")


def _timeout_s(store: Any) -> float:
    try:
        return float(store.timeout.total_seconds())
    except AttributeError:
        return math.inf
