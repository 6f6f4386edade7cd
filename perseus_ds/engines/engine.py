"""The interface of engines: what Perseus needs from a pipeline engine, and what it offers.

An engine is a subclass of :class:`Engine`. It describes the training (:meth:`~Engine.facts`) and the schedule
(:meth:`~Engine.read`), and reports begins and ends to a :class:`Session` (:meth:`~Engine.surround`)::

    with session.iteration(order):              # the passes of a training iteration
        with session.operation(operation): …    # each of them, and each transfer that the schedule names
    session.end_iteration()                     # work since the passes, such as the optimizer's step, is the tail

A session creates the runtime when its engine first trains, stores requests made before, follows schedules that change,
and is closed with its engine, also if that is dropped without being detached. While a CUDA graph is captured, nothing
is executed: the session has the graph mark and time its passes, and each replay of it is an iteration of the captured
order. Nothing below this folder depends on a particular engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from perseus_ds.artifacts.plan import check_ranks
from perseus_ds.client.agreement import agree, store_of_job, withdraw
from perseus_ds.client.at_exit import AtExit
from perseus_ds.client.devices import gpu_of
from perseus_ds.client.meeting import STARTED, Monitor, Training, key_of, local_rank, own_versions
from perseus_ds.client.operations import NOTHING
from perseus_ds.client.runtime import PerseusRuntime
from perseus_ds.config import PerseusConfig
from perseus_ds.engines.graphs import CudaGraphs, Run
from perseus_ds.errors import ConfigError, GpuError, PerseusError, ScheduleError, VersionError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.policy.commands import parse_command
from perseus_ds.protocol.job_messages import RankFacts
from perseus_ds.protocol.layout import DEFAULT_CLOCKS
from perseus_ds.server.frontiers import read_frontier

logger = logging.getLogger("perseus_ds")
# Settings that may differ between ranks: locations of files, and simulated GPUs.
_MAY_DIFFER = {"output_dir", "frontier", "simulated"}
_LARGEST_COUNT = 2**53
_CHECKED = "checked"
"""Topic of the agreement before the schedule is known."""
_SAME_ON_ALL = "Give all ranks the same perseus block, and install the same versions."
_OWN_ERROR = (
    "an error in Perseus itself, which should not happen. This rank trains without Perseus from now on, and the job "
    "runs at default clocks. Please report it with these lines."
)
_NOT_CAPTURED = (
    "a CUDA graph of a whole iteration was captured, but Perseus cannot mark its passes, so its replays run at default "
    "clocks. Plans for captured iterations need an NVIDIA GPU, a torch that accepts torch.cuda.Event(external=True), "
    "and at least one iteration before the capture"
)
# Engines share the GPU of the process, so an engine that evaluates must be able to pause the one that trains.
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


class SessionState(Enum):
    """What a session's engine does. Captures of CUDA graphs do not change it."""

    WAITING = "it has not trained yet, or another engine of the process is planned"
    BETWEEN = "between two iterations"
    PASSES = "the passes of an iteration"
    TAIL = "the end of an iteration, after its passes"
    CLOSED = "it trains without Perseus from now on"


