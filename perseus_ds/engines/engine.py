"""The interface of engines: what Perseus needs of whatever executes a pipeline, and what it offers to it.

An engine is a subclass of :class:`Engine` that answers what it trains (:meth:`~Engine.facts`), by which schedule
(:meth:`~Engine.read`), and reports its begins and ends to a :class:`Session` (:meth:`~Engine.surround`)::

    with session.iteration(order):              # the passes of a training iteration
        with session.operation(operation): …    # each of them, and each transfer that the schedule names
    session.end_iteration()                     # what came meanwhile, such as the optimizer's step, is the tail

A session makes the runtime when its engine first trains, keeps what is asked of it before, follows schedules that
change, and is closed with its engine. Nothing below this folder knows which engine it is.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perseus_ds import errors
from perseus_ds.artifacts.plan import check_ranks
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import ConfigError, GpuError, PerseusError, ScheduleError, VersionError
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Compute, Operation, Schedule
from perseus_ds.ranks import Communicator, PipelineTopology
from perseus_ds.runtime.devices import driver_of
from perseus_ds.runtime.frontiers import read_frontier
from perseus_ds.runtime.runtime import NOTHING, PerseusRuntime, RankFacts, local_rank, own_versions
from perseus_ds.server.control_socket import parse_order

logger = logging.getLogger("perseus_ds")
# A batch size that changes all the time fits no profile, and to go on measuring would only cost: after so many
# schedules one after the other that were left before their profile was done, one is measured once it has lasted.
_MOST_LEFT = 8
_LASTS_AFTER = 50
# Stores of jobs in which this rank trains without Perseus, and has said so.
_WITHOUT: weakref.WeakSet[Any] = weakref.WeakSet()
# Where files are may differ among ranks, and what GPUs are simulated.
_MAY_DIFFER = {"output_dir", "frontier", "simulated"}
# Engines share the GPU of the process, so the one that evaluates must be able to ask the one that trains.
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


class Engine(ABC):
    """What executes a pipeline on this rank, as Perseus needs it.

    Attributes:
        starts_late: Whether a schedule is known only once an iteration was trained by it; in auto mode, training then
            goes on without Perseus where the schedule cannot be planned.
    """

    starts_late = False

    @property
    @abstractmethod
    def model(self) -> str:
        """The class of the model, for messages and records."""

    @abstractmethod
    def facts(self) -> RankFacts:
        """Return what trains on this rank, and where; asked for when the engine is about to train."""

    @abstractmethod
    def read(self) -> Schedule:
        """Return what this rank executes in an iteration, as a schedule of one rank; else raise a ``ScheduleError``."""

    def check(self, schedule: Schedule) -> None:  # noqa: B027  # most engines have nothing to add
        """Check the schedule that all ranks of the pipeline have read; a ``ScheduleError`` if it cannot be planned."""

    def check_order(self) -> None:  # noqa: B027  # most engines know it later
        """Check that the order can be read, before training; a ``ScheduleError`` if it cannot."""

    @abstractmethod
    def surround(self, session: Session) -> None:
        """Begin to report iterations and operations to a session."""

    @abstractmethod
    def release(self) -> None:
        """Leave the engine as it was before :meth:`surround`."""

    def device(self) -> torch.device | None:
        """Return where tensors of an engine that starts late will live, for checks beforehand; None if not known."""
        return None

    def pipeline_ranks(self) -> int | None:
        """Return the ranks of a pipeline where an engine that starts late knows them, for checks beforehand."""
        return None

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that train, besides torch and Perseus."""
        return {}

    def steps(self) -> int | None:
        """Return the iterations done, where the engine itself counts them."""
        return None


