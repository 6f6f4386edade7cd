"""A Hugging Face model as a DeepSpeed ``PipelineModule``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from perseus_ds.engines.engine import reported_once
from perseus_ds.huggingface.stages import CausalLoss, Source, build_stage, cut_of, read_config


class StageLayer(nn.Module):
    """A stage as a layer of a ``PipelineModule``, which passes one tensor or one tuple."""

    def __init__(self, source: Source, cut: tuple[int, ...], index: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.stage = build_stage(source, cut, index, **options)

    @property
    def embedding(self) -> torch.Tensor:
        """The weight that the first and the last stage share where the model ties them."""
        return self.stage.embedding

    def forward(self, inputs: Any) -> Any:
        return self.stage(*inputs) if isinstance(inputs, tuple | list) else self.stage(inputs)


@reported_once()
def pipeline_module(
    source: Source, *, num_stages: int, cut: Sequence[int] | None = None, topology: Any = None, **options: Any
) -> PipelineModule:
    """Make a DeepSpeed ``PipelineModule`` of a Hugging Face model, with its loss; each rank builds its own stage.

    Data are pairs of inputs and labels: the token ids of shape (batch, sequence), or a tuple of them with the other
    ``inputs``, and the same token ids as labels. An embedding that is the head as well is tied by DeepSpeed.

    Args:
        source: A causal model that declares a pipeline plan: its name on the hub, a folder, or a configuration.
        num_stages: Stages, of which the world size is a multiple.
        cut: How many layers each stage has; by default equally many.
        topology: DeepSpeed's, instead of the number of stages, where ranks are to be laid out by it.
        **options: What data have and how weights are read, as of
            :func:`~perseus_ds.huggingface.stages.build_stage`.

    Raises:
        ConfigError: The model cannot be read or cut, or not like this.
    """
    config = read_config(source)
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
        # DeepSpeed takes all of a tied layer for a copy, which norms of gradients leave out; only the embedding is.
        layer = module.tied_modules["embedding"]
        for parameter in layer.parameters():
            parameter.ds_pipe_replicated = parameter is layer.embedding
    return module