class Engine(ABC):
    """A pipeline engine on this rank.

    Attributes:
        starts_late: Whether a schedule is known only after an iteration. In auto mode, training then continues without
            Perseus if the schedule cannot be planned.
    """

    starts_late = False

    @property
    @abstractmethod
    def model(self) -> str:
        """Class name of the model, for messages and records."""

    @abstractmethod
    def facts(self) -> RankFacts:
        """Return the facts about the training on this rank that the engine knows. Called before the engine trains."""

    @abstractmethod
    def device(self) -> torch.device | None:
        """Return the device of the rank's tensors.

        An engine that starts late may return None before it trains, if the device is unknown.
        """

    def monitor(self) -> Monitor | None:
        """Return what receives the time and energy of every iteration, as DeepSpeed's monitor does. None if nothing."""
        return None

    @abstractmethod
    def read(self) -> Schedule:
        """Return the operations of this rank in an iteration. Raises a ``ScheduleError`` on failure."""

    def check(self, schedule: Schedule) -> None:  # noqa: B027  # most engines have nothing to add
        """Check the schedule of all ranks of the pipeline. Raises a ``ScheduleError`` if it cannot be planned."""

    def check_order(self) -> None:  # noqa: B027  # most engines know it later
        """Check before training that the order can be read. Raises a ``ScheduleError`` if it cannot."""

    @abstractmethod
    def surround(self, session: Session) -> None:
        """Start to report iterations and operations to a session."""

    @abstractmethod
    def release(self) -> None:
        """Restore the engine to its state before :meth:`surround`."""

    def pipeline_ranks(self) -> int | None:
        """Return the number of pipeline ranks of an engine that starts late, for checks before training."""
        return None

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that train, except torch and Perseus."""
        return {}


@dataclasses.dataclass
class _PlannedEngine:
    """The engine of this process that is measured and planned, for one that waits until it is closed or dropped.

    Attributes:
        session: Its session. The engine that waits does not keep it.
        ended: Set when the session is closed.
        waited: Number of iterations that the other engine has trained since.
    """

    session: weakref.ref[Session]
    ended: threading.Event
    waited: int = 0

    def is_over(self) -> bool:
        """Return whether it no longer trains, which all ranks find at the same iteration. Called once per iteration.

        An engine that was dropped is freed by a collection of garbage, at other times on other ranks. It is therefore
        only looked for after a collection here, which takes time and is done ever more rarely.
        """
        if self.ended.is_set():
            return True
        self.waited += 1
        if self.waited & (self.waited - 1):  # not a power of two
            return False
        gc.collect()
        return self.session() is None


class Session:
    """Perseus on one engine, as ``engine.perseus``.

    The runtime is created at the first training iteration, because only then is the schedule final. Earlier requests
    are stored until then. Of several engines in a process, the first that trains is measured and planned. The others
    run at default clocks until it is detached, closed or dropped.

    Attributes:
        state: What its engine does.
        runtime: Perseus on this rank. None before the engine has trained.
        operation: Context of one operation of an iteration, as :meth:`PerseusRuntime.operation`. Engines report all
            operations, whether they are timed or not. A no-op outside of the passes of an iteration.
        add_tokens: Counts tokens in the inputs of an iteration. Engines that know them call it on the first stage.
    """

    def __init__(self, engine: Engine, config: PerseusConfig) -> None:
        self.engine = engine
        self.config = config
        self.runtime: PerseusRuntime | None = None
        self._waiting: list[Callable[[PerseusRuntime], None]] = []
        self.operation: Callable[..., AbstractContextManager[None]] = _no_operation
        self.add_tokens: Callable[[int], None] = _no_tokens
        self.state = SessionState.WAITING
        self._iteration = ExitStack()  # contexts of the current iteration
        self._captured: ExitStack | None = None  # those of the one that is being captured
        step_aside = weakref.WeakMethod(self.step_aside)  # torch keeps the graphs' hooks
        self._graphs = CudaGraphs(lambda error: (function := step_aside()) and function(error))
        self._is_checked = dist.is_initialized()
        self._ended = threading.Event()
        self._waits_for: _PlannedEngine | None = None
        self._at_exit: AtExit | None = None
        weakref.finalize(self, self._graphs.remove).atexit = False
        _SESSIONS.add(self)

    @property
    def profiled(self) -> bool:
        """True if the profile is complete."""
        return self.runtime is not None and self.runtime.profiled

    @property
    def is_captured(self) -> bool:
        """True while a CUDA graph is captured, so that what the engine runs is not executed."""
        return self._graphs.capturing is not None

    @property
    def phase(self) -> str:
        """Phase of the last iteration that has begun, or of the first one. ``start`` before the job has met."""
        return "start" if self.runtime is None else self.runtime.phase

    @property
    def plan(self) -> int | None:
        """Plan of the current iteration, as an index of the frontier. None at default clocks."""
        return None if self.runtime is None else self.runtime.follow.plan

    def use_default_clocks(self) -> None:
        """Run the rest of the current iteration at default clocks."""
        if self.runtime is not None:
            self.runtime.clocks.change_program(DEFAULT_CLOCKS)

    def set_goal(self, goal: Mapping[str, Any]) -> None:
        """Change the goal, for example to ``{"max_slowdown": 0.05}``, for the following iterations.

        Only the call on rank 0 has an effect.

        Raises:
            ConfigError: The goal is invalid. The message names the key.
        """
        parse_command({"command": "set", "goal": goal})
        self._when_started(lambda runtime: runtime.command({"command": "set", "goal": dict(goal)}))

    def set_straggler(self, pipeline: int, slowdown: float, after_iterations: int = 0) -> None:
        """Report that a data-parallel pipeline takes longer, from a number of iterations on. 1 ends it.

        Only the call on rank 0 has an effect.
        """
        report = {"pipeline": pipeline, "slowdown": slowdown, "after_iterations": after_iterations}
        self._when_started(lambda runtime: runtime.command({"command": "straggler", **report}))

    def set_steps(self, steps: int) -> None:
        """Report the number of finished training steps, for example after a checkpoint was loaded.

        Only the call on rank 0 has an effect. DeepSpeed and Megatron-LM report it themselves. Otherwise, a job that is
        started again continues to count from the step at which it was stopped.
        """
        self._when_started(lambda runtime: runtime.set_steps(steps))

    def add_steps(self, steps: int) -> None:
        """Count steps that are not reported as iterations, or, if negative, iterations that are no step of their own.

        Engines call it. An iteration counts as one step otherwise.
        """
        self._when_started(lambda runtime: runtime.add_steps(steps))

    def check_before_training(self) -> None:
        """Check settings, GPUs and frontier, if ranks were not connected yet when it was attached."""
        if not self._is_checked:
            _check_before_training(self.engine, self.config)
            self._is_checked = True

    def start(self, order: Hashable) -> PerseusRuntime | None:
        """Create the runtime, unless it exists. All ranks call this together, with a known schedule.

        Args:
            order: Key of that schedule, as in :meth:`iteration`.

        Returns:
            The runtime. None if this engine trains without Perseus, for example because another one is measured.
        """
        if self.state is SessionState.CLOSED:
            return None
        if self.state is not SessionState.WAITING:
            return self.runtime
        if self._waits_for is not None and not self._waits_for.is_over():
            return None
        if (first := _measured_session()) is not None:
            self._waits_for = _PlannedEngine(weakref.ref(first), first._ended)
            models = first.engine.model, self.engine.model
            if dist.get_rank() == 0:
                logger.warning(
                    "perseus: this process trains two engines, %s and %s. The second is measured and planned once the "
                    "first is detached, closed or dropped.",
                    *models,
                )
            problem = f"rank {dist.get_rank()} still trains a {models[0]} with Perseus, which other ranks have dropped"
            withdraw(STARTED, GpuError(problem))
            return None
        try:
            with reported_once():
                self._start(order)
        except (ScheduleError, GpuError) as error:
            if self.config.needs_gpu if isinstance(error, GpuError) else not self._may_train_without:
                raise
            self.runtime, self.state = None, SessionState.CLOSED
            if dist.get_rank() == 0:
                logger.warning("perseus: %s. Training continues without Perseus.", str(error).rstrip("."))
        return self.runtime

    @contextmanager
    def iteration(
        self, order: Hashable, samples: int = 0, read: Callable[[], Schedule] | None = None
    ) -> Iterator[None]:
        """Context of the passes of a training iteration. It lasts until :meth:`end_iteration` or the next one.

        Args:
            order: Key of the schedule, which is read if it is new.
            samples: Number of samples that the job has seen after the iteration.
            read: Reads the schedule of this order at any time. By default, it is the engine's ``read``.
        """
        if self.is_captured:
            with self._capture(order, read):
                yield
            return
        self.end_iteration()
        runtime = self.start(order)
        if runtime is None:
            with self.paused():
                yield
            return
        with ExitStack() as iteration:
            iteration.callback(self._leave)
            iteration.enter_context(runtime.iteration(samples, order, read or self.engine.read))
            self._iteration, self.state = iteration, SessionState.PASSES
            self.operation, self.add_tokens = runtime.operation, runtime.add_tokens
            yield
            self._iteration = iteration.pop_all()

    def begin_tail(self, stage: int) -> None:
        """Begin the tail of a stage of this rank, which lasts until the end of the iteration."""
        tail = Compute(Instruction(stage, Kind.TAIL, 0))
        if self._captured is not None:
            self._captured.enter_context(self.operation(tail))
        elif self.state is SessionState.PASSES and self.runtime is not None:
            self._iteration.enter_context(self.operation(tail))
            self.state = SessionState.TAIL
            self.runtime.clocks.may_idle()  # the user's code continues the tail, and may take longer
        self.operation = _no_operation

    def end_iteration(self) -> None:
        """End the current iteration, if any. All ranks call this together."""
        if self.is_captured:
            self._graphs.surround_replays(self._end_after)
        else:
            self._iteration.close()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of an evaluation on all ranks. It ends the iteration and runs at default clocks."""
        if self.is_captured:
            self._graphs.surround_replays(self._evaluate)
            yield
            return
        self.end_iteration()
        with self.paused():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of work outside of training, which runs at default clocks."""
        with ExitStack() as stack:
            for session in sessions():
                if session.runtime is not None and session.state is SessionState.BETWEEN:
                    stack.enter_context(session.runtime.paused())
            yield

    def step_aside(self, error: Exception) -> None:
        """Continue to train without Perseus after an error in its own code.

        Before training, the error is raised, except for an engine that starts late.
        """
        if self.state is SessionState.WAITING and self._waits_for is None:
            if isinstance(error, PerseusError) or not self._may_train_without:
                raise error
            withdraw(STARTED, ScheduleError(f"rank {dist.get_rank()} trains without Perseus, after {error!r}"))
        if self.state is not SessionState.CLOSED:
            logger.error("perseus: %s", _OWN_ERROR, exc_info=error)
            self.state = SessionState.CLOSED
            for end in (self.engine.release, self.close):
                with contextlib.suppress(Exception):  # nothing may reach the user's code
                    end()

    @property
    def _may_train_without(self) -> bool:
        """Whether training continues without Perseus if it cannot be planned."""
        return self.engine.starts_late and self.config.mode == "auto"

    def detach(self) -> None:
        """End the last iteration, reset the clock, and restore the engine."""
        self.engine.release()
        try:
            self.end_iteration()
        finally:
            self.close()

    def close(self) -> None:
        """Reset the clock and stop. May be called repeatedly. All ranks call this together."""
        self.state = SessionState.CLOSED
        self.operation, self.add_tokens = _no_operation, _no_tokens
        self._ended.set()
        self._graphs.remove()
        if self._at_exit is not None:
            self._at_exit.cancel()
        if self.runtime is not None:
            self.runtime.close()

    def _leave(self) -> None:
        self.operation, self.add_tokens = _no_operation, _no_tokens
        if self.state is not SessionState.CLOSED:
            self.state = SessionState.BETWEEN

    @contextmanager
    def _capture(self, order: Hashable, read: Callable[[], Schedule] | None) -> Iterator[None]:
        """Context of the passes of an iteration that is captured and executed by replays of its graph."""
        runtime = self.runtime
        captured = None if runtime is None else runtime.capture()
        if runtime is None or captured is None:
            if dist.get_rank() == 0:
                logger.warning("perseus: %s.", _NOT_CAPTURED)
            yield
            return
        self.operation, self.add_tokens = captured.operation, captured.add_tokens
        try:
            with ExitStack() as self._captured:
                yield
        finally:
            self._captured, self.operation, self.add_tokens = None, _no_operation, _no_tokens

        def run_replay(replay: Run) -> Any:
            if runtime is not self.runtime:  # the graph writes its marks into memory that is no longer read
                return self._evaluate(replay)
            with self.iteration(order, read=read):
                replayed = runtime.replay(captured, replay)
                if (stage := captured.tail_stage) is not None:
                    self.begin_tail(stage)
            return replayed

        self._graphs.surround_replays(run_replay)

    def _evaluate(self, replay: Run) -> Any:
        with self.evaluation():
            return replay()

    def _end_after(self, replay: Run) -> Any:
        replayed = replay()
        self.end_iteration()
        return replayed

    def _when_started(self, action: Callable[[PerseusRuntime], None]) -> None:
        if self.runtime is None:
            self._waiting.append(action)
        else:
            action(self.runtime)

    def _facts(self, order: Hashable) -> RankFacts:
        models = (self.engine.model, *(other.engine.model for other in sessions() if other is not self))
        versions = dict(self.engine.versions())
        return msgspec.structs.replace(self.engine.facts(), key=key_of(order), models=models, versions=versions)

    def _device(self) -> torch.device:
        device = self.engine.device()
        assert device is not None, "a process that trains has chosen its GPU"
        return device

    def _start(self, order: Hashable) -> None:
        engine = self.engine
        training = Training(
            facts=functools.partial(self._facts, order),
            device=self._device,
            read=engine.read,
            check=engine.check,
            monitor=engine.monitor,
        )
        self.runtime = PerseusRuntime.start(self.config, training)
        self.state = SessionState.BETWEEN
        weakref.finalize(self, self.runtime.close).atexit = False
        self._at_exit = AtExit(functools.partial(_end_with_process, weakref.ref(self)))  # before the runtime's own
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action(self.runtime)


def _no_operation(operation: Operation, inputs: Hashable = None) -> AbstractContextManager[None]:
    return NOTHING


def _no_tokens(count: int) -> None:
    """Count no tokens, outside of the passes of an iteration."""


def token_ids(inputs: Iterable[Any]) -> int:
    """Return the number of token ids in the first of some tensors. 0 if it holds anything else."""
    first = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
    if first is None or first.dim() != 2 or first.is_floating_point():
        return 0
    return first.numel()


def sessions() -> list[Session]:
    """Return the sessions of this process that are not closed."""
    return [session for session in _SESSIONS if session.state is not SessionState.CLOSED]


@contextmanager
def paused() -> Iterator[None]:
    """Context of a user's code outside of passes, which runs at default clocks."""
    for session in sessions():
        if session.runtime is not None:
            session.runtime.clocks.pause()
    yield


