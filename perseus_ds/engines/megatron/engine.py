"""Attaches Perseus to the schedules of Megatron-Core in a process, and detaches it."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version

from perseus_ds.artifacts.layout import encode_parts
from perseus_ds.config import PerseusConfig, settings_of
from perseus_ds.engines.engine import (
    Engine,
    Session,
    attach_to,
    detach_from,
    fingerprint,
    ranks_of,
    reported_once,
    require,
    whole_number,
)
from perseus_ds.engines.hooks import Call, Hooks, Method
from perseus_ds.engines.layers import parts_of_gpt, unwrapped
from perseus_ds.engines.megatron.order import Backward, Forward, OrderRecorder
from perseus_ds.errors import ConfigError, ScheduleError, VersionError
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.pipeline.schedule import Compute, Exchange, Schedule
from perseus_ds.protocol.job_messages import RankFacts

logger = logging.getLogger("perseus_ds")
T = TypeVar("T")
V = TypeVar("V")
_PIPELINED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
_SINGLE = "forward_backward_no_pipelining"
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"
_CAPTURED_FIRST = (
    "a CUDA graph of an iteration was captured before Perseus has recorded the order of its passes, so its replays run "
    "at default clocks. Let at least one iteration run before the capture (cuda_graph_warmup_steps)"
)


@reported_once()
def attach(target: T, config: Mapping[str, Any] | None = None) -> T:
    """Attach Perseus to all training by Megatron-Core in this process. See :func:`perseus_ds.attach`."""
    settings = settings_of(config) or PerseusConfig.model_validate({})
    schedules = importlib.import_module(_SCHEDULES)
    core, parallel_state = sys.modules["megatron.core"], sys.modules["megatron.core.parallel_state"]
    # A FullCudaGraphWrapper contains the function that it captures.
    function = getattr(target, "forward_backward_func", target)
    name = getattr(function, "__name__", type(function).__name__)
    if target is not core and name not in (*_PIPELINED, _SINGLE):
        raise ConfigError(
            "perseus: expected the module megatron.core, the function returned by its get_forward_backward_func(), "
            f"or a FullCudaGraphWrapper, got {name}."
        )

    def checked() -> MegatronEngine:
        check_megatron(core, schedules, parallel_state)
        return MegatronEngine(core, schedules, parallel_state)

    if "perseus" not in vars(core):
        attach_to(checked, settings)
    elif config is not None and settings.enabled:
        raise ConfigError("perseus: it is attached to Megatron-Core already. Call detach(megatron.core) before.")
    if target is core:
        return target
    if function is target:
        return getattr(schedules, name)  # type: ignore[no-any-return]
    target.forward_backward_func = getattr(schedules, name)  # type: ignore[attr-defined]
    return target


def detach(target: T) -> T:
    """End the last iteration and restore Megatron-Core to its state before :func:`attach`.

    All ranks call this together.
    """
    detach_from(sys.modules["megatron.core"])
    if hasattr(target, "forward_backward_func"):
        function = target.forward_backward_func
        target.forward_backward_func = getattr(function, "__wrapped__", function)
    return getattr(target, "__wrapped__", target)


class MegatronEngine(Engine):
    """Megatron-Core's schedules. All passes and transfers are reported.

    The first iteration of each order runs at default clocks and is used to record the order. An iteration ends with the
    step of Megatron's optimizer, or else with the next call that trains or evaluates, or with the process.
    """

    starts_late = True

    def __init__(self, core: Any, schedules: Any, parallel_state: Any) -> None:
        self._core = core
        self._schedules = schedules
        self._parallel_state = parallel_state
        self._hooks: Hooks
        self._optimizers: set[type] = set()
        self._steps_under_way = 0
        self._orders: dict[Hashable, Schedule | ScheduleError] = {}
        # Passes and exchanges of the current iteration according to its order, and the position of the next one.
        self._expected: Sequence[Compute | Exchange] = ()
        self._position = 0
        self._order: Hashable = None
        self._recorder: OrderRecorder | None = None
        self._model: Sequence[Any] = ()
        self._config: Any = None
        self._pp_group: Any = None
        self._micro_batch_size: int | None = None
        self._inputs: Hashable = None
        self._tokens: int | None = 0  # of a micro-batch, None if their number varies
        self._warned: set[str] = set()
        # Number of finished steps according to Megatron-LM before the last iteration. None if it was not found.
        self._steps: int | None = None

    @property
    def model(self) -> str:
        return type(unwrapped(self._model[0])).__name__ if self._model else "a model of Megatron-Core"

    def facts(self) -> RankFacts:
        stages = range(self._pp_group.rank(), len(self._model) * self._pp_group.size(), self._pp_group.size())
        parts = {stage: parts_of_gpt(chunk) for stage, chunk in zip(stages, self._model, strict=True)}
        return RankFacts(
            pipeline=ranks_of(self._pp_group),
            copies=self._copies(),
            fingerprint=fingerprint(self._model, self._inputs),
            micro_batch_size=whole_number(self._micro_batch_size),
            steps=self._steps,
            engine="megatron",
            parts=encode_parts(parts),
            tied=any(getattr(unwrapped(chunk), "share_embeddings_and_output_weights", False) for chunk in self._model),
        )

    def _copies(self) -> tuple[int, ...]:
        """Return the ranks that train this stage on different data, one rank per pipeline.

        Ranks that share layers or experts run in step and count as one pipeline.
        """
        copies = ranks_of(self._parallel_state.get_data_parallel_group())
        sharing_layers = len(ranks_of(self._parallel_state.get_tensor_and_context_parallel_group()))
        sharing_experts = len(ranks_of(self._parallel_state.get_expert_tensor_and_model_parallel_group()))
        # Megatron numbers the ranks of a stage so that those of each such group are consecutive.
        in_step = math.lcm(sharing_layers, sharing_experts) // sharing_layers
        return copies[copies.index(dist.get_rank()) % in_step :: in_step]

    def read(self) -> Schedule:
        return self._read(self._order)

    def _read(self, order: Hashable) -> Schedule:
        found = self._orders[order]
        if isinstance(found, ScheduleError):
            raise found
        return found

    def device(self) -> torch.device | None:
        parameters = (parameter for chunk in self._model for parameter in chunk.parameters())
        device: torch.device | None = next((parameter.device for parameter in parameters), None)
        if device is not None:
            return device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Before a script has chosen its GPU, this would be the first one.
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

    def pipeline_ranks(self) -> int | None:
        if not self._parallel_state.model_parallel_is_initialized():
            return None
        return int(self._parallel_state.get_pipeline_model_parallel_group().size())

    def versions(self) -> Mapping[str, str]:
        return {"megatron-core": str(self._core.__version__)}

    def surround(self, session: Session) -> None:
        self._session = self._core.perseus = session
        self._hooks = Hooks(session.step_aside)
        self._hooks.surround(self._schedules, _SINGLE, self._single_stage)
        for name in _PIPELINED:
            self._hooks.surround(self._schedules, name, functools.partial(self._iteration, name))
        self._hooks.surround(self._schedules, "forward_step", self._forward)
        self._hooks.surround(self._schedules, "backward_step", self._backward)
        self._hooks.surround(sys.modules[_COMBINED], "combined_forward_backward_step", self._forward_backward)
        self._hooks.surround(self._schedules.P2PCommunicator, "_communicate", self._communicate)

    def release(self) -> None:
        self._hooks.remove()
        vars(self._core).pop("perseus", None)

    def _single_stage(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        self._warn("the pipeline has a single stage, so no instruction waits for another, and there is nothing to plan")
        return method(*args, **kwargs)

    def _iteration(self, name: str, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Train or evaluate by one of the schedules. They accept only keyword arguments."""
        if kwargs.get("forward_only"):
            with self._session.evaluation():
                return method(*args, **kwargs)
        if self._is_of_another_model(kwargs["model"]):
            self._session.end_iteration()
            with self._session.paused():
                return method(*args, **kwargs)
        with reported_once():
            if not self._prepare(kwargs):
                return method(*args, **kwargs)
        self._find_steps()
        chunks = len(self._model)
        group_size = getattr(self._config, "microbatch_group_size_per_vp_stage", None) if chunks > 1 else None
        order = (name, kwargs["num_microbatches"], chunks, group_size)
        if order not in self._orders:
            return self._first_iteration(order, lambda: method(*args, **kwargs))
        self._order = order
        with self._session.iteration(order, read=functools.partial(self._read, order)):
            if isinstance(found := self._orders[order], Schedule):
                self._expected = [op for op in found.ranks[0][:-1] if isinstance(op, Compute | Exchange)]
            self._position = 0
            try:
                return method(*args, **kwargs)
            finally:
                self._expected = ()

    def _prepare(self, kwargs: Mapping[str, Any]) -> bool:
        """Store the model and its settings, and return True if its training can be planned."""
        if not self._parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "perseus: Megatron-Core has no groups of ranks. Call parallel_state.initialize_model_parallel() before "
                "the first iteration."
            )
        self._session.check_before_training()  # if it was attached before torch.distributed was initialized
        model, communicator = kwargs["model"], kwargs.get("p2p_communicator")
        self._model = model if isinstance(model, list) else [model]
        self._config = self._schedules.get_model_config(self._model[0])
        self._micro_batch_size = kwargs["micro_batch_size"]
        # Passes that recompute other layers do other work, as those on inputs of other shapes.
        recomputation = repr([getattr(self._config, name, None) for name in _RECOMPUTATION])
        shape = kwargs["seq_length"], kwargs["micro_batch_size"]
        varies = getattr(self._config, "variable_seq_lengths", False)
        self._tokens = None if varies else kwargs["seq_length"] * kwargs["micro_batch_size"]
        self._inputs = shape, kwargs.get("decoder_seq_length"), recomputation
        if communicator is not None and not isinstance(communicator, self._schedules.P2PCommunicator):
            problem = f"transfers by a {type(communicator).__name__}, as between several modules, have no known stages"
            if self._session.config.mode != "auto":
                raise ScheduleError(f"perseus: {problem}.")
            self._warn(f"{problem}: training continues at default clocks")
            return False
        own = self._parallel_state.get_pipeline_model_parallel_group
        self._pp_group = own() if communicator is None else communicator.pp_group
        self._surround_optimizers()
        return True

    def _is_of_another_model(self, model: Any) -> bool:
        """Return whether an iteration trains another model than the first one of the process, as a critic."""
        first = model[0] if isinstance(model, list) else model
        if not self._model or first is self._model[0]:
            return False
        planned, other = type(unwrapped(self._model[0])).__name__, type(unwrapped(first)).__name__
        self._warn(
            f"this process trains a {planned} and a {other}. "
            "Clocks are planned for the one that trained first. Iterations of the other one run at default clocks and "
            "are not counted"
        )
        return True

    def _find_steps(self) -> None:
        """Read the number of finished steps from Megatron-LM, which continues that of a checkpoint."""
        arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        found = getattr(arguments, "curr_iteration", getattr(arguments, "iteration", None))
        if not isinstance(found, int):
            return
        if self._steps is not None and found != self._steps + 1:  # iterations were skipped or repeated
            self._session.set_steps(found)
        self._steps = found

    def _first_iteration(self, order: tuple[str, int, int, int | None], train: Callable[[], V]) -> V:
        """Train at default clocks, and record the order."""
        if self._session.is_captured:
            self._warn(_CAPTURED_FIRST)
            return train()
        self._session.end_iteration()
        if self._steps is None:  # it is no iteration of the session
            self._session.add_steps(1)
        elif self._session.runtime is not None:
            self._session.set_steps(self._steps + 1)
        self._order = order
        self._recorder = recorder = OrderRecorder(self._pp_group.rank(), self._pp_group.size())
        try:
            with self._session.paused():
                result = train()
        finally:
            self._recorder = None
        try:
            self._orders[order] = Schedule(f"{_SCHEDULES}:{order[0]}", order[1], (recorder.operations(),))
        except ScheduleError as error:  # raised on all ranks at the start of the next iteration
            self._orders[order] = ScheduleError(f"The order of {order[0]} is not known: {error}.")
        if self._captures_iterations() and self._session.runtime is None:
            with reported_once():
                self._session.start(order)  # not possible during a capture, which may be the next iteration
        return result

    def _captures_iterations(self) -> bool:
        """Return whether Megatron captures whole iterations into CUDA graphs."""
        graphs = [getattr(self._config, name, None) for name in ("cuda_graph_impl", "cuda_graph_scope")]
        return "full_iteration" in re.findall(r"\w+", str(graphs))  # strings, or members of an enumeration

    def _forward(self, method: Call, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(method.method, args, kwargs)
        forward = given("vp_stage") or 0, given("current_microbatch"), given("input_tensor")
        run = functools.partial(method, *args, **kwargs)
        found = self._pass(run, forward, None, lambda found: (found[0], None))
        if self._tokens is None and self._is_in_first_stage:
            self._session.add_tokens(_tokens_in_activations(found[0]))
        return found

    def _backward(self, method: Call, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(method.method, args, kwargs)
        backward = given("output_tensor"), given("output_tensor_grad")
        return self._pass(functools.partial(method, *args, **kwargs), None, backward, lambda found: (None, found))

    def _forward_backward(self, method: Call, *args: Any, **kwargs: Any) -> Any:
        """Surround a step of combined 1F1B: a forward and a backward as one, or one of them alone at its ends."""
        given = _by_name(method.method, args, kwargs)
        chunk, micro_batch = given("f_model_chunk_id") or 0, given("current_microbatch")
        forward = None if given("f_model") is None else (chunk, micro_batch, given("input_tensor"))
        backward = None if given("b_model") is None else (given("b_output_tensor"), given("b_output_tensor_grad"))
        if self._recorder is not None or (receive := kwargs.get("pre_backward")) is None:
            run = functools.partial(method, *args, **kwargs)
            return self._pass(run, forward, backward, lambda found: (found[0], found[2]))
        with ExitStack() as step:
            operation = self._next(*_kind_of(forward, backward))
            begin = self._hooks.guarded(lambda: step.enter_context(operation))
            # The step begins when it has received its gradients.
            return method(*args, **{**kwargs, "pre_backward": lambda *given: (receive(*given), begin())})

    def _pass(
        self,
        run: Callable[[], Any],
        forward: Forward | None,
        backward: Backward | None,
        results: Callable[[Any], tuple[Any, Any]],
    ) -> Any:
        """Surround a forward, a backward, or both as one. See :meth:`OrderRecorder.step`."""
        if self._recorder is not None:
            return self._recorder.step(run, forward=forward, backward=backward, results=results)
        with self._next(*_kind_of(forward, backward)):
            return run()

    def _communicate(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Surround a transfer. All its arguments except the communicator are keyword arguments."""
        waits = kwargs.get("wait_on_reqs", True)
        if self._recorder is not None:
            run = functools.partial(method, *args, **kwargs)
            sends = {name: kwargs[f"tensor_{name}"] for name in ("send_next", "send_prev")}
            receives = {name: kwargs[name] for name in ("recv_prev", "recv_next")}
            return self._recorder.communicate(run, sends, receives, waits)
        transfers = (kwargs["tensor_send_next"], kwargs["tensor_send_prev"])
        is_empty = all(tensor is None for tensor in transfers) and not (kwargs["recv_prev"] or kwargs["recv_next"])
        if not waits or is_empty:
            return method(*args, **kwargs)
        with self._next(None):
            return method(*args, **kwargs)

    @contextmanager
    def _next(self, kind: Kind | None, micro_batch: int | None = None) -> Iterator[None]:
        """Surround the next pass of the order, or its next exchange with the neighbours if ``kind`` is None."""
        if not self._expected:
            yield
            return
        operation = self._expected[self._position] if self._position < len(self._expected) else None
        instruction = operation.instruction if isinstance(operation, Compute) else None
        found = None if instruction is None else instruction.kind
        if operation is None or found is not kind or micro_batch not in (None, instruction and instruction.micro_batch):
            self._warn("an iteration runs its passes in another order than the first: its clocks are the default ones")
            self._expected = ()
            self._session.use_default_clocks()
            yield
            return
        self._position += 1
        if kind is Kind.FORWARD and self._tokens is not None and self._is_in_first_stage:
            self._session.add_tokens(self._tokens)
        with self._session.operation(operation, self._inputs if kind else None):
            yield
        if self._position == len(self._expected):
            self._session.begin_tail(int(self._pp_group.rank()))

    @property
    def _is_in_first_stage(self) -> bool:
        """True if the pass that has begun last is one of the known order and belongs to the first stage."""
        if not self._expected or self._position == 0:
            return False  # evaluation, another model, or an iteration in another order
        operation = self._expected[self._position - 1]
        return isinstance(operation, Compute) and operation.instruction.stage == 0

    def _surround_optimizers(self) -> None:
        """Let iterations end with the step of Megatron's optimizers, including newly defined classes."""
        module = sys.modules.get("megatron.core.optimizer.optimizer")
        classes = [module.MegatronOptimizer] if module else []
        while classes:
            found = classes.pop()
            classes += found.__subclasses__()
            if "step" in vars(found) and found not in self._optimizers:
                self._optimizers.add(found)
                self._hooks.surround(found, "step", self._optimizer_step)

    def _optimizer_step(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        self._steps_under_way += 1
        try:
            return method(*args, **kwargs)
        finally:
            self._steps_under_way -= 1
            if self._steps_under_way == 0:  # an optimizer may consist of others
                self._session.end_iteration()

    def _warn(self, message: str) -> None:
        """Print a warning once, on rank 0."""
        if message not in self._warned and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("perseus: %s.", message)
        self._warned.add(message)


def _tokens_in_activations(outputs: Any) -> int:
    """Return the number of tokens in the outputs of a stage, of shape (sequence, batch, hidden). 0 if unknown."""
    first = outputs[0] if isinstance(outputs, list) and outputs else outputs
    return first.shape[0] * first.shape[1] if isinstance(first, torch.Tensor) and first.dim() == 3 else 0


def _kind_of(forward: Forward | None, backward: Backward | None) -> tuple[Kind, int | None]:
    """Return the kind of a step, and the micro-batch of its forward. None if it has no forward."""
    if forward is None:
        return Kind.BACKWARD, None
    return Kind.FORWARD if backward is None else Kind.FORWARD_BACKWARD, forward[1]


def _by_name(function: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that returns the argument of a call with a given name. None if it is not given."""
    return {**dict(zip(_parameters(function), args, strict=False)), **kwargs}.get


@functools.cache
def _parameters(function: Method) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


OLDEST_MEGATRON = "0.14.0"
"""Oldest version in which ``P2PCommunicator`` has the transfers and ``forward_step`` receives the virtual stage."""
NEWEST_MEGATRON = "0.19.2"
"""Newest tested version."""

SCHEDULES = (
    *("get_forward_backward_func", _SINGLE, *_PIPELINED),
    *("forward_step", "backward_step", "get_model_config", "P2PCommunicator"),
)
PARALLEL_STATE = (
    *("model_parallel_is_initialized", "get_pipeline_model_parallel_group", "get_data_parallel_group"),
    *("get_tensor_and_context_parallel_group", "get_expert_tensor_and_model_parallel_group"),
)
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "forward_step": ("input_tensor", "current_microbatch", "vp_stage"),
    "backward_step": ("output_tensor", "output_tensor_grad"),
    "combined_forward_backward_step": (
        *("f_model", "b_model", "f_model_chunk_id", "current_microbatch", "input_tensor"),
        *("b_output_tensor", "b_output_tensor_grad", "pre_backward"),
    ),
    "_communicate": ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "wait_on_reqs"),
}
"""Parameters of Megatron's functions that determine the instruction or transfer."""


def check_megatron(core: Any, schedules: Any, parallel_state: Any) -> None:
    """Raise a ``VersionError`` if Megatron-Core is too old, or lacks functions or parameters that Perseus needs."""
    version = str(core.__version__)
    if Version(version).release < Version(OLDEST_MEGATRON).release:
        raise VersionError(
            f"Megatron-Core {version} is too old for perseus-ds, expected megatron-core>={OLDEST_MEGATRON}. "
            f'Run: pip install "megatron-core>={OLDEST_MEGATRON}"'
        )
    owners = {
        "_communicate": getattr(schedules, "P2PCommunicator", None),
        "combined_forward_backward_step": getattr(core.pipeline_parallel, "combined_1f1b", None),
    }
    missing = []
    for name, parameters in PARAMETERS.items():
        function = getattr(owners.get(name, schedules), name, None)
        found = inspect.signature(function).parameters if function is not None else {}
        missing += [f"{name}(…, {parameter})" for parameter in parameters if parameter not in found]
    needed = {"schedules": (schedules, SCHEDULES), "parallel_state": (parallel_state, PARALLEL_STATE)}
    require("megatron-core", version, NEWEST_MEGATRON, needed, missing)
