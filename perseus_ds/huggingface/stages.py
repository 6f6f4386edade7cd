"""Stages of a Hugging Face model: each rank builds its own, and runs the model's own forward around its layers.

A causal model of transformers is an embedding, a list of layers, a norm and a head. A *cut* says how many of the layers
each stage has; the first stage has the embedding too, the last one the norm and the head. A stage is the model's own
class, built without storage, in which the layers of other stages are replaced by :class:`_Absent`: the one before the
stage's first layer returns what the previous stage sent, the one behind its last layer keeps what the next one gets.
Masks, position embeddings, scales and heads are therefore computed by the model's own code, and no table of models is
needed: which parts come before and behind the layers is in the pipeline plan that the model declares
(``base_model_pp_plan`` of its configuration).

Stages know no engine: ``perseus_ds.pipeline_module`` makes a DeepSpeed module of them, ``perseus_ds.pipeline_stage`` a
stage of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from perseus_ds.artifacts.layout import EMBEDDING, HEAD, Part, kind_of_layer
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.optimizer.partition import uniform_cut

T = TypeVar("T")
# Without it, transformers waits for more than 20 s for every file.
_HUB_ANSWERS_S = 5.0
_INDEX = "model.safetensors.index.json"
# The label of a token that is not learnt.
_NOT_LEARNT = -100

Source: TypeAlias = str | Path | PretrainedConfig
"""A model of the hub by its name, a folder that ``save_pretrained`` wrote, or a configuration (for new weights)."""


class _Absent(nn.Module):
    """Stands for a layer of another stage; it has that layer's plain attributes, which loops over layers read."""

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

    Args:
        model: A model of which :func:`build_stage` has kept this stage's parts.
        layers: The stage's layers, by their index in the model.
        inputs: Names of what the data have for the first stage: ``input_ids``, then ``attention_mask`` or
            ``position_ids`` where they have them. The latter are sent from stage to stage.
    """

    def __init__(self, model: PreTrainedModel, layers: range, inputs: Sequence[str] = ("input_ids",)) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.names = tuple(inputs)
        of_base = model.base_model.layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(of_base)
        # In a list, so that the model's parts are not registered twice.
        self._neighbours: list[Any] = [None if self.is_first else of_base[layers.start - 1]]
        self._neighbours += [None if self.is_last else of_base[layers.stop]]
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
        """Weight of the token embedding, on the stages that have it: the first, and the last where it is tied."""
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return what the next stage gets.

        Args:
            inputs: What the previous stage returned; for the first stage what the data have.

        Returns:
            Hidden states of shape (batch, sequence, hidden size), then masks and positions as they came, and the logits
            of the routers so far, of shape (layers, tokens, experts), where the model's loss needs them. Of the last
            stage, logits of shape (batch, sequence, vocabulary), and those of the routers.
        """
        before, behind = self._neighbours
        given = dict(zip(self.names, inputs, strict=False))
        hidden = given.pop("input_ids")
        routers = list(inputs[len(self.names) :])
        arguments: dict[str, Any] = {**given, "use_cache": False}
        if self._routed:
            arguments["output_router_logits"] = True
        if self.is_first:
            arguments["input_ids"] = hidden
        else:
            # The model's forward gets embeddings only to compute masks and positions from; what its scales and norms
            # before the layers make of them is replaced by what was received.
            arguments["inputs_embeds"] = hidden.detach()
            before.received = hidden
        output = self.model(**arguments) if self.is_last else self.model.base_model(**arguments)
        if not self.is_first:
            before.received = None
        if self._routed and output.router_logits:
            own = torch.stack([logits for logits in output.router_logits if logits is not None])
            routers = [torch.cat([*routers, own])]
        if self.is_last:
            return (output.logits, *routers) if routers else output.logits
        hidden, behind.seen = behind.seen, None
        size = self.model.config.get_text_config().hidden_size
        if hidden.dim() != 3 or hidden.shape[-1] != size:
            raise ConfigError(
                f"{type(self.model).__name__}: its layers pass on tensors of shape {tuple(hidden.shape)}, not hidden "
                f"states of shape (batch, sequence, {size}), all that its pipeline plan names. It cannot be cut."
            )
        carried = (*given.values(), *routers)
        return (hidden, *carried) if carried else hidden