def _measured_session() -> Session | None:
    """Return the session that is measured in this process. None if there is none.

    Engines that were dropped without being detached are freed before, so that all ranks find the same.
    """
    if any(session.runtime is not None for session in sessions()):
        gc.collect()
    return next((session for session in sessions() if session.runtime is not None), None)


def _end_with_process(of: weakref.ref[Session]) -> None:
    """End the last iteration of a script that ends after its last step."""
    session = of()
    if session is not None:
        try:
            session.end_iteration()
        finally:
            session.close()


def attach_to(make: Callable[[], Engine], config: PerseusConfig) -> Session | None:
    """Attach Perseus to an engine, and return its session. All ranks call this together.

    Args:
        make: Returns the engine, and raises an error if it cannot be attached to. Not called if Perseus is disabled.
        config: The settings. If they disable Perseus, the result is None.

    Raises:
        PerseusError: On all ranks, if their settings or versions differ, or the frontier of ``run`` mode cannot be
            used. For an engine that starts late, also if a rank has no GPU or may not set its clock.
    """
    if not config.enabled:
        _report_disabled()
        return None
    engine = make()
    if dist.is_initialized():
        _check_before_training(engine, config)
    session = Session(engine, config)
    engine.surround(session)
    return session


def detach_from(owner: object) -> None:
    """Detach the session that an object has as ``perseus``, if there is one. All ranks call this together."""
    session: Session | None = vars(owner).get("perseus")
    if session is not None:
        session.detach()


