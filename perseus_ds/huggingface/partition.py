"""Measures the costs of each layer of a Hugging Face model, and finds the best cut.

A layer, the embedding, and the head with its loss are run alone. On a GPU, windows of many repetitions at each of a few
clocks give time and energy, and the profiler estimates the clocks between them. Without a GPU, one is *simulated*: the
work of a pass is computed from the floating-point operations of its kernels, as in training on simulated GPUs. They are
counted without computing anything, so models of any size can be cut on a laptop. Operations that only move memory (the
embedding, norms, the optimizer) take no time in this case. Layers with equal shapes and settings are measured once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig

from perseus_ds.artifacts.profile import Floats, Measurement, StageProfile
from perseus_ds.client.devices import place_of
from perseus_ds.client.lease import Lease
from perseus_ds.errors import ConfigError, GpuPermissionError
from perseus_ds.gpu import find_gpu
from perseus_ds.gpu.base import Gpu
from perseus_ds.huggingface.stages import (
    CausalLoss,
    Source,
    checkpoint_activations,
    eager_attention,
    new_stage,
    read_config,
    skeleton,
)
from perseus_ds.layouts.partition import LayerCosts, Partition, best_partition, uniform_cut
from perseus_ds.pipeline.commands import read_schedule, schedule_class, stages_per_rank
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.profiler.estimates import denoise
from perseus_ds.simulation.device_models import DEVICES, DeviceModel
from perseus_ds.simulation.work import FlopCounter
from perseus_ds.timebase import REAL_TIME, Timebase

logger = logging.getLogger("perseus_ds")

_KINDS = (Kind.FORWARD, Kind.BACKWARD)
_BYTES_A_PARAMETER = 16
"""Mixed precision with Adam: weight and gradient in 16 bits, weight and two moments in 32 bits. The same for fp32."""
_FLOPS_A_SECOND = 1e14
"""Speed of a simulated GPU at its highest clock. It is assumed; cuts and relative savings do not depend on it."""
_WINDOW_S, _SETTLE_S, _CLOCKS = 2.0, 0.3, 8
"""On a GPU: duration of each measurement, time until a clock is in effect, and number of measured clocks."""


class AtClocks(NamedTuple):
    """Time [s] and energy [J] of a pass at each clock, shape (clocks,)."""

    time_s: Floats
    energy_j: Floats


Passes = dict[Kind, AtClocks]


class PartCosts(NamedTuple):
    """Costs of a layer, the embedding or the head."""

    passes: Passes
    parameters: int
    held_bytes: int


def partition(
    source: Source,
    *,
    stages: int,
    micro_batches: int,
    schedule: str = "1f1b",
    micro_batch_size: int = 1,
    sequence_length: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gradient_checkpointing: bool = False,
    memory_gib: float | None = None,
    gpu: str | None = None,
) -> Partition:
    """Find the best cut of a model.

    The result's ``cut`` can be passed to ``pipeline_module`` and ``pipeline_stage``.

    Args:
        source: A causal model with a pipeline plan: its name on the hub, a folder, or a configuration.
        stages: Number of stages.
        micro_batches: Number of micro-batches per iteration.
        schedule: ``1f1b``, ``dualpipev`` or ``package.module:Class`` of a ``PipeSchedule``, which is imported.
        micro_batch_size: Number of sequences per micro-batch.
        sequence_length: Number of tokens per sequence; by default 2048, or the model's maximum if that is less.
        dtype: Type of weights and activations.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        memory_gib: Maximum memory of a stage [GiB]; by default the GPU's memory, and no limit if it is simulated.
        gpu: Device model to simulate, such as ``h100-sxm``; by default this machine's GPU is measured, or
            ``a100-sxm`` is simulated if there is none.

    Raises:
        ConfigError: If the model cannot be read or cut, or does not fit into the memory.
    """
    config = read_config(source)
    if gpu is not None and gpu not in DEVICES:
        raise ConfigError(f"gpu is {gpu!r}; expected one of {', '.join(sorted(DEVICES))}.")
    found = schedule_class(schedule)
    per_rank = stages_per_rank(found)
    if stages % per_rank:
        raise ConfigError(f"stages={stages}: {schedule} puts {per_rank} stages on every rank. Give a multiple.")
    uniform_cut(len(skeleton(config).base_model.layers), stages)  # raises errors before anything is measured
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    shape = (micro_batch_size, sequence_length or min(2048, longest))
    executed = read_schedule(found, ranks=stages // per_rank, micro_batches=micro_batches)
    if gpu is None and torch.cuda.is_available():
        if memory_gib is None:
            memory_gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
        device = torch.device("cuda", torch.cuda.current_device())
        measured = find_gpu(place_of("nvml" if torch.version.hip is None else "zeus", device, local_rank=0))
        with torch.random.fork_rng(devices=[device]):
            costs = measured_costs(config, measured, device, shape, dtype=dtype, checkpointing=gradient_checkpointing)
        measured.close()
    else:
        with torch.random.fork_rng(devices=[]):
            costs = simulated_costs(config, DEVICES[gpu or "a100-sxm"], shape, dtype, gradient_checkpointing)
    return best_partition(costs, executed, memory_bytes=None if memory_gib is None else memory_gib * 2**30)


class _Part:
    """One layer, the embedding (an empty range at the start) or the head (at the end)."""

    def __init__(
        self,
        config: PretrainedConfig,
        layers: range,
        device: torch.device | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        checkpointing: bool,
    ) -> None:
        config = copy.deepcopy(config)
        text = config.get_text_config()
        text.output_router_logits = False  # their loss takes almost no time but needs the logits of all layers
        self._stage = stage = new_stage(config, layers, device=device, dtype=dtype)
        self._ids = (torch.arange(shape[0] * shape[1], device=device) % text.vocab_size).reshape(shape)
        self._hidden = torch.randn(*shape, text.hidden_size, device=device, dtype=dtype, requires_grad=True)
        self._loss = CausalLoss(config) if stage.is_last and not layers else None
        self._module: nn.Module = stage
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (self._ids if stage.is_first else self._hidden,), {}
        if layers:
            self._module = stage.model.base_model.layers[layers.start]
            self._record_arguments()
        if checkpointing:
            checkpoint_activations(stage.model)
        own = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
        self.parameters = sum(parameter.numel() for parameter in self._module.parameters())
        self.held_bytes = max(self._held_bytes(own), self._hidden.nbytes)

    def _record_arguments(self) -> None:
        """Record the arguments of the layer in the model's own forward, to call it alone."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hook = self._module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            self._stage(*self._arguments[0])
        hook.remove()
        args, kwargs = seen[0]
        if args:
            args = (self._hidden, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": self._hidden}
        self._arguments = args, kwargs

    def forward(self) -> torch.Tensor:
        args, kwargs = self._arguments
        output = self._module(*args, **kwargs)
        if self._loss is not None:
            return self._loss(output, self._ids, num_items_in_batch=self._ids.numel())
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def backward(self, output: torch.Tensor) -> None:
        output.backward(torch.ones_like(output))

    def _held_bytes(self, own: set[int]) -> int:
        """Return the number of bytes that a backward needs from its forward, without weights."""
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        return sum(storage.nbytes() for storage in storages.values())


def simulated_costs(
    config: PretrainedConfig,
    model: DeviceModel,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
) -> LayerCosts:
    """Return the costs of the layers on a simulated GPU, for micro-batches of shape (sequences, tokens)."""
    clocks_mhz = tuple(clock for clock in model.clocks_mhz if clock >= model.top_clock_mhz / 2)
    slowdown = np.array([model.slowdown(clock) for clock in clocks_mhz])
    power_w = np.array([model.power_w(clock) for clock in clocks_mhz])

    def measure(part: _Part) -> Passes:
        # With attention as matrix products, of which all operations are counted.
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounter() as forward:
                output = part.forward()
            with FlopCounter() as backward:
                part.backward(output)
        times_s = [count.flops / _FLOPS_A_SECOND * slowdown for count in (forward, backward)]
        return {kind: AtClocks(time_s, time_s * power_w) for kind, time_s in zip(_KINDS, times_s, strict=True)}

    def run(layers: range) -> PartCosts:
        try:
            with FakeTensorMode():  # shapes only
                part = _Part(config, layers, None, shape, dtype, checkpointing=checkpointing)
                return PartCosts(measure(part), part.parameters, part.held_bytes)
        except RuntimeError:  # the computation depends on values, as in a mixture of experts
            part = _Part(config, layers, torch.device("cpu"), shape, dtype, checkpointing=checkpointing)
            return PartCosts(measure(part), part.parameters, part.held_bytes)

    with eager_attention(config):
        return _costs(config, run, clocks_mhz, model.blocking_power_w, f"simulated {model.name}", simulated=True)


def measured_costs(
    config: PretrainedConfig,
    gpu: Gpu,
    device: torch.device,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
    timebase: Timebase = REAL_TIME,
) -> LayerCosts:
    """Return the costs of the layers on a GPU, with its idle power as blocking power."""

    def run(layers: range) -> PartCosts:
        part = _Part(config, layers, device, shape, dtype, checkpointing=checkpointing)
        passes = measured_passes(part.forward, part.backward, gpu, clocks_mhz, timebase=timebase)
        return PartCosts(passes, part.parameters, part.held_bytes)

    with _clocks_to_measure(gpu) as clocks_mhz:
        waiting_s, waiting_j = _window(lambda: timebase.sleep(_SETTLE_S), gpu, _WINDOW_S, timebase)
        supported, power_w = gpu.supported_clocks_mhz(), waiting_j / waiting_s
        return _costs(config, run, clocks_mhz, power_w, gpu.name, simulated=gpu.simulated, between_mhz=supported)


@contextmanager
def _clocks_to_measure(gpu: Gpu) -> Iterator[tuple[int, ...]]:
    """Yield the clocks to measure, and restore the default clock however this process ends."""
    clocks = gpu.supported_clocks_mhz()
    upper = [clock for clock in clocks if clock >= clocks[-1] / 2]
    try:
        gpu.check_lock_permission()
    except GpuPermissionError as error:
        logger.warning("perseus: %s Layers are measured at default clocks, so no plans are computed.", error)
        yield clocks[-1:]
        return
    with ExitStack() as stack:
        if gpu.address is not None:
            stack.callback(Lease(gpu.address).close)
        stack.callback(gpu.reset_clock)
        yield tuple(sorted({upper[n] for n in np.linspace(0, len(upper) - 1, _CLOCKS).round().astype(int).tolist()}))


def measured_passes(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    gpu: Gpu,
    clocks_mhz: Sequence[int],
    *,
    timebase: Timebase = REAL_TIME,
) -> Passes:
    """Return time and energy of a forward and its backward at each clock. A single clock is not locked."""
    forwards, pairs = [], []
    for clock_mhz in clocks_mhz:
        if len(clocks_mhz) > 1:
            gpu.lock_clock(clock_mhz)
        _window(lambda: backward(forward()), gpu, _SETTLE_S, timebase)
        forwards.append(_window(forward, gpu, _WINDOW_S, timebase))
        pairs.append(_window(lambda: backward(forward()), gpu, _WINDOW_S, timebase))
    first, both = np.array(forwards).T, np.array(pairs).T  # shape (2, clocks): times and energies
    # A backward that is too short to be measured counts as a thousandth of both passes.
    second = np.maximum(both - first, both / 1000)
    return {Kind.FORWARD: AtClocks(*first), Kind.BACKWARD: AtClocks(*second)}


def _window(run: Callable[[], Any], gpu: Gpu, window_s: float, timebase: Timebase) -> tuple[float, float]:
    """Return time [s] and energy [J] of one repetition."""

    def finish() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return timebase.now_s()

    begin_s, before_j, repeated = finish(), gpu.energy_j(), 0
    while (now_s := finish()) < begin_s + window_s or not repeated:
        more = max(1, repeated)  # doubled each time, so that the GPU rarely waits for this thread
        for _ in range(more):
            run()
        repeated += more
    return (now_s - begin_s) / repeated, (gpu.energy_j() - before_j) / repeated


def _costs(
    config: PretrainedConfig,
    run: Callable[[range], PartCosts],
    clocks_mhz: tuple[int, ...],
    blocking_power_w: float,
    gpu: str,
    *,
    simulated: bool,
    between_mhz: Sequence[int] = (),
) -> LayerCosts:
    """Return the costs of all layers. Only one layer of each signature is run.

    The embedding belongs to the first layer, and the head to the last one. ``run`` returns the costs of one part, of
    which those at other clocks in ``between_mhz`` are estimated.
    """
    layers = skeleton(config).base_model.layers
    signatures = [_signature(layer) for layer in layers]
    alike = [signatures.index(signature) for signature in signatures]  # the first layer of the same signature
    measured = {index: run(range(index, index + 1)) for index in dict.fromkeys(alike)}
    embedding, head = run(range(0)), run(range(len(layers), len(layers)))
    # Layers of one signature are one unit with the same costs, except the first and the last layer of the model.
    parts_of_layers: list[list[PartCosts]] = []
    unit_of_layer: list[int] = []
    rows: list[Measurement] = []
    unit_of: dict[tuple[int, bool, bool], int] = {}
    for index, of_signature in enumerate(alike):
        is_first, is_last = index == 0, index == len(layers) - 1
        parts = [measured[of_signature], *[embedding] * is_first, *[head] * is_last]
        unit = unit_of.setdefault((of_signature, is_first, is_last), len(unit_of))
        if unit not in unit_of_layer:
            rows += _rows_of_unit(unit, parts, clocks_mhz)
        parts_of_layers.append(parts)
        unit_of_layer.append(unit)
    profile = StageProfile(rows)  # units in place of stages
    if between_mhz and len(clocks_mhz) > 2:
        profile = denoise(profile, between_mhz)
    clocks_of_rows = [set(profile.options(*key).clock_mhz.tolist()) for key in profile.keys]
    shared = sorted(set.intersection(*clocks_of_rows))

    def table(kind: Kind, value: str) -> Floats:
        """Return a value of each layer at each clock, shape (layers, clocks)."""
        result = np.empty((len(layers), len(shared)))
        for layer, unit in enumerate(unit_of_layer):
            result[layer] = [getattr(profile.at(unit, kind, clock_mhz), value) for clock_mhz in shared]
        return result

    parameters = np.array([float(sum(part.parameters for part in parts)) for parts in parts_of_layers])
    held_bytes = np.array([float(sum(part.held_bytes for part in parts)) for parts in parts_of_layers])
    return LayerCosts(
        clocks_mhz=tuple(shared),
        time_s={kind: table(kind, "time_s") for kind in _KINDS},
        energy_j={kind: table(kind, "energy_j") for kind in _KINDS},
        parameters=parameters,
        fixed_bytes=_BYTES_A_PARAMETER * parameters,
        held_bytes=held_bytes,
        blocking_power_w=blocking_power_w,
        gpu=gpu,
        simulated=simulated,
    )


def _rows_of_unit(unit: int, parts: Sequence[PartCosts], clocks_mhz: Sequence[int]) -> Iterator[Measurement]:
    """Yield the rows of parts that are run together, with a number in place of a stage."""
    for kind in _KINDS:
        for place, clock_mhz in enumerate(clocks_mhz):
            time_s = sum(part.passes[kind].time_s[place] for part in parts)
            energy_j = sum(part.passes[kind].energy_j[place] for part in parts)
            yield Measurement(unit, kind, clock_mhz, float(time_s), float(energy_j))


def _signature(layer: nn.Module) -> Hashable:
    """Return the shapes and settings of a layer's parts, which determine its costs."""
    signature = []
    for name, part in layer.named_modules():
        shapes = tuple(tuple(parameter.shape) for parameter in part.parameters(recurse=False))
        settings = [(key, value) for key, value in vars(part).items() if isinstance(value, str | int | float)]
        # The index of the layer is ignored.
        without_index = tuple((key, value) for key, value in settings if "idx" not in key)
        signature.append((name, type(part).__name__, shapes, without_index))
    return tuple(signature)
