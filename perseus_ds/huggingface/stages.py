"""Pipeline stages of a Hugging Face model.

Each rank builds its own stage, and runs the model's own forward around its layers. A causal model of transformers
consists of an embedding, a list of layers, a norm and a head. A *cut* is the number of layers on each stage. The first
stage also has the embedding, and the last one the norm and the head. A stage is the model's own class, built without
storage, in which the layers of other stages are replaced by :class:`_Absent`: the one before the stage's first layer
returns the tensor received from the previous stage, and the one after its last layer stores the tensor for the next
stage. Masks, position embeddings, scales and heads are therefore computed by the model's own code, and no table of
models is needed: the model's pipeline plan (``base_model_pp_plan`` of its configuration) declares the parts before and
after the layers.

Stages are independent of engines. ``perseus_ds.pipeline_module`` makes a DeepSpeed module of them,
``perseus_ds.pipeline_stage`` a stage of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import guard_torch_init_functions, no_init_weights
from transformers.loss.loss_utils import LOSS_MAPPING
from typing_extensions import Unpack

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, Part, kind_of_layer
from perseus_ds.client.agreement import agree
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.huggingface.hub import HubOptions, read_from_hub
from perseus_ds.layouts.partition import uniform_cut

logger = logging.getLogger("perseus_ds")
_INDEX = "model.safetensors.index.json"
# Names of a text model's weights in a model that also has images or sound, and in the text model alone.
_OF_TEXT_MODEL = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
# Functions that return a tensor without values.
_WITHOUT_VALUES = frozenset((torch.empty, torch.empty_like, torch.empty_strided))
# Label of a token without a loss.
_NOT_LEARNT = -100


Source: TypeAlias = str | Path | PretrainedConfig
"""A model by its name on the hub, a folder written by ``save_pretrained``, or a configuration (for new weights)."""


class _Absent(nn.Module):
    """Replaces a layer of another stage and has its plain attributes, which loops over layers read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.received: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.seen = hidden_states
        return hidden_states if self.received is None else self.received


class Stage(nn.Module):
    """The layers of one stage of a causal model, run by the model's own forward.

    ``inputs`` are the names of the first stage's inputs: ``input_ids``, then ``attention_mask`` or ``position_ids`` if
    the data contain them. The latter are sent from stage to stage.
    """

    def __init__(self, model: PreTrainedModel, layers: range, inputs: Sequence[str] = ("input_ids",)) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.names = tuple(inputs)
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.base_model.layers)
        # Whether the loss of a mixture of experts has a term for the balance of its routers.
        self._routed = bool(getattr(model.config.get_text_config(), "output_router_logits", False)) and hasattr(
            sys.modules[type(model).__module__], "load_balancing_loss_func"
        )

    @property
    def layout_parts(self) -> list[Part]:
        """The stage's parts in the order of the model."""
        layers = [self.model.base_model.layers[index] for index in self.layers]
        kinds = [kind_of_layer(map(type, layer.modules())) for layer in layers]
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        parts = [
            Part(kind=kind, names=[f"layers.{index}"], parameters=size)
            for index, kind, size in zip(self.layers, kinds, sizes, strict=True)
        ]
        first = [Part(kind=EMBEDDING)] if self.is_first else []
        return [*first, *parts, *([Part(kind=HEAD)] if self.is_last else [])]

    @property
    def embedding(self) -> torch.Tensor:
        """Weight of the token embedding, on the first stage and, if it is tied, the last one."""
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the stage on the data or the outputs of the previous stage.

        Returns:
            Hidden states of shape (batch, sequence, hidden size), then masks and positions unchanged, and, if the
            model's loss needs them, the logits of all routers so far, of shape (layers, tokens, experts). The last
            stage returns logits of shape (batch, sequence, vocabulary), those of the routers, and the attention mask
            for their loss.
        """
        of_model: Any = self.model.base_model.layers
        given = dict(zip(self.names, inputs, strict=False))
        hidden = given.pop("input_ids")
        routers = list(inputs[len(self.names) :])
        arguments: dict[str, Any] = {**given, "use_cache": False}
        if self._routed:
            arguments["output_router_logits"] = True
        if self.is_first:
            arguments["input_ids"] = hidden
        else:
            # The model's forward uses embeddings only to compute masks and positions. The result of its scales and
            # norms before the layers is replaced by the received tensor.
            arguments["inputs_embeds"] = hidden.detach()
            of_model[self.layers.start - 1].received = hidden
        output = self.model(**arguments) if self.is_last else self.model.base_model(**arguments)
        if not self.is_first:
            of_model[self.layers.start - 1].received = None
        if self._routed and output.router_logits:
            own = torch.stack([logits for logits in output.router_logits if logits is not None])
            routers = [torch.cat([*routers, own])]
        if self.is_last:
            if not routers:
                return output.logits  # type: ignore[no-any-return]
            # The loss of the routers leaves out padding.
            mask = given.get("attention_mask")
            return (output.logits, *routers) if mask is None else (output.logits, *routers, mask)
        hidden, of_model[self.layers.stop].seen = of_model[self.layers.stop].seen, None
        size = self.model.config.get_text_config().hidden_size
        if hidden.dim() != 3 or hidden.shape[-1] != size:
            raise ConfigError(
                f"{type(self.model).__name__}: its layers return tensors of shape {tuple(hidden.shape)}, not hidden "
                f"states of shape (batch, sequence, {size}) alone, as in its pipeline plan. It cannot be cut."
            )
        carried = (*given.values(), *routers)
        return (hidden, *carried) if carried else hidden


def trained_tokens(labels: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the number of trained labels. The first label of a sequence is not predicted."""
    return torch.stack([labels_of[..., 1:].ne(_NOT_LEARNT).sum() for labels_of in labels]).sum()


