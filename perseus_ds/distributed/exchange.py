"""Numbers of all ranks to rank 0 and its answers back, while training goes on: no thread waits for them.

Each rank's numbers go up the tree, from one first rank of a group to the next, and answers come down the same way. A
leaf sends its own numbers and receives its own answer, however many ranks there are. First ranks pass on what they
receive in callbacks of torch, so that the training thread has no part in it. Messages of ranks go up with the numbers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from perseus_ds.distributed.messages import Messages, words_of
from perseus_ds.distributed.tree import Group, Started, Tree
from perseus_ds.errors import ConnectionLostError

Numbers: TypeAlias = npt.NDArray[np.float64]
Answers: TypeAlias = Callable[[Numbers], tuple[Numbers, Numbers]]
"""Called on rank 0 with the numbers of all ranks, shape (ranks, values); returns what all ranks are told, shape
(common,), and what each of them is told alone, shape (ranks, own)."""
_POLL_S = 0.002
logger = logging.getLogger("perseus_ds")


@dataclass(frozen=True)
class Widths:
    """How many numbers an answer has; the same on all ranks.

    Attributes:
        common: That all ranks are told.
        own: That a rank is told alone.
        message_bytes: How many bytes of messages each rank may send with its numbers.
    """

    common: int
    own: int = 0
    message_bytes: int = 0


class Pending(Protocol):
    """An answer that is on its way."""

    def result(self) -> Numbers:
        """Wait for it; shape (common + own,).

        Raises:
            ConnectionLostError: It may never come.
        """

    def is_there_within(self, timeout_s: float) -> bool:
        """Wait for it for some time [s]; return whether there is nothing left to wait for."""


class PendingAnswer:
    """The answer to this rank.

    Args:
        is_over: Returns whether there is nothing left to wait for.
        wait: Waits for the answer and returns it, shape (common + own,).
    """

    def __init__(self, is_over: Callable[[], bool], wait: Callable[[], torch.Tensor]) -> None:
        self._is_over = is_over
        self._wait = wait

    def result(self) -> Numbers:
        answer: Numbers = self._wait().numpy()
        return answer

    def settle(self) -> None:
        """Wait until it is there, or will not come."""
        with contextlib.suppress(ConnectionLostError):
            self._wait()

    def is_there_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True


def start_exchange(
    tree: Tree, numbers: Sequence[float], answers: Answers, widths: Widths, messages: Messages
) -> PendingAnswer:
    """Begin to exchange numbers for answers; every rank must do so, and only when it has the answer to the last ones.

    Answers are NaN where they cannot be made.

    Args:
        tree: Of all ranks; nothing else is under way on it.
        numbers: Of this rank, as many as of every other.
        answers: Makes the answers, on rank 0.
        widths: Of an answer, and of what is sent with the numbers.
        messages: Of this rank, some of which are sent; on a rank that passes on, it gets those of others.
    """
    own = torch.tensor([numbers], dtype=torch.float64)
    if tree.levels and not tree.levels[0].group.is_first and tree.levels[0].most == 1:
        level = tree.levels[0]
        level.group.start_gather(_with_messages(own, messages, widths))
        received = level.group.start_scatter([], (widths.common + widths.own,))
        return PendingAnswer(received.is_over, received.wait)
    passing = _Passing(tree, answers, widths, messages)
    passing.up(0, own)
    return PendingAnswer(passing.done.done, passing.wait)


class Exchanges:
    """Exchanges of all ranks one after the other; every rank must make it, and begin each of them, alike.

    Args:
        tree: Of all ranks, and used for nothing else.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._last: PendingAnswer | None = None

    def start(self, numbers: Sequence[float], answers: Answers, widths: Widths) -> PendingAnswer:
        """Begin the next one, without messages; see :func:`start_exchange`."""
        if self._last is not None:
            self._last.settle()  # its messages and these must not mix
        self._last = start_exchange(self._tree, numbers, answers, widths, Messages())
        return self._last


