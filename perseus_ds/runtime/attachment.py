"""Perseus on one engine or schedule that trains, whatever it is: made when it first trains, closed with it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from perseus_ds.errors import PerseusError
from perseus_ds.policy.control_socket import parse_order
from perseus_ds.runtime.config import PerseusConfig
from perseus_ds.runtime.runtime import PerseusRuntime

logger = logging.getLogger("perseus_ds")
# A batch size that changes all the time fits no profile; to go on measuring would only cost.
_MOST_SCHEDULES = 8
# Engines share the GPU of the process, so the one that evaluates must be able to ask the one that trains.
_ATTACHMENTS: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """Perseus on one engine or schedule.

    The runtime is made at the first training iteration: only then is the schedule final. What is asked for
    before is kept until then. Of several engines in a process, the first that trains is measured and planned;
    the others run at default clocks.

    Attributes:
        runtime: Perseus on this rank; None before the engine has trained.
    """

    def __init__(self, config: PerseusConfig, model: str) -> None:
        """Wait for the first training iteration.

        Args:
            config: The ``perseus`` block.
            model: The class of the model, for messages and records.
        """
        self.runtime: PerseusRuntime | None = None
        self._config = config
        self._model = model
        self._waiting: list[Callable[[PerseusRuntime], None]] = []
        self._restored: dict[str, Any] = {}
        self._trained: object = None
        self._schedules = 0
        self._in_iteration = False
        self._closed = False
        _ATTACHMENTS.add(self)

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.runtime is not None and self.runtime.profiled

    @property
    def phase(self) -> str:
        """The phase of the next iteration; ``start`` before the first one."""
        return "start" if self.runtime is None else self.runtime.next.phase

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Run under another policy from the next iterations on; rank 0's counts.

        Args:
            policy: As in the ``perseus`` block, such as ``{"name": "energy_optimal"}``.

        Raises:
            ConfigError: It is no policy; the message names the key.
        """
        parse_order({"command": "policy", "policy": policy})
        self._when_started(lambda runtime: runtime.set_policy(policy))

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Expect a data-parallel pipeline to take longer; see :meth:`PerseusRuntime.set_straggler`."""
        self._when_started(lambda runtime: runtime.set_straggler(pipeline, slowdown, after_iterations))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of Perseus."""
        return self._restored if self.runtime is None else self.runtime.state()

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Take up what a checkpoint kept; every rank must do so at once."""
        self._restored = dict(state)
        self._when_started(lambda runtime: runtime.restore(state, steps))

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again."""
        self._closed = True
        if self.runtime is not None:
            self.runtime.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training: it runs at default clocks."""
        with ExitStack() as stack:
            for attachment in list(_ATTACHMENTS):
                if attachment.runtime is not None and not attachment._in_iteration:
                    stack.enter_context(attachment.runtime.paused())
            yield

    def _steps(self) -> int | None:
        """Return the iterations done, where the engine itself counts them."""
        return None

    def _when_started(self, action: Callable[[PerseusRuntime], None]) -> None:
        if self.runtime is None:
            self._waiting.append(action)
        else:
            action(self.runtime)

    def _runtime_for(self, schedule: object, make: Callable[[Sequence[str]], PerseusRuntime]) -> PerseusRuntime | None:
        """Return the runtime for a schedule; None if another engine of this process trains under Perseus.

        Args:
            schedule: Equal for equal schedules.
            make: Makes a runtime for it, given the models of the other engines of this process.
        """
        if self._closed and self.runtime is None:
            return None
        if self.runtime is None:
            if self._another_trains():
                return None
            self._start(make)
        elif schedule != self._trained:
            self._change_schedule(make)
        self._trained = schedule
        return self.runtime

    def _others(self) -> list[Attachment]:
        """Return the other engines of this process that have Perseus."""
        return [other for other in _ATTACHMENTS if other is not self and not other._closed]

    def _another_trains(self) -> bool:
        others = [other for other in self._others() if other.runtime is not None]
        if others:
            self._closed = True
            if dist.get_rank() == 0:
                logger.warning(
                    "perseus: this process trains two engines, %s and %s. Only the first is measured and planned.",
                    others[0]._model,
                    self._model,
                )
        return bool(others)

    def _start(self, make: Callable[[Sequence[str]], PerseusRuntime]) -> None:
        self.runtime = make([other._model for other in self._others()])
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action(self.runtime)

    def _change_schedule(self, make: Callable[[Sequence[str]], PerseusRuntime]) -> None:
        """Go on with another schedule, such as after a changed batch size: auto mode profiles and plans again."""
        assert self.runtime is not None
        self._schedules += 1
        measures = self._config.mode == "auto" or (self._config.mode == "profile" and not self.runtime.profiled)
        if not measures or self._schedules > _MOST_SCHEDULES:
            self.runtime.schedule_changed()
            return
        state = {key: value for key, value in self.runtime.state().items() if key != "progress"}
        self.runtime.close()
        try:
            self._start(make)
        except PerseusError as error:  # training has started, so that no error of Perseus may end it
            self.runtime, self._closed = None, True
            logger.warning("perseus: %s. Training goes on without Perseus.", str(error).rstrip("."))
            return
        self.runtime.restore(state, steps=self._steps())