class CausalLoss:
    """The model's loss for the next tokens and, if its configuration requires it, for its routers.

    Every trained token of a batch has the same weight, in any micro-batch and on any data-parallel rank, as in
    transformers' ``Trainer``. The mean over micro-batches and ranks is therefore the loss of the whole batch, and the
    engine's mean gradient is its gradient. :meth:`counting_tokens` counts the trained tokens before the first backward
    pass. ``perseus_ds.initialize`` and ``perseus_ds.attach`` make engines and schedules call it.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config.get_text_config()
        self._module = sys.modules[model_class(config).__module__]
        self._loss = LOSS_MAPPING["ForCausalLM"]
        self._tokens: torch.Tensor | None = None

    @contextmanager
    def counting_tokens(
        self, labels: Sequence[torch.Tensor], *, group: Any = None, device: Any = None, averaged: bool = True
    ) -> Iterator[None]:
        """Weight the losses of a batch's micro-batches by the number of trained tokens in all of them.

        ``labels`` are those of all micro-batches of this rank. ``group`` has the ranks that train on the other
        micro-batches of the batch and average their gradients. All of them call this method together. If the loss is
        not ``averaged`` over micro-batches, it is their sum.
        """
        tokens = trained_tokens(labels).to(device or labels[0].device)
        parts = len(labels) if averaged else 1
        if group is not None:
            dist.all_reduce(tokens, group=group)
            parts *= dist.get_world_size(group)
        # A batch without trained tokens has a loss of 0.
        self._tokens = tokens.clamp(min=1) / parts
        try:
            yield
        finally:
            self._tokens = None

    def __call__(
        self,
        outputs: torch.Tensor | tuple[torch.Tensor, ...],
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Return the loss of one micro-batch.

        Args:
            outputs: Outputs of the last stage.
            labels: Token ids of the input, of shape (batch, sequence), -100 for tokens without a loss.
            num_items_in_batch: Divisor of the sum over tokens, as in transformers. By default, the mean number of
                trained tokens per micro-batch, as counted by :meth:`counting_tokens`.
        """
        tokens = self._tokens if num_items_in_batch is None else num_items_in_batch
        if tokens is None:
            raise ConfigError(
                "CausalLoss: the number of trained tokens in the whole batch is unknown, and the mean over this "
                "micro-batch alone would give its tokens another weight. Create the engine with perseus_ds.initialize, "
                "or call perseus_ds.attach with the engine or schedule; otherwise pass num_items_in_batch."
            )
        logits, *routers = outputs if isinstance(outputs, tuple | list) else (outputs,)
        loss = self._loss(logits=logits, labels=labels, vocab_size=self._config.vocab_size, num_items_in_batch=tokens)
        if routers:
            of_layers, *mask = routers
            names = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = next(getattr(self._config, name) for name in names if hasattr(self._config, name))
            balance = self._module.load_balancing_loss_func(
                tuple(of_layers), experts, self._config.num_experts_per_tok, mask[0] if mask else None
            )
            loss = loss + self._config.router_aux_loss_coef * balance
        return loss  # type: ignore[no-any-return]