class _Passing:
    """One exchange on a rank that passes on numbers of others.

    Attributes:
        done: Gets the answer.
    """

    def __init__(self, tree: Tree, answers: Answers, widths: Widths, messages: Messages) -> None:
        self.done: futures.Future[torch.Tensor] = futures.Future()
        self._tree = tree
        self._answers = answers
        self._widths = widths
        self._messages = messages

    def wait(self) -> torch.Tensor:
        """Wait for the answer, and return it."""
        if not self.done.done():
            connections = self._tree.levels[0].group.connections
            connections.wait(lambda timeout_s: bool(futures.wait([self.done], timeout_s).done))
        return self.done.result()

    def up(self, number: int, numbers: torch.Tensor) -> None:
        """Send the numbers of this rank and those it stands for up from a level."""
        if number == len(self._tree.levels):
            common, own = map(torch.from_numpy, map(np.ascontiguousarray, self._answered(numbers.numpy())))
            self.down(number - 1, common, own)
            return
        level, widths = self._tree.levels[number], self._widths
        rows = _of_size(numbers, level.most)
        if level.group.is_first:
            sent = torch.cat([rows.flatten(), torch.zeros(words_of(widths.message_bytes), dtype=torch.float64)])

            def pass_on(blocks: Callable[[], list[torch.Tensor]]) -> None:
                found = []
                for block, ranks in zip(blocks(), level.below, strict=True):
                    found.append(block[: ranks * rows.shape[1]].view(ranks, -1))
                    if widths.message_bytes:
                        self._messages.add_block(block[rows.numel() :])
                self.up(number + 1, torch.cat(found))

            self._follow(level.group, level.group.start_gather(sent), pass_on)
        else:
            level.group.start_gather(_with_messages(rows, self._messages, widths))
            received = level.group.start_scatter([], (widths.common + level.most * widths.own,))

            def pass_back(block: Callable[[], torch.Tensor]) -> None:
                common, own = block()[: widths.common], block()[widths.common :]
                self.down(number - 1, common, own.view(level.most, widths.own)[: len(numbers)])

            self._follow(level.group, received, pass_back)

    def down(self, number: int, common: torch.Tensor, own: torch.Tensor) -> None:
        """Send the answers for this rank and those it stands for down from a level."""
        for level in reversed(self._tree.levels[: number + 1]):
            parts = torch.split(own, list(level.below))
            blocks = [torch.cat([common, _of_size(part, level.most).flatten()]) for part in parts]
            level.group.start_scatter(blocks, blocks[0].shape)
            own = own[: level.below[0]]
        self.done.set_result(torch.cat([common, own[0]]))

    def _answered(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        try:
            return self._answers(numbers)
        except Exception:  # the other ranks wait for their answers
            logger.exception("perseus: unexpected")
            return np.full(self._widths.common, np.nan), np.full((len(numbers), self._widths.own), np.nan)

    def _follow(self, group: Group, begun: Started[Any], follow: Callable[[Callable[[], Any]], None]) -> None:
        """Go on once a collective is over; who waits for the answer, here or on other ranks, learns of what fails."""

        def go_on(result: Callable[[], Any]) -> None:
            try:
                follow(result)
            except Exception as error:
                self.done.set_exception(group.connections.lose(error))

        begun.then(go_on)


def _with_messages(numbers: torch.Tensor, messages: Messages, widths: Widths) -> torch.Tensor:
    """Return what a rank sends up: numbers, and a block of messages."""
    if not widths.message_bytes:
        return numbers.flatten()
    return torch.cat([numbers.flatten(), messages.take_block(widths.message_bytes)])


def _of_size(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Return numbers with rows added at the end: all ranks of a group send as many."""
    if len(numbers) == rows:
        return numbers.contiguous()
    padded = torch.zeros((rows, numbers.shape[1]), dtype=numbers.dtype)
    padded[: len(numbers)] = numbers
    return padded