class Session:
    """Perseus on one engine, as ``engine.perseus``.

    The runtime is made at the first training iteration: only then is the schedule final. What is asked for
    before is kept until then. Of several engines in a process, the first that trains is measured and planned;
    the others run at default clocks.

    Attributes:
        runtime: Perseus on this rank; None before the engine has trained.
        operation: Surrounds one operation of an iteration, as :meth:`PerseusRuntime.operation` does; outside of the
            passes of an iteration, and where nobody asks for its operations, it does nothing.
        follows_transfers: Whether that does anything for what is no instruction in the iteration that has begun.
    """

    checked = False

    def __init__(self, engine: Engine, config: PerseusConfig) -> None:
        """Wait for the first training iteration of an engine."""
        self.engine = engine
        self.config = config
        self.runtime: PerseusRuntime | None = None
        self._waiting: list[Callable[[PerseusRuntime], None]] = []
        self._restored: dict[str, Any] = {}
        self._order: Hashable = None
        # In profile mode, schedules left one after the other before their profile was done, and how long this one has
        # to last until it is measured.
        self._left = 0
        self._measured_in: int | None = None
        self.operation: Callable[..., AbstractContextManager[None]] = _surround_nothing
        self.follows_transfers = False
        self._open: ExitStack | None = None  # the iteration
        self._closed = False
        _SESSIONS.add(self)

    @property
    def profiled(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.runtime is not None and self.runtime.profiled

    @property
    def follows_operations(self) -> bool:
        """Whether an iteration is open whose operations have to be surrounded."""
        return self.operation is not _surround_nothing

    @property
    def phase(self) -> str:
        """The phase of the next iteration; ``start`` before the first one."""
        return "start" if self.runtime is None else self.runtime.next.phase

    def set_policy(self, policy: Mapping[str, Any]) -> None:
        """Run under another policy, such as ``{"name": "energy_optimal"}``, from the next iterations on.

        Rank 0's counts. What is no policy is a ``ConfigError`` that names the key.
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

    @contextmanager
    def iteration(self, order: Hashable, samples: int = 0) -> Iterator[None]:
        """Surround the passes of a training iteration; it lasts until :meth:`end_iteration` or the next one.

        Args:
            order: Equal for equal schedules; another one is read anew.
            samples: Samples that the job has seen after it.
        """
        self.end_iteration()
        runtime = self._runtime_for(order)
        if runtime is None:
            with self.paused():
                yield
            return
        with ExitStack() as iteration:
            iteration.callback(self._leave)
            iteration.enter_context(runtime.iteration(samples, order, self.engine.read))
            self._open = iteration
            if runtime.follows_operations:
                self.operation = runtime.operation
            self.follows_transfers = runtime.follows_transfers
            yield
            self._open = iteration.pop_all()

    def begin_tail(self, stage: int) -> None:
        """All passes of the iteration were issued; what comes until its end is the tail of a stage of this rank."""
        if self._open is not None and self.runtime is not None:
            self._open.enter_context(self.operation(Compute(Instruction(stage, Kind.TAIL, 0))))
            self.runtime.tail_begins()
        self.operation = _surround_nothing

    def end_iteration(self) -> None:
        """End the iteration that is open, if there is one; every rank must do so at once."""
        if self._open is not None:
            self._open.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surround work outside of training: it runs at default clocks."""
        with ExitStack() as stack:
            for session in sessions():
                if session.runtime is not None and session._open is None:
                    stack.enter_context(session.runtime.paused())
            yield

    def detach(self) -> None:
        """End the last iteration, restore the default clock, and leave the engine as it was."""
        self.engine.release()
        try:
            self.end_iteration()
        finally:
            self.close()

    def close(self) -> None:
        """Restore the default clock and stop; harmless when called again."""
        self._closed = True
        atexit.unregister(self._end_with_process)
        if self.runtime is not None:
            self.runtime.close()

    def _end_with_process(self, pid: int) -> None:
        """End the last iteration where nobody else has, such as that of a script that ends after its last step."""
        if self.runtime is not None and os.getpid() == pid:  # not in a forked process
            self.runtime.process_ends()
            try:
                self.end_iteration()
            finally:
                self.close()

    def _leave(self) -> None:
        self._open, self.operation = None, _surround_nothing

    def _when_started(self, action: Callable[[PerseusRuntime], None]) -> None:
        if self.runtime is None:
            self._waiting.append(action)
        else:
            action(self.runtime)

    def _runtime_for(self, order: Hashable) -> PerseusRuntime | None:
        """Return the runtime for a schedule; None if another engine of this process trains under Perseus."""
        if self._closed and self.runtime is None:
            return None
        if self.runtime is None:
            first = next((other for other in sessions() if other.runtime is not None), None)
            if first is not None:
                self._closed = True
                if dist.get_rank() == 0:
                    logger.warning(
                        "perseus: this process trains two engines, %s and %s. Only the first is measured and planned.",
                        first.engine.model,
                        self.engine.model,
                    )
                return None
            try:
                with reported_once():
                    self._start()
            except (ScheduleError, GpuError) as error:
                may_observe = self.engine.starts_late and self.config.mode == "auto"
                if self.config.needs_gpu if isinstance(error, GpuError) else not may_observe:
                    raise
                self._go_on_without(error)
        elif order != self._order and self.config.mode in ("observe", "profile"):
            self._change_schedule(order)
        elif self._measured_in is not None:
            self._measured_in -= 1
            if self._measured_in == 0:
                self._start_again()
        self._order = order
        return self.runtime

    def _start(self) -> None:
        models = (self.engine.model, *(other.engine.model for other in sessions() if other is not self))
        facts = dataclasses.replace(self.engine.facts(), models=models, versions=self.engine.versions())
        self.runtime = PerseusRuntime.start(self.config, facts, self.engine.read, self.engine.check)
        atexit.unregister(self._end_with_process)
        atexit.register(self._end_with_process, os.getpid())  # called before what the runtime has registered
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action(self.runtime)

    def _change_schedule(self, order: Hashable) -> None:
        """Go on with another schedule, such as after a changed batch size: a profile under way begins again."""
        assert self.runtime is not None
        measures = self.config.mode == "profile" and not self.runtime.profiled
        if self._measured_in is None:
            self._left = 0 if self.runtime.profiled else self._left + 1
        self._measured_in = _LASTS_AFTER if measures and self._left > _MOST_LEFT else None
        if measures and self._measured_in is None:
            self._start_again()
        else:
            self.runtime.schedule_changed()

    def _start_again(self) -> None:
        """Go through the mode from its beginning, with the schedule that the engine has now."""
        assert self.runtime is not None
        self._measured_in = None
        state = {key: value for key, value in self.runtime.state().items() if key != "progress"}
        self.runtime.close()
        try:
            self._start()
        except PerseusError as error:  # training has started, so that no error of Perseus may end it
            self._go_on_without(error)
        else:
            self.runtime.restore(state, steps=self.engine.steps())

    def _go_on_without(self, error: PerseusError) -> None:
        self.runtime, self._closed = None, True
        if dist.get_rank() == 0:
            logger.warning("perseus: %s. Training goes on without Perseus.", str(error).rstrip("."))


def _surround_nothing(operation: Operation, inputs: Hashable = None) -> AbstractContextManager[None]:
    return NOTHING


def sessions() -> list[Session]:
    """Return Perseus on each engine of this process that has it."""
    return [session for session in _SESSIONS if not session._closed]


def attach_to(engine: Engine, config: PerseusConfig) -> Session:
    """Let an engine train under Perseus; every rank must do so at once.

    Raises:
        PerseusError: On all ranks, what can be known now: the frontier of ``run`` mode cannot be used, or an engine
            that starts late has no GPU, or one whose clocks may not be set.
    """
    if dist.is_initialized():
        check_before_training(engine, config)
    session = Session(engine, config)
    session.checked = dist.is_initialized()
    engine.surround(session)
    return session


def check_before_training(engine: Engine, config: PerseusConfig) -> None:
    """Check what is known before the schedule is; every rank must do so at once.

    What is wrong on one rank is raised on all, and which have not come within the store's time-out.
    """
    versions = {**own_versions(), **engine.versions()}
    own = {"enabled": True, **versions, **config.model_dump(mode="json", exclude=_MAY_DIFFER)}
    store, number = _store_of_job(), _checks_begun(1)
    with contextlib.suppress(PerseusError), _checked_by_all(number, own):
        _check_gpu_and_frontier(engine, config)
    try:
        store.get(f"perseus/checked/{number}/over")
    except dist.DistStoreError:  # the time-out
        missing = [rank for rank in range(dist.get_world_size()) if _checks_begun(0, rank) < number]
        raise ConfigError(
            f"perseus: {len(missing)} ranks have not attached, of which rank {missing[0]} is the first, and the "
            "others have waited until the time-out of the process group. Attach on all ranks at once; where "
            "the variable PERSEUS is set, set it for all of them."
        ) from None
    kind, _, text = store.compare_set(f"perseus/checked/{number}/error", "", "").decode().partition(":")
    if kind:
        raise getattr(errors, kind)(text)


def take_no_part() -> None:
    """Notify ranks that check what is known before training that this one trains without Perseus; never waits.

    A ``ConfigError`` where one of them was here before. Once is enough, where every step asks for it.
    """
    if dist.is_initialized() and (store := _store_of_job()) not in _WITHOUT:
        _WITHOUT.add(store)
        with _checked_by_all(_checks_begun(1), {"enabled": False}):
            pass


def _store_of_job() -> Any:
    return dist.distributed_c10d._get_default_store()


def _checks_begun(more: int, rank: int | None = None) -> int:
    """Return how many checks a rank, by default this one, has begun."""
    return int(_store_of_job().add(f"perseus/checks/{dist.get_rank() if rank is None else rank}", more))


@contextmanager
def _checked_by_all(number: int, own: Mapping[str, Any]) -> Iterator[None]:
    """Compare settings with those of the first rank that comes here, and surround further checks of this rank.

    All ranks are notified of the first error, and once all have come.
    """
    rank, store, key = dist.get_rank(), _store_of_job(), f"perseus/checked/{number}"
    try:
        first = json.loads(store.compare_set(f"{key}/settings", "", json.dumps({"rank": rank, **own})))
        for name, value in own.items():
            if first.get(name) != value:
                raise ConfigError(
                    f"perseus: ranks differ: {name} is {value} on rank {rank}, {first.get(name)} on rank "
                    f"{first['rank']}. Give all ranks the same perseus block, and install the same versions."
                )
        yield
    except PerseusError as error:
        store.compare_set(f"{key}/error", "", f"{type(error).__name__}:{error}")
        raise
    finally:
        if store.add(f"{key}/ranks", 1) == dist.get_world_size():
            store.set(f"{key}/over", "")


def _check_gpu_and_frontier(engine: Engine, config: PerseusConfig) -> None:
    """Check this rank's GPU, and the frontier of ``run`` mode, which only rank 0's node need have."""
    engine.check_order()
    with ExitStack() as opened:
        gpu = None
        if (device := engine.device()) is not None and (config.needs_gpu or config.mode == "run"):
            gpu = driver_of(config, device, rank=dist.get_rank(), local_rank=local_rank())
            opened.callback(gpu.close)
            if config.needs_clocks:
                gpu.check_lock_permission()
        if config.mode == "run" and dist.get_rank() == 0:
            frontier = read_frontier(Path(str(config.frontier)), gpu)
            if (ranks := engine.pipeline_ranks()) is not None:
                check_ranks(len(frontier.instructions), ranks)


@contextmanager
def reported_once(*others: type[Exception]) -> Iterator[None]:
    """Surround the start of a job: an error of Perseus that ends it is printed by one rank, without a traceback.

    The exit status is 2 then, as that of a command. Whoever catches the error sees it as it is.

    Args:
        others: Further kinds of errors of which that is true, such as those of a library that reads settings.
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
    """Print an error by one rank; any other, by the hook that was there before."""
    if raised is not error:
        before(kind, raised, traceback)
        return
    if _is_first_to_say(text := f"{kind.__module__}.{kind.__qualname__}: {error}"):
        print(text, file=sys.stderr, flush=True)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's summary, at the end of the output, shows it
            with contextlib.suppress(OSError):
                shown = {"py_callstack": text, "timestamp": str(int(time.time()))}
                Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": shown}}))
    raise SystemExit(2)


def _is_first_to_say(text: str) -> bool:
    """Whether no other rank of the job has said the same."""
    key = f"perseus/error/{hashlib.sha256(text.encode()).hexdigest()}"
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # the store may be gone, with the rank that held it
            return bool(_store_of_job().add(key, 1) == 1)
    elif os.environ.get("RANK", "0") == "0":
        return True
    time.sleep(5.0)  # a launcher, which may look once a second, ends the other ranks once the first one has failed
    return True


def require(
    package: str, version: str, newest: str, owners: Mapping[str, tuple[Any, Iterable[str]]], more: Sequence[str] = ()
) -> None:
    """Check that objects of a package have the attributes on which an engine relies, else raise a ``VersionError``.

    Args:
        package: Its name on PyPI.
        version: That is installed.
        newest: That was tried.
        owners: By name, an object and the names of its attributes.
        more: What else was found to be missing.
    """
    missing = [f"{owner}.{name}" for owner, (of, names) in owners.items() for name in names if not hasattr(of, name)]
    if missing or more:
        raise VersionError(
            f"{package} {version} is not one that perseus-ds works with: there is no {', '.join([*missing, *more])}. "
            f'Run: pip install --upgrade perseus-ds, or pip install "{package}<={newest}"'
        )


def fingerprint(modules: Iterable[torch.nn.Module], *settings: object) -> str:
    """Return a text that changes with whatever the times of a rank's instructions depend on."""
    content = [
        (
            [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()],
            [type(layer).__name__ for layer in module.modules()],
        )
        for module in modules
    ]
    return hashlib.sha256(repr((content, settings)).encode()).hexdigest()


class Hooks:
    """The methods of single objects that are surrounded; their classes stay as they are."""

    def __init__(self) -> None:
        self._installed: list[tuple[Any, str, Any, bool]] = []
        self._removed = False

    def surround(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have a function called instead of a method of an object, with the method and its arguments."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # Whoever has kept this function, such as another hook in front of it, may call it after the removal.
            return method(*args, **kwargs) if self._removed else around(method, *args, **kwargs)

        self._installed.append((owner, name, surrounded, name in vars(owner)))
        setattr(owner, name, surrounded)

    def remove(self) -> None:
        """Leave the objects as they were; a hook that somebody has put in front of ours stays."""
        self._removed = True
        for owner, name, surrounded, was_own in reversed(self._installed):
            if vars(owner).get(name) is not surrounded:
                continue
            if was_own:
                setattr(owner, name, surrounded.__wrapped__)
            else:
                delattr(owner, name)
        self._installed.clear()


Ranks = tuple[int, ...]


def topology_of(pipeline: Ranks, data_parallel: Ranks | None, all_ranks: Communicator) -> PipelineTopology:
    """Return this rank's place in the job; every rank must ask at the same time.

    Args:
        pipeline: Global ranks of its pipeline, first stage first.
        data_parallel: Those that train the same stages on other data; None where every pipeline has data of its own.
        all_ranks: Of the job.
    """
    rank = all_ranks.rank
    at, number = pipeline.index(rank), -1 if data_parallel is None else sorted(data_parallel).index(rank)
    rows = all_ranks.gather((at, number, pipeline[0]))
    places = all_ranks.computed_on_rank_0(lambda: np.array(rows, dtype=np.int32))
    if data_parallel is None:
        pipelines = np.unique(places[:, 2]).tolist()
        return PipelineTopology(rank, pipeline, pipelines.index(pipeline[0]), len(pipelines))
    # Pipelines at the same place in their data-parallel groups share their stages, by tensor parallelism and the like.
    peers = tuple(np.flatnonzero((places[:, :2] == (at, number)).all(axis=1)).tolist())
    return PipelineTopology(rank, pipeline, number, len(data_parallel), peers if len(peers) > 1 else ())


def ranks_of(group: Any) -> Ranks:
    """Return the global ranks of a process group or one-dimensional ``DeviceMesh``, in its order; None: all ranks."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
