"""What users want of a running job: policy, stragglers told of, pause. Rank 0's count; they outlive checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import TypeAdapter

from perseus_ds.policy.control_socket import Pause, Resume, SetPolicy, SetStraggler, Status
from perseus_ds.policy.policies import PolicyConfig
from perseus_ds.policy.stragglers import Straggler

logger = logging.getLogger("perseus_ds")
_POLICY: TypeAdapter[PolicyConfig] = TypeAdapter(PolicyConfig)


class Progress(Protocol):
    """What a checkpoint keeps of whoever carries orders out."""

    def state(self) -> dict[str, Any]:
        """Return it as plain values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it up; empty if there is none for the policy as it is."""


class Orders:
    """Read at iteration boundaries, changed at any time by any thread.

    Attributes:
        policy: Which plan to run.
        paused: Whether to run at default clocks.
        steps: Steps done, those before a checkpoint included.
        last: The record of the last iteration.
        decided: What the next one runs, as ``status`` tells it.
        progress: Who carries orders out, once plans are run.
    """

    def __init__(self, policy: PolicyConfig, pipelines: int) -> None:
        self.policy = policy
        self._configured = policy
        self.paused = False
        self.steps = 0
        self._pipelines = pipelines
        self._lock = threading.Lock()
        self._told: dict[int, tuple[int, float]] = {}
        self.last: dict[str, Any] = {}
        self.decided: dict[str, Any] = {}
        self.progress: Progress | None = None

    def straggler(self) -> Straggler | None:
        """Return the slowest of the stragglers told of, if one is due."""
        with self._lock:
            due = [Straggler(p, slowdown) for p, (step, slowdown) in self._told.items() if self.steps >= step]
        return max(due, key=lambda straggler: straggler.slowdown, default=None)

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Be told of a straggler.

        Raises:
            ValueError: There is no such pipeline, or the slowdown is below 1.
        """
        if not 0 <= pipeline < self._pipelines:
            raise ValueError(
                f"pipeline: there is no pipeline {pipeline}; they are numbered 0 to {self._pipelines - 1}."
            )
        if not slowdown >= 1:
            raise ValueError(f"slowdown: expected at least 1 (1 ends it), got {slowdown}.")
        with self._lock:
            if slowdown == 1:
                self._told.pop(pipeline, None)
            else:
                self._told[pipeline] = (self.steps + after_iterations, slowdown)

    def carry_out(self, order: Status | SetPolicy | SetStraggler | Pause | Resume) -> dict[str, Any]:
        """Do what was asked from outside; return what to answer.

        Raises:
            ValueError: It cannot be done; nothing has changed.
        """
        if isinstance(order, Status):
            asked = {"paused": self.paused, "policy": self.policy.model_dump(mode="json")}
            return {"status": {**self.decided, **self.last, **asked}}
        if isinstance(order, SetPolicy):
            self.policy = order.policy
            return {"done": f"policy {order.policy.name} from the next iterations on"}
        if isinstance(order, SetStraggler):
            self.set_straggler(order.pipeline, order.slowdown, order.after_iterations)
            return {"done": f"pipeline {order.pipeline} is expected to take {order.slowdown:g} times as long"}
        self.paused = isinstance(order, Pause)
        if not self.paused:
            return {"done": "plans again"}
        return {"done": "default clocks" if self.progress else "default clocks, once the job has profiled itself"}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        with self._lock:
            told = {str(p): [step, slowdown] for p, (step, slowdown) in self._told.items()}
        return {
            "policy": self.policy.model_dump(mode="json"),
            "configured": self._configured.model_dump(mode="json"),
            "paused": self.paused,
            "steps": self.steps,
            "told": told,
            "progress": self.progress.state() if self.progress else {},
        }

    def restore(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Take up what a checkpoint kept, if anything; a policy that the config has changed since is the config's."""
        progress: Mapping[str, Any] = {}
        if state:
            try:
                progress = self._take_up(state)
            except (KeyError, TypeError, ValueError) as error:  # saved by another version
                logger.warning("perseus: what the checkpoint says of Perseus cannot be read (%r); ignored.", error)
        self.steps = self.steps if steps is None else steps
        if self.progress:
            self.progress.restore(progress)

    def _take_up(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is for :attr:`progress`."""
        policy, configured = (_POLICY.validate_python(state[key]) for key in ("policy", "configured"))
        told = {int(p): (int(step), float(s)) for p, (step, s) in state["told"].items()}
        paused, steps, progress = bool(state["paused"]), int(state["steps"]), dict(state["progress"])
        with self._lock:
            self._told = {p: entry for p, entry in told.items() if p < self._pipelines}
            self.paused, self.steps = paused, steps
            if configured != self._configured:
                return {}
            self.policy = policy
        return progress