def _check_before_training(engine: Engine, config: PerseusConfig) -> None:
    """Check settings, GPUs and frontier before the schedule is known. All ranks call this together."""

    def settings() -> bytes:
        _check_gpu_and_frontier(engine, config)
        versions = {**own_versions(), **engine.versions()}
        return json.dumps({**versions, **config.model_dump(mode="json", exclude=_MAY_DIFFER)}).encode()

    agree(_CHECKED, "call perseus_ds.attach", settings, _compare_settings)


def _compare_settings(parts: list[bytes]) -> bytes:
    """Raise a ``ConfigError`` if settings or versions of a rank, encoded as JSON, are not those of rank 0."""
    first, *others = map(json.loads, parts)
    for rank, own in enumerate(others, start=1):
        for name in {**first, **own}:
            if own.get(name) != first.get(name):
                raise ConfigError(
                    f"perseus: ranks differ: {name} is {own.get(name)} on rank {rank}, {first.get(name)} on rank 0. "
                    f"{_SAME_ON_ALL}"
                )
    return b""


def _report_disabled() -> None:
    """Report to ranks with Perseus that this rank trains without it, at most once per job. Does not wait."""
    if dist.is_initialized() and store_of_job().add(f"perseus/disabled/{(rank := dist.get_rank())}", 1) == 1:
        withdraw(
            _CHECKED, ConfigError(f"perseus: ranks differ: enabled is False on rank {rank}, not on all. {_SAME_ON_ALL}")
        )


