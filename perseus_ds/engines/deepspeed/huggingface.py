"""A Hugging Face model as a DeepSpeed ``PipelineModule``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from transformers import PretrainedConfig

from perseus_ds.engines.engine import reported_once
from perseus_ds.huggingface.hub import hub_options
from perseus_ds.huggingface.stages import CausalLoss, Source, build_stage, cut_of, read_config


class StageLayer(nn.Module):
    """A stage as a layer of a ``PipelineModule``, which accepts one tensor or one tuple."""

    def __init__(self, source: Source, cut: tuple[int, ...], index: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.stage = build_stage(source, cut, index, **options)

    @property
    def embedding(self) -> torch.Tensor:
        """Weight that the first and the last stage share if the model ties them."""
        return self.stage.embedding

    def forward(self, inputs: Any) -> Any:
        return self.stage(*inputs) if isinstance(inputs, tuple | list) else self.stage(inputs)


@reported_once()
def pipeline_module(
    source: Source,
    *,
    num_stages: int,
    config: PretrainedConfig | None = None,
    cut: Sequence[int] | None = None,
    topology: Any = None,
    **options: Any,
) -> PipelineModule:
    """Build a DeepSpeed ``PipelineModule`` with its loss from a Hugging Face model.

    Each rank builds its own stage.

    Data are pairs of inputs and labels. Inputs are token ids of shape (batch, sequence), or a tuple of these and other
    ``inputs``. Labels are the same token ids. If the embedding is also the head, DeepSpeed ties the two.

    Args:
        source: A causal model that declares a pipeline plan: its name on the hub, a folder, or a configuration.
        num_stages: Number of stages, a divisor of the world size.
        config: Configuration instead of the model's own, for its weights with other settings.
        cut: Number of layers of each stage. By default all stages have equally many.
        topology: DeepSpeed's topology of ranks, instead of the number of stages.
        **options: Options for data and weights, see :func:`~perseus_ds.huggingface.stages.build_stage`.

    Raises:
        ConfigError: The model cannot be read or cut as requested.
    """
    config = options["config"] = read_config(source, config, **hub_options(options))
    cut = cut_of(config, num_stages, cut)
    specs: list[LayerSpec] = [LayerSpec(StageLayer, source, cut, stage, options) for stage in range(len(cut))]
    tied = len(cut) > 1 and bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    if tied:
        for stage in (0, len(cut) - 1):
            specs[stage] = TiedLayerSpec(
                "embedding", StageLayer, source, cut, stage, options, tied_weight_attr="embedding"
            )
    shape = {"num_stages": len(cut)} if topology is None else {"topology": topology}
    with torch.no_grad():  # DeepSpeed copies tied weights between stages
        module = PipelineModule(layers=specs, loss_fn=CausalLoss(config), partition_method="uniform", **shape)
    if tied and module.stage_id == len(cut) - 1:
        # DeepSpeed treats the whole tied layer as a copy, which is omitted in norms of gradients. Only the embedding is
        # one.
        layer = module.tied_modules["embedding"]
        for parameter in layer.parameters():
            parameter.ds_pipe_replicated = parameter is layer.embedding
    return module