def read_tokenizer(name: str | Path, **hub: Unpack[HubOptions]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model on the hub or in a folder. Raises a ``ConfigError`` if there is none."""
    return read_from_hub(AutoTokenizer.from_pretrained, "tokenizer", name, hub=hub)


def read_config(source: Source, config: PretrainedConfig | None = None, **hub: Unpack[HubOptions]) -> PretrainedConfig:
    """Return the given configuration or that of a model.

    Raises:
        ConfigError: There is no configuration, or it has no pipeline plan.
    """
    if config is None:
        if isinstance(source, PretrainedConfig):
            config = source
        else:
            config = read_from_hub(_config_with_code, "configuration", source, hub=hub)
    if _has_plan(config) and type(config) in AutoModelForCausalLM._model_mapping:
        return config
    return _text_part(config)


def _config_with_code(name: str, **options: Any) -> PretrainedConfig:
    """Return the configuration of a model, after reading the model's own code if it is trusted."""
    config: PretrainedConfig = AutoConfig.from_pretrained(name, **options)
    code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if options.pop("trust_remote_code", False) and code and type(config) not in AutoModelForCausalLM._model_mapping:
        AutoModelForCausalLM.register(type(config), get_class_from_dynamic_module(code, name, **options))
    return config


def _has_plan(config: PretrainedConfig) -> bool:
    return "layers" in (getattr(config, "base_model_pp_plan", None) or ())


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text model in one that also has images or sound.

    Raises:
        ConfigError: There is none that can be cut.
    """
    text = copy.deepcopy(config.get_text_config())
    name = type(config).__name__
    if type(text) is not type(config):
        name += f" with the text model {type(text).__name__}"
    if not _has_plan(text):
        raise ConfigError(
            f"{name}: the model declares no pipeline plan (base_model_pp_plan) with layers, so it is unknown how to "
            "cut it. Llama, Qwen, Mistral, Gemma, GPT-NeoX and some eighty others declare one."
        )
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{name}: transformers has no causal model for it that can be trained on text alone.")
    # Both are settings of the whole model.
    if getattr(config, "tie_word_embeddings", None) is not None:
        text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a causal model."""
    found = AutoModelForCausalLM._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the whole model without storage."""
    with torch.device("meta"), eager_attention(config):
        model = model_class(config)._from_config(config)
    _check_plan(model)
    return model


def _check_plan(model: PreTrainedModel) -> None:
    missing = [part for part in model.config.base_model_pp_plan if not hasattr(model.base_model, part)]
    if missing:
        raise ConfigError(
            f"{type(model).__name__}: its pipeline plan names {', '.join(missing)}, which the model does not have. It "
            "cannot be cut."
        )


def layers_of_stages(cut: Sequence[int], layers: int) -> list[range]:
    """Return the layers of each stage. Raises a ``ConfigError`` if they are not all layers, or a stage has none."""
    if sum(cut) != layers or min(cut, default=0) < 1:
        raise ConfigError(
            f"cut: the model has {layers} layers; {list(cut)} are {sum(cut)}. Give each stage at least one layer, so "
            "that the sum is the number of layers."
        )
    ends = list(accumulate(cut))
    return [range(end - count, end) for end, count in zip(ends, cut, strict=True)]


def cut_of(config: PretrainedConfig, stages: int, cut: Sequence[int] | None) -> tuple[int, ...]:
    """Return the given cut, by default a uniform one, after checking it."""
    layers = len(skeleton(config).base_model.layers)
    if cut is None:
        return uniform_cut(layers, stages)
    if len(cut) != stages:
        raise ConfigError(
            f"cut: {list(cut)} are {len(cut)} stages, not {stages}. Give each stage its number of layers."
        )
    layers_of_stages(cut, layers)
    return tuple(cut)


def build_stage(
    source: Source,
    cut: Sequence[int],
    index: int,
    *,
    config: PretrainedConfig | None = None,
    inputs: Sequence[str] = ("input_ids",),
    pretrained: bool | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1234,
    gradient_checkpointing: bool = False,
    sequence_length: int | None = None,
    vocabulary: int | None = None,
    **hub: Unpack[HubOptions],
) -> Stage:
    """Build one stage, with storage and weights for its own layers only.

    Args:
        source: The model.
        cut: Number of layers on each stage.
        index: Index of the stage.
        config: Configuration instead of the model's own, for its weights with other settings.
        inputs: Names of the data's inputs, see :class:`Stage`.
        pretrained: Whether to read weights, by default for a name or a folder. Each stage reads only its own weights.
            Otherwise they are new, and the same for every cut.
        dtype: Type of the weights.
        seed: Seed of new weights, also of those that are missing where the others are read.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        sequence_length: Length of the data's sequences, to check that the model supports it.
        vocabulary: Number of tokens of the data's tokenizer, to check that the model supports them.
        **hub: The ``revision``, ``token`` and ``trust_remote_code`` of a model on the hub.

    Raises:
        ConfigError: If the model cannot be cut, not at these layers, or does not fit the data.
    """

    def layers_of_stage(layers: int) -> range:
        return layers_of_stages(cut, layers)[index]

    config = read_config(source, config, **hub)
    _check_data(config, sequence_length, vocabulary)
    if pretrained is None:
        pretrained = not isinstance(source, PretrainedConfig)
    try:
        if pretrained:
            if isinstance(source, PretrainedConfig):
                raise ConfigError(
                    "pretrained: a configuration has no weights to read. Give the model's name on the hub or its "
                    "folder."
                )
            _check_not_quantized(source, config)
            model = _read_weights(source, config, layers_of_stage, hub=hub, dtype=dtype, seed=seed)
        else:
            model = _new(_class_of_stage(model_class(config), layers_of_stage, seed), config, dtype, seed)
            _with_storage(model, torch.device("cpu"))
            _initialize(model, seed)
    except ImportError as error:  # of a package with kernels
        raise ConfigError(f"{type(config).__name__}: {error}") from error
    if gradient_checkpointing:
        checkpoint_activations(model)
    stage = Stage(model.train(), layers_of_stage(sum(cut)), inputs)
    _check_runs_alone(stage)
    return stage


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass recompute the layers' activations."""
    # Renamed in transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def new_stage(config: PretrainedConfig, layers: range, *, device: torch.device | None, dtype: torch.dtype) -> Stage:
    """Build a stage with new weights. Without layers, it has only the embedding or the head.

    Without a device, it has only shapes, for torch's ``FakeTensorMode``.
    """
    if device is None:
        model = model_class(config)._from_config(config, dtype=dtype)
        _keep_stage(model, layers)
        return Stage(model.train(), layers)
    model = _new(model_class(config), config, dtype, seed=0)
    _keep_stage(model, layers)
    _with_storage(model, device)
    _initialize(model, seed=0)
    return Stage(model.train(), layers)


def _check_data(config: PretrainedConfig, sequence_length: int | None, vocabulary: int | None) -> None:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if sequence_length and longest and sequence_length > longest:
        raise ConfigError(
            f"sequence_length: the model has positions for {longest} tokens (max_position_embeddings), not for "
            f"{sequence_length}. Use shorter sequences."
        )
    if vocabulary and vocabulary > text.vocab_size:
        raise ConfigError(
            f"vocabulary: the tokenizer has {vocabulary} tokens, the model {text.vocab_size} (vocab_size). Use the "
            f"model's own tokenizer, or new weights with a vocab_size of at least {vocabulary}."
        )


def _check_not_quantized(source: str | Path, config: PretrainedConfig) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    raise ConfigError(
        f"{source}: its weights are quantised ({values.get('quant_method', 'by an unknown method')}, in "
        "quantization_config), and quantised weights cannot be trained in stages. Give the model's original weights."
    )


def _check_runs_alone(stage: Stage) -> None:
    """Run a stage on four tokens, so that errors occur before ranks wait for each other.

    A stage that does not run on the CPU is run on this rank's GPU, because its kernels may need one.
    """
    config = stage.model.config
    gpus = torch.cuda.device_count()
    place = "without a GPU, which kernels of it may need"
    try:
        try:
            with eager_attention(config):
                _run_on(stage, torch.device("cpu"))
        except ConfigError:
            raise
        except Exception:
            if not gpus:
                raise
            gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
            place = f"on {gpu}"
            _run_on(stage, gpu)
            stage.to("cpu")
    except ConfigError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{type(stage.model).__name__}: layers {stage.layers.start} to {stage.layers.stop - 1} do not run alone "
            f"{place} ({cause}). If its layers need more from each other than the hidden states in its pipeline plan, "
            "it cannot be cut."
        ) from error