def _check_gpu_and_frontier(engine: Engine, config: PerseusConfig) -> None:
    """Check this rank's GPU, and on rank 0 the frontier of ``run`` mode, which only its node needs."""
    engine.check_order()
    with ExitStack() as opened:
        gpu, device = None, engine.device() if engine.starts_late else None
        if device is not None and (config.needs_gpu or config.mode == "run"):
            gpu = gpu_of(config, device, rank=dist.get_rank(), local_rank=local_rank())
            opened.callback(gpu.close)
            if config.needs_clocks:
                gpu.check_lock_permission()
        if config.mode == "run" and dist.get_rank() == 0:
            real_gpu = None if gpu is None or gpu.facts.simulated else gpu.facts.name
            frontier = read_frontier(Path(str(config.frontier)), real_gpu)
            if (ranks := engine.pipeline_ranks()) is not None:
                check_ranks(len(frontier.instructions), ranks)


@contextmanager
def reported_once(*others: type[Exception]) -> Iterator[None]:
    """Context of the start of a job, in which one rank prints errors of Perseus without a traceback.

    The exit status is then 2. Code that catches the error receives it unchanged.

    Args:
        others: Further exception types to print in this way, such as those of a library that reads settings.
    """
    kinds: tuple[type[Exception], ...] = (PerseusError, *others)
    try:
        yield
    except kinds as error:
        sys.excepthook = functools.partial(_print_instead_of_traceback, error, sys.excepthook)
        raise


