"""Numbers of all ranks to rank 0 and its answers back, while training goes on: no thread waits for them.

Each rank's numbers go up the tree, from one first rank of a group to the next, and answers come down the same way. A
leaf sends its own numbers and receives its own answer, however many ranks there are. First ranks pass on what they
receive in callbacks of torch, so that the training thread has no part in it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.futures import Future

from perseus_ds.distributed.tree import Started, Tree

Numbers: TypeAlias = npt.NDArray[np.float64]
Answers: TypeAlias = Callable[[Numbers], Numbers]
"""Called on rank 0 with the numbers of all ranks, shape (ranks, values); returns answers, shape (ranks, width)."""
_POLL_S = 0.002
logger = logging.getLogger("perseus_ds")


class Pending(Protocol):
    """An answer that is on its way."""

    def result(self) -> Numbers:
        """Wait for it; shape (width,).

        Raises:
            RuntimeError: A rank is gone.
        """

    def is_there_within(self, timeout_s: float) -> bool:
        """Wait for it for some time [s]; return whether there is nothing left to wait for."""


class PendingAnswer:
    """The answer to this rank.

    Args:
        is_over: Returns whether there is nothing left to wait for.
        wait: Waits for the answer and returns it, shape (1 or more, width).
    """

    def __init__(self, is_over: Callable[[], bool], wait: Callable[[], torch.Tensor]) -> None:
        self._is_over = is_over
        self._wait = wait

    def result(self) -> Numbers:
        answer: Numbers = self._wait()[0].numpy()
        return answer

    def settle(self) -> None:
        """Wait until it is there, or will not come."""
        with contextlib.suppress(RuntimeError):
            self._wait()

    def is_there_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True


def start_exchange(tree: Tree, numbers: Sequence[float], answers: Answers, width: int) -> PendingAnswer:
    """Begin to exchange numbers for answers; every rank must do so, and only when it has the answer to the last ones.

    Answers are NaN where they cannot be made.

    Args:
        tree: Of all ranks, and used for nothing else.
        numbers: Of this rank, as many as of every other.
        answers: Makes the answers, on rank 0.
        width: Numbers of an answer.
    """
    own = torch.tensor([numbers], dtype=torch.float64)
    if tree.levels and not tree.levels[0].group.is_first and tree.levels[0].most == 1:
        level = tree.levels[0]
        level.group.start_gather(own)
        received = level.group.start_scatter([], (1, width))
        return PendingAnswer(received.is_over, received.wait)
    passing = _Passing(tree, answers, width)
    passing.up(0, own)
    return PendingAnswer(passing.done.done, passing.done.wait)


class _Passing:
    """One exchange on a rank that passes on numbers of others.

    Attributes:
        done: Gets the answer.
    """

    def __init__(self, tree: Tree, answers: Answers, width: int) -> None:
        self.done: Future[torch.Tensor] = Future()
        self._tree = tree
        self._answers = answers
        self._width = width

    def up(self, number: int, numbers: torch.Tensor) -> None:
        """Send the numbers of this rank and those it stands for up from a level."""
        if number == len(self._tree.levels):
            self.down(number - 1, torch.from_numpy(np.ascontiguousarray(self._answered(numbers.numpy()))))
            return
        level = self._tree.levels[number]
        gathered = level.group.start_gather(_of_size(numbers, level.most))
        if level.group.is_first:

            def pass_on(blocks: Callable[[], list[torch.Tensor]]) -> None:
                found = zip(blocks(), level.below, strict=True)
                self.up(number + 1, torch.cat([block[:ranks] for block, ranks in found]))

            self._follow(gathered, pass_on)
        else:
            count = len(numbers)
            received = level.group.start_scatter([], (level.most, self._width))
            self._follow(received, lambda block: self.down(number - 1, block()[:count]))

    def down(self, number: int, answers: torch.Tensor) -> None:
        """Send the answers for this rank and those it stands for down from a level."""
        for level in reversed(self._tree.levels[: number + 1]):
            blocks = [_of_size(block, level.most) for block in torch.split(answers, list(level.below))]
            level.group.start_scatter(blocks, (level.most, self._width))
            answers = answers[: level.below[0]]
        self.done.set_result(answers)

    def _answered(self, numbers: Numbers) -> Numbers:
        try:
            return self._answers(numbers)
        except Exception:  # the other ranks wait for their answers
            logger.exception("perseus: unexpected")
            return np.full((len(numbers), self._width), np.nan)

    def _follow(self, begun: Started[Any], follow: Callable[[Callable[[], Any]], None]) -> None:
        """Go on once a collective is over; whoever waits for the answer learns of what fails."""

        def go_on(result: Callable[[], Any]) -> None:
            try:
                follow(result)
            except Exception as error:
                self.done.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]

        begun.then(go_on)


def _of_size(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Return numbers with rows added at the end: all ranks of a group send as many."""
    if len(numbers) == rows:
        return numbers.contiguous()
    padded = torch.zeros((rows, numbers.shape[1]), dtype=numbers.dtype)
    padded[: len(numbers)] = numbers
    return padded