@contextmanager
def eager_attention(config: PretrainedConfig) -> Iterator[None]:
    """Replace attention kernels that may need a GPU by operations that run on the CPU."""
    selected = config._attn_implementation
    if selected not in (None, "eager", "sdpa"):
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = selected


def _run_on(stage: Stage, device: torch.device) -> None:
    stage.to(device)
    size = stage.model.config.get_text_config().hidden_size
    hidden = torch.zeros(1, 4, size, dtype=stage.model.dtype, device=device)
    tokens = torch.zeros(1, 4, dtype=torch.long, device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        stage(tokens if stage.is_first else hidden, *(torch.ones_like(tokens) for _ in stage.names[1:]))


def _read_weights(
    source: str | Path,
    config: PretrainedConfig,
    layers_of_stage: Callable[[int], range],
    *,
    hub: HubOptions,
    dtype: torch.dtype,
    seed: int,
) -> PreTrainedModel:
    """Return a stage with the weights of a model. A missing head is a copy of the embedding, other ones are new."""

    def read(kept: Callable[[int], range]) -> tuple[PreTrainedModel, set[str]]:
        kind = _class_of_stage(model_class(config), kept, seed)
        options = {"config": config, "dtype": dtype, "output_loading_info": True, "key_mapping": _OF_TEXT_MODEL}
        model, found = read_from_hub(kind.from_pretrained, "weights", source, hub=hub, **options)
        # The text model is saved as such, not as a part of the model from which it was read.
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions
            if not _OF_TEXT_MODEL.keys() >= set(conversion.source_patterns)
        ]
        _check_initialized(model, model.not_read)
        return model, set(found["missing_keys"])

    model, missing = read(layers_of_stage)
    head = model.get_output_embeddings()
    name_of_head = next((f"{name}.weight" for name, module in model.named_modules() if module is head), "")
    if name_of_head in missing:
        # The last stage has no embedding, and nothing else of the first one is needed.
        with_embedding, _ = read(lambda _: range(0))
        head.weight.data.copy_(with_embedding.get_input_embeddings().weight)
        missing.remove(name_of_head)
        logger.warning("perseus: %s has no %s. It begins as a copy of the embedding.", source, name_of_head)
    if missing:
        names = ", ".join(sorted(missing))
        logger.warning("perseus: %s has no %s. Their values are new, with seed %d.", source, names, seed)
    return model