def trained_tokens(labels: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the number of labels to learn: each is predicted from the tokens before it, so the first is not one."""
    return torch.stack([labels_of[..., 1:].ne(_NOT_LEARNT).sum() for labels_of in labels]).sum()


class CausalLoss:
    """The model's loss: of the next tokens, and of its routers if its configuration asks for that.

    Every trained token of a batch has the same weight, in whichever micro-batch and on whichever data-parallel rank it
    is, as in transformers' ``Trainer``. The mean over micro-batches and ranks is therefore the loss of the whole batch,
    and the engine's mean gradient is its gradient. :meth:`counting_tokens` counts the trained tokens before the first
    backward pass; ``perseus_ds.initialize`` and ``perseus_ds.attach`` make engines and schedules call it.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config.get_text_config()
        self._module = sys.modules[model_class(config).__module__]
        from transformers.loss.loss_utils import LOSS_MAPPING

        self._loss = LOSS_MAPPING["ForCausalLM"]
        self._tokens: torch.Tensor | None = None

    @contextmanager
    def counting_tokens(
        self, labels: Sequence[torch.Tensor], *, group: Any = None, device: Any = None, averaged: bool = True
    ) -> Iterator[None]:
        """Weight the losses of one batch's micro-batches by the trained tokens of all of them.

        Args:
            labels: Of all micro-batches of this rank.
            group: Process group of the ranks that train on other micro-batches of the batch, and average their
                gradients. All of them must call this method together.
            device: Of tensors that the group reduces; by default that of the labels.
            averaged: Whether the mean over micro-batches is the loss; if not, it is their sum.
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
            outputs: What the last stage returned.
            labels: The input's token ids, of shape (batch, sequence); -100 where there is nothing to learn.
            num_items_in_batch: What the sum over tokens is divided by, as in transformers; by default, the trained
                tokens of an average micro-batch, as :meth:`counting_tokens` has counted them.

        Raises:
            ConfigError: The trained tokens of the batch are not known.
        """
        tokens = self._tokens if num_items_in_batch is None else num_items_in_batch
        if tokens is None:
            raise ConfigError(
                "CausalLoss: the number of trained tokens in the whole batch is not known, and the mean over this "
                "micro-batch alone would give its tokens another weight. Make the engine with perseus_ds.initialize, "
                "or call perseus_ds.attach with the engine or schedule; otherwise give num_items_in_batch."
            )
        logits, *routers = outputs if isinstance(outputs, tuple | list) else (outputs,)
        loss = self._loss(logits=logits, labels=labels, vocab_size=self._config.vocab_size, num_items_in_batch=tokens)
        if routers:
            names = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = next(getattr(self._config, name) for name in names if hasattr(self._config, name))
            balance = self._module.load_balancing_loss_func(
                tuple(routers[0]), experts, self._config.num_experts_per_tok, None
            )
            loss = loss + self._config.router_aux_loss_coef * balance
        return loss  # type: ignore[no-any-return]


def _read(kind: Any, what: str, name: str | Path, **options: Any) -> Any:
    """Return what ``from_pretrained`` of a class reads: from this machine alone where the hub does not answer."""
    name, hub_answers = str(name), True
    if not Path(name).is_dir():
        try:
            HfApi().model_info(name, timeout=_HUB_ANSWERS_S)
        except HfHubHTTPError:
            pass  # there is no such model, or it may not be read, which transformers says
        except Exception:
            hub_answers = False
    try:
        return kind.from_pretrained(name, local_files_only=not hub_answers, **options)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        if hub_answers:
            raise ConfigError(
                f"{name}: no {what} could be read ({str(error).splitlines()[0]}). Give a model's name on the hub, or a "
                "folder that save_pretrained has written."
            ) from error
        raise ConfigError(
            f"{name}: no folder, and the hub does not answer within {_HUB_ANSWERS_S:g} s; this machine has no copy of "
            f'its {what}. Where there is a network, run "hf download {name} --local-dir FOLDER", and give that folder.'
        ) from error


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model of the hub or of a folder; a ``ConfigError`` if there is none."""
    return _read(AutoTokenizer, "tokenizer", name)


def read_config(source: Source) -> PretrainedConfig:
    """Return the configuration of a model that can be cut into stages.

    Raises:
        ConfigError: The hub or folder has no such model, or it declares no pipeline plan.
    """
    config = source if isinstance(source, PretrainedConfig) else _read(AutoConfig, "configuration", source)
    plan = getattr(config, "base_model_pp_plan", None)
    if not plan or "layers" not in plan:
        raise ConfigError(
            f"{type(config).__name__}: the model declares no pipeline plan (base_model_pp_plan) with layers, so where "
            "it may be cut is not known. Llama, Qwen, Mistral, Gemma, GPT-NeoX and some eighty others declare one."
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{type(config).__name__}: transformers has no causal model for it.")
    return config


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the causal model that a configuration is for."""
    found = AutoModelForCausalLM._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return the whole model without storage; a ``ConfigError`` if it does not have what its pipeline plan names."""
    with torch.device("meta"):
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


def stages_of(cut: Sequence[int], layers: int) -> list[range]:
    """Return the layers of each stage; a ``ConfigError`` if they are not all layers, or a stage has none."""
    if sum(cut) != layers or min(cut, default=0) < 1:
        raise ConfigError(
            f"cut: the model has {layers} layers; {list(cut)} are {sum(cut)}. Give each stage one or more of them, "
            "in order, so that all are used."
        )
    ends = list(accumulate(cut))
    return [range(end - count, end) for end, count in zip(ends, cut, strict=True)]


def cut_of(config: PretrainedConfig, stages: int, cut: Sequence[int] | None) -> tuple[int, ...]:
    """Return a cut that fits the model and the number of stages, else a ``ConfigError``; by default a uniform one."""
    layers = len(skeleton(config).base_model.layers)
    if cut is None:
        return uniform_cut(layers, stages)
    if len(cut) != stages:
        raise ConfigError(
            f"cut: {list(cut)} are {len(cut)} stages, not {stages}. Give each stage its number of layers."
        )
    stages_of(cut, layers)
    return tuple(cut)


def build_stage(
    source: Source,
    cut: Sequence[int],
    index: int,
    *,
    inputs: Sequence[str] = ("input_ids",),
    pretrained: bool | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1234,
    gradient_checkpointing: bool = False,
    sequence_length: int | None = None,
    vocabulary: int | None = None,
) -> Stage:
    """Build one stage, with storage and weights for its own layers only.

    Args:
        source: The model.
        cut: How many layers each stage has.
        index: Which stage.
        inputs: Names of what the data have, see :class:`Stage`.
        pretrained: Whether weights are read, by default for a name or a folder; each stage reads its own only.
            Otherwise they are new, and the same for every cut.
        dtype: Type of the weights.
        seed: Of new weights.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        sequence_length: Of the data, if it is to be checked that the model takes it.
        vocabulary: Number of tokens of the data's tokenizer, if it is to be checked that the model has them.

    Raises:
        ConfigError: The model cannot be cut, not like this, or does not fit the data.
    """
    config = read_config(source)
    _check_data(config, sequence_length, vocabulary)
    layers = stages_of(cut, sum(cut))[index]
    staged = _class_of_stage(model_class(config), cut, index)
    if pretrained is None:
        pretrained = not isinstance(source, PretrainedConfig)
    if pretrained:
        model = _read(staged, "weights", str(source), config=config, dtype=dtype)
    else:
        with torch.device("meta"):
            model = staged._from_config(config, dtype=dtype)
        _initialize(model.to_empty(device="cpu"), seed)
    if gradient_checkpointing:
        checkpoint_activations(model)
    stage = Stage(model.train(), layers, inputs)
    _try(stage)
    return stage


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have the activations of layers computed again in the backward pass."""
    # Renamed in transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def new_stage(config: PretrainedConfig, layers: range, *, device: torch.device | None, dtype: torch.dtype) -> Stage:
    """Build a stage of new weights; without layers, of the embedding or of the norm and the head alone.

    Without a device, a stage has shapes alone, under torch's ``FakeTensorMode``.
    """
    with nullcontext() if device is None else torch.device("meta"):
        model = model_class(config)._from_config(config, dtype=dtype)
    _keep(model, layers)
    if device is not None:
        _initialize(model.to_empty(device=device), seed=0)
    return Stage(model.train(), layers)


def _check_data(config: PretrainedConfig, sequence_length: int | None, vocabulary: int | None) -> None:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if sequence_length and longest and sequence_length > longest:
        raise ConfigError(
            f"sequence_length: the model has positions for {longest} tokens (max_position_embeddings), not for "
            f"{sequence_length}. Give it shorter sequences."
        )
    if vocabulary and vocabulary > text.vocab_size:
        raise ConfigError(
            f"vocabulary: the tokenizer has {vocabulary} tokens, the model {text.vocab_size} (vocab_size). Take the "
            f"model's own tokenizer, or new weights with a vocab_size of at least {vocabulary}."
        )


def _try(stage: Stage) -> None:
    """Run a stage on four tokens, so that a model that cannot be cut is an error before ranks wait for each other."""
    config = stage.model.config.get_text_config()
    hidden = torch.zeros(1, 4, config.hidden_size, dtype=stage.model.dtype)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            stage(tokens if stage.is_first else hidden, *(torch.ones_like(tokens) for _ in stage.names[1:]))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(stage.model).__name__}: layers {stage.layers.start} to {stage.layers.stop - 1} do not run alone "
            f"({str(error).splitlines()[0]}): its layers need more from each other than the hidden states that its "
            "pipeline plan names. It cannot be cut."
        ) from error


