"""Watches the commands of a schedule while an engine executes them, whatever functions it executes them by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Surround = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def watched(pipe_schedule: Any, surround: Surround) -> Iterator[None]:
    """Surround every command that is taken from a schedule, from when it is taken until the next one is asked for.

    An engine takes a command, runs it, and asks for the next: nothing of how it runs commands is replaced.

    Args:
        pipe_schedule: An object with ``steps()``, as DeepSpeed's ``PipeSchedule``; its class and identity stay.
        surround: Called with a command.
    """
    steps = pipe_schedule.steps

    def watched_steps() -> Iterator[_Step]:
        return (_Step(step, surround) for step in steps())

    had_own = "steps" in vars(pipe_schedule)
    pipe_schedule.steps = watched_steps
    try:
        yield
    finally:
        if had_own:
            pipe_schedule.steps = steps
        else:
            del pipe_schedule.steps


class _Step(list[Any]):
    """The commands of one step."""

    def __init__(self, commands: Any, surround: Surround) -> None:
        super().__init__(commands)
        self._surround = surround

    def __iter__(self) -> Iterator[Any]:
        for command in super().__iter__():
            with self._surround(command):
                yield command