def _class_of_stage(
    whole: type[PreTrainedModel], layers_of_stage: Callable[[int], range], seed: int
) -> type[PreTrainedModel]:
    """Return a subclass of the model's class with a constructor that keeps only one stage's parts.

    ``layers_of_stage`` returns the layers to keep of a number of layers.
    """

    def with_storage(model: PreTrainedModel, missing: Iterable[str], *args: Any, **kwargs: Any) -> None:
        # What the weights lack gets storage here, and is initialised next.
        whole._move_missing_keys_from_meta_to_device(model, missing, *args, **kwargs)
        tensors = dict(chain(model.named_parameters(), model.named_buffers()))
        model.not_read = sorted({*missing, *(name for name, _ in model.named_non_persistent_buffers())})
        for name in model.not_read:
            if name in tensors and tensors[name].is_floating_point() and not tensors[name].is_meta:
                tensors[name].data.fill_(math.nan)

    def construct(model: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(model, config, *args, **kwargs)
        _check_plan(model)
        _keep_stage(model, layers_of_stage(len(model.base_model.layers)))

    attributes = {
        "__init__": construct,
        "__module__": whole.__module__,
        "_move_missing_keys_from_meta_to_device": with_storage,
        "_initialize_missing_keys": lambda model, *_: _initialize_parts(model, seed),
        # A checkpoint contains the weights of all stages.
        "_keys_to_ignore_on_load_unexpected": [".*"],
        # Not only rank 0 saves, since each stage has its own weights.
        "should_save_on_this_rank": lambda model, is_main_process: is_main_process,
    }
    return type(whole.__name__, (whole,), attributes)


def _keep_stage(model: PreTrainedModel, layers: range) -> None:
    """Remove all parts of a model that belong to other stages."""
    base, config = model.base_model, model.config
    parts = list(config.base_model_pp_plan)
    at_layers = parts.index("layers")
    is_last = layers.stop == len(base.layers)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = is_last and bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    for index, layer in enumerate(base.layers):
        if index not in layers:
            base.layers[index] = _Absent(layer)
    for part in parts[:at_layers] if layers.start > 0 else ():
        # The head of a tied model has the embedding's weight, so the last stage keeps it too.
        if not (tied and getattr(base, part) is embedding):
            setattr(base, part, nn.Identity())
    if not is_last:
        for part in parts[at_layers + 1 :]:
            setattr(base, part, nn.Identity())
        for name, child in list(model.named_children()):
            if child is head:
                setattr(model, name, nn.Identity())
        model._tied_weights_keys = None
        model.all_tied_weights_keys = {}


class _WithoutStorage(TorchFunctionMode):
    """Creates tensors without values on ``meta``, and thus without storage."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _WITHOUT_VALUES and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _new(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Construct a model of which only the tensors that its constructor computes have storage and values.

    The model's own rules of initialisation need not write what its constructor computes.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _WithoutStorage(), no_init_weights():
        torch.default_generator.manual_seed(seed)
        return kind._from_config(config, dtype=dtype)


def _with_storage(model: PreTrainedModel, device: torch.device) -> None:
    """Move a model to a device. Its tensors without values become NaN until they are initialised."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        return torch.full_like(tensor, math.nan if tensor.is_floating_point() else 0, device=device)

    model._apply(moved)
    for module in model.modules():
        # Flagged by the constructor, whose initialisation had no storage to write to.
        vars(module).pop("_is_hf_initialized", None)


def _check_initialized(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise a ``ConfigError`` if some of the named parameters and buffers were given no values."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    left = [name for name in names if name in tensors and tensors[name].isnan().any()]
    if left:
        raise ConfigError(
            f"{type(model).__name__}: neither its constructor nor its initialisation gives values to "
            f"{', '.join(left)}. Read weights that contain them, or report this to transformers."
        )


def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Give a stage new weights by the model's own rules."""
    _initialize_parts(model, seed)
    model.tie_weights()
    _check_initialized(model, [name for name, _ in chain(model.named_parameters(), model.named_buffers())])


@torch.no_grad()
def _initialize_parts(model: PreTrainedModel, seed: int) -> None:
    """Initialise the parameters and buffers that were not read, with a seed for each part."""
    base, is_custom_code = model.base_model, model.is_custom_code()
    layers = [
        (f"{name}.{index}", layer)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList)
        for index, layer in enumerate(child)
    ]
    of_base = [*layers, *base.named_children(), ("", base)]
    device = model.device
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), guard_torch_init_functions():
        for owner, parts in ((base, of_base), (model, [*model.named_children(), ("", model)])):
            for name, part in parts:
                # With a seed for each part, weights do not depend on the cut. torch.manual_seed would also seed GPUs
                # that are not in use here.
                torch.default_generator.manual_seed(seed + zlib.crc32(name.encode()))
                if on_gpu:
                    torch.cuda.manual_seed(seed + zlib.crc32(name.encode()))
                part.apply(partial(owner._initialize_weights, is_custom_code=is_custom_code))