def _class_of_stage(whole: type[PreTrainedModel], cut: Sequence[int], index: int) -> type[PreTrainedModel]:
    """Return a model's class with a constructor that keeps one stage's parts."""

    def construct(model: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(model, config, *args, **kwargs)
        _check_plan(model)
        _keep(model, stages_of(cut, len(model.base_model.layers))[index])

    attributes = {
        "__init__": construct,
        "__module__": whole.__module__,
        # A checkpoint has the weights of all stages.
        "_keys_to_ignore_on_load_unexpected": [".*"],
        # Not rank 0 alone: each stage has weights of its own.
        "should_save_on_this_rank": lambda model, is_main_process: is_main_process,
    }
    return type(whole.__name__, (whole,), attributes)


def _keep(model: PreTrainedModel, layers: range) -> None:
    """Replace all parts of a model that belong to other stages."""
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
        # The head of a tied model is the embedding's weight, so the last stage has it too.
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


@torch.no_grad()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Give a stage's parts new weights, by the model's own rule and a seed for each part."""
    base = model.base_model
    layers = [
        (f"{name}.{index}", layer)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList)
        for index, layer in enumerate(child)
    ]
    of_base = [*layers, *base.named_children(), ("", base)]
    device = model.device
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):
        for owner, parts in ((base, of_base), (model, [*model.named_children(), ("", model)])):
            for name, part in parts:
                # A seed for each part, so that weights do not depend on the cut. torch.manual_seed would also seed
                # GPUs that are not in use here.
                torch.default_generator.manual_seed(seed + zlib.crc32(name.encode()))
                if on_gpu:
                    torch.cuda.manual_seed(seed + zlib.crc32(name.encode()))
                part.apply(owner._initialize_weights)
    model.tie_weights()


def save_pretrained(trained: Any, folder: Path | str) -> None:
    """Write a trained model into a folder, from which ``from_pretrained`` then reads the whole model.

    Every rank of the job calls it at once; it returns when the folder is complete. Of ranks that have the same stage
    (data parallelism), the first one writes. Weights of another model in the folder are removed, once all new ones are
    written: a job that is killed before leaves the folder as it was.

    Args:
        trained: What this rank trains: an engine or module of DeepSpeed, a stage of ``torch.distributed.pipelining``,
            or a list of stages.
        folder: The same for all ranks; is made if it is not there.

    Raises:
        ConfigError: Nothing of this is a stage of a Hugging Face model.
        PerseusError: A rank could not write; raised on all ranks.
    """
    folder = Path(folder)
    unfinished = folder / ".unfinished"
    rank = dist.get_rank() if dist.is_initialized() else 0
    stages = _stages_in(trained)

    def begin() -> list[int]:
        if rank == 0 and unfinished.exists():  # of a job that was killed
            shutil.rmtree(unfinished)
        return [stage.layers.start for stage in stages]

    of_ranks = _on_all_ranks(begin)
    others = set(chain(*of_ranks[:rank]))
    own = [stage for stage in stages if stage.layers.start not in others]
    try:
        written = _on_all_ranks(lambda: [(stage.layers.start, _write_stage(stage, unfinished)) for stage in own])
        _on_all_ranks(lambda: _finish(sorted(chain(*written)), unfinished, folder) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def _on_all_ranks(do: Callable[[], T]) -> list[T]:
    """Return what each rank's call returns, on all ranks; so is an error of one of them raised."""
    own: tuple[T | None, str]
    try:
        own = do(), ""
    except Exception as error:
        own = None, f"{type(error).__name__}: {error}"
    every: list[Any] = [own]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
    for rank, (_, failure) in enumerate(every):
        if failure:
            raise PerseusError(f"save_pretrained: rank {rank} could not write its part of the model ({failure}).")
    return [result for result, _ in every]


def _stages_in(trained: Any) -> list[Stage]:
    parts = trained if isinstance(trained, list | tuple) else [trained]
    modules: list[Any] = [getattr(part, "submod", part) for part in parts]
    found = [module for part in modules for module in part.modules() if isinstance(module, Stage)]
    if not found:
        raise ConfigError(
            f"save_pretrained: {type(trained).__name__} has no stage of a Hugging Face model. Give what "
            "pipeline_module or pipeline_stage returned, or the engine that trains it."
        )
    return found


def _write_stage(stage: Stage, folder: Path) -> list[tuple[str, str]]:
    """Write a stage's weights, and the first stage's configuration; return each weight's name and its file's."""
    part = folder / f".layers-{stage.layers.start:05d}"
    stage.model.save_pretrained(part)
    where = []
    for number, file in enumerate(sorted(part.glob("*.safetensors"))):
        name = f"model-{stage.layers.start:05d}-{number:05d}.safetensors"
        with safe_open(file, framework="pt") as tensors:
            where += [(tensor, name) for tensor in tensors.keys()]  # noqa: SIM118 - it is no dictionary
        file.replace(folder / name)
    if stage.is_first:
        for file in part.glob("*.json"):
            if not file.name.endswith(".index.json"):
                file.replace(folder / file.name)
    shutil.rmtree(part)
    return where


def _finish(written: Sequence[tuple[int, list[tuple[str, str]]]], unfinished: Path, folder: Path) -> None:
    """Move all stages' weights into the folder, with their index, in place of those of another model.

    There is no index meanwhile: a folder in which files of two models are mixed is an error when it is read.
    """
    where: dict[str, str] = {}
    for name, file_name in chain.from_iterable(tensors for _, tensors in written):
        # The head of a tied model is on the last stage too; the first stage's is as good.
        where.setdefault(name, file_name)
    new = set(where.values())
    size = sum((unfinished / name).stat().st_size for name in new)
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
    (unfinished / _INDEX).write_text(index, encoding="utf-8")
    (folder / _INDEX).unlink(missing_ok=True)
    # A file of the whole model would be read instead of the index.
    for file in [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")]:
        if file.name not in new:
            file.unlink()
    for name in [*new, *(file.name for file in unfinished.glob("*.json") if file.name != _INDEX), _INDEX]:
        (unfinished / name).replace(folder / name)