def _print_instead_of_traceback(
    error: Exception, before: Callable[..., object], kind: type, raised: object, traceback: object
) -> None:
    if raised is not error:
        before(kind, raised, traceback)
        return
    if _is_first_to_print(text := f"{kind.__module__}.{kind.__qualname__}: {error}"):
        print(text, file=sys.stderr, flush=True)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's summary, at the end of the output, shows it
            with contextlib.suppress(OSError):
                shown = {"py_callstack": text, "timestamp": str(int(time.time()))}
                Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": shown}}))
    raise SystemExit(2)


def _is_first_to_print(text: str) -> bool:
    """Return True if no other rank of the job has printed the same text."""
    key = f"perseus/error/{hashlib.sha256(text.encode()).hexdigest()}"
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # the store may have ended with rank 0
            return bool(store_of_job().add(key, 1) == 1)
    elif os.environ.get("RANK", "0") == "0":
        return True
    time.sleep(5.0)  # a launcher, which may poll once a second, ends the other ranks after the first has failed
    return True


def require(
    package: str, version: str, newest: str, owners: Mapping[str, tuple[Any, Iterable[str]]], more: Sequence[str] = ()
) -> None:
    """Raise a ``VersionError`` if objects, by name, lack attributes that an engine needs, or ``more`` are missing."""
    missing = [f"{owner}.{name}" for owner, (of, names) in owners.items() for name in names if not hasattr(of, name)]
    if missing or more:
        raise VersionError(
            f"{package} {version} is not supported: it lacks {', '.join([*missing, *more])}. "
            f'Run: pip install --upgrade perseus-ds, or pip install "{package}<={newest}"'
        )


def fingerprint(modules: Iterable[torch.nn.Module], *settings: object) -> str:
    """Return a text that changes with any property that affects the times of a rank's instructions."""
    content = []
    for module in modules:
        parameters = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
        classes = [type(layer).__name__ for layer in module.modules()]
        content.append((parameters, classes))
    return hashlib.sha256(repr((content, settings)).encode()).hexdigest()


def whole_number(value: float | None) -> int | None:
    """Return a count as an integer. None if it is unknown, not finite or too large to be meant.

    Engines take some counts from the user's configuration, in which ``float("inf")`` and ``1e9`` are common.
    """
    return int(value) if value is not None and abs(value) < _LARGEST_COUNT else None


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group or one-dimensional ``DeviceMesh``. None means all ranks."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