def save_pretrained(trained: Any, folder: Path | str) -> None:
    """Write a trained model to a folder, from which ``from_pretrained`` can read the whole model.

    All ranks of the job must call this function together. It returns when the folder is complete. Of ranks with the
    same stage (data parallelism), the first one writes. Weights of another model in the folder are removed once all new
    ones are written, so a job that is killed before leaves the folder unchanged.

    Args:
        trained: The object trained by this rank: an engine or module of DeepSpeed, a stage of
            ``torch.distributed.pipelining``, or a list of stages.
        folder: The folder, the same for all ranks. It is created if necessary.

    Raises:
        ConfigError: If there is no stage of a Hugging Face model.
        PerseusError: On all ranks, if a rank could not write.
    """
    folder = Path(folder)
    unfinished = folder / ".unfinished"
    rank = dist.get_rank() if dist.is_initialized() else 0
    stages = _stages_in(trained)

    def begin() -> list[int]:
        if rank == 0 and unfinished.exists():  # from a job that was killed
            shutil.rmtree(unfinished)
        return [stage.layers.start for stage in stages]

    of_ranks = _on_all_ranks(begin)
    others = set(chain(*of_ranks[:rank]))
    own = [stage for stage in stages if stage.layers.start not in others]

    def write() -> list[tuple[int, list[tuple[str, str]]]]:
        # All ranks gather before the first one writes, so that none of them waits for one that cannot write.
        weights = [_whole_weights(stage, is_kept=stage in own) for stage in stages]
        return [
            (stage.layers.start, _write_stage(stage, of_stage, unfinished))
            for stage, of_stage in zip(stages, weights, strict=True)
            if stage in own
        ]

    try:
        written = _on_all_ranks(write)
        _on_all_ranks(lambda: _finish(sorted(chain(*written)), unfinished, folder) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def _on_all_ranks(do: Callable[[], Any]) -> list[Any]:
    """Return the results of all ranks' calls on every rank, or raise an error if one of them fails."""

    def part() -> bytes:
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            return json.dumps(do()).encode()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise PerseusError(
                f"save_pretrained: rank {rank} could not write its part of the model ({reason})."
            ) from error

    if not dist.is_initialized():
        return [json.loads(part())]
    answer = agree("saved", "write its part of the model", part, lambda parts: b"[" + b",".join(parts) + b"]")
    results: list[Any] = json.loads(answer)
    return results


def _stages_in(trained: Any) -> list[Stage]:
    parts = trained if isinstance(trained, list | tuple) else [trained]
    modules: list[Any] = [getattr(part, "submod", part) for part in parts]
    for module in modules:
        check_can_be_saved(module)
    found = [module for part in modules for module in part.modules() if isinstance(module, Stage)]
    if not found:
        raise ConfigError(
            f"save_pretrained: {type(trained).__name__} has no stage of a Hugging Face model. Pass the object returned "
            "by pipeline_module or pipeline_stage, or the engine that trains it."
        )
    return found


def check_can_be_saved(module: nn.Module) -> None:
    """Raise a ``ConfigError`` if a stage is wrapped by torch's first FSDP, which flattens its parameters."""
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ConfigError(
            f"{type(module).__name__}: stages of a Hugging Face model in FullyShardedDataParallel cannot be saved. Use "
            "fully_shard of torch.distributed.fsdp instead."
        )


def _whole_weights(stage: Stage, *, is_kept: bool) -> dict[str, torch.Tensor]:
    """Return a stage's weights, after gathering those that are sharded. All ranks of the stage call this together.

    Where they are not kept, no weights are returned.
    """
    weights = {}
    for name, tensor in stage.model.state_dict().items():
        whole = tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor
        if is_kept:
            weights[name] = whole
    return weights


def _write_stage(stage: Stage, weights: dict[str, torch.Tensor], folder: Path) -> list[tuple[str, str]]:
    """Write a stage's files, and return the names of its weights with their files."""
    part = folder / f".layers-{stage.layers.start:05d}"
    stage.model.save_pretrained(part, state_dict=weights)
    where = []
    for number, file in enumerate(sorted(part.glob("*.safetensors"))):
        name = f"model-{stage.layers.start:05d}-{number:05d}.safetensors"
        with safe_open(file, framework="pt") as tensors:
            where += [(tensor, name) for tensor in tensors.keys()]  # noqa: SIM118 - it is not a dictionary
        file.replace(folder / name)
    if stage.is_first:
        for file in part.glob("*.json"):
            if not file.name.endswith(".index.json"):
                file.replace(folder / file.name)
    shutil.rmtree(part)
    return where


def _finish(written: Sequence[tuple[int, list[tuple[str, str]]]], unfinished: Path, folder: Path) -> None:
    """Move all stages' weights and their index to the folder, and remove those of another model.

    During this time there is no index, so that a folder with files of two models is an error when it is read.
    """
    where: dict[str, str] = {}
    for name, file_name in chain.from_iterable(tensors for _, tensors in written):
        # The head of a tied model is also on the last stage. The first stage's copy is equivalent.
        where.setdefault(name, file_name)
    new = set(where.values())
    size = sum((unfinished / name).stat().st_size for name in new)
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
    (unfinished / _INDEX).write_text(index, encoding="utf-8")
    (folder / _INDEX).unlink(missing_ok=True)
    # A file with the whole model would be read instead of the index.
    for file in [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")]:
        if file.name not in new:
            file.unlink()
    for name in [*new, *(file.name for file in unfinished.glob("*.json") if file.name != _INDEX), _INDEX]:
        (unfinished / name).replace(folder / name)
