"""A Hugging Face model as a stage of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from transformers import PretrainedConfig

from perseus_ds.engines.engine import reported_once
from perseus_ds.errors import ConfigError
from perseus_ds.huggingface.hub import hub_options
from perseus_ds.huggingface.stages import Source, build_stage, cut_of, read_config


@reported_once()
def pipeline_stage(
    source: Source,
    *,
    stage_index: int,
    num_stages: int,
    device: torch.device | str,
    config: PretrainedConfig | None = None,
    cut: Sequence[int] | None = None,
    group: Any = None,
    **options: Any,
) -> PipelineStage:
    """Build a stage of ``torch.distributed.pipelining`` from a Hugging Face model.

    Its loss is ``CausalLoss``.

    Args:
        source: A causal model that declares a pipeline plan: its name on the hub, a folder, or a configuration.
        stage_index: Number of the stage.
        num_stages: Number of stages over all ranks.
        device: Device of the stage.
        config: Configuration instead of the model's own, for its weights with other settings.
        cut: Number of layers of each stage. By default all stages have equally many.
        group: Process group of the pipeline's ranks. By default all ranks.
        **options: Options for data and weights, see :func:`~perseus_ds.huggingface.stages.build_stage`.

    Raises:
        ConfigError: The model cannot be read or cut as requested, or ties its embedding to its head.
    """
    config = read_config(source, config, **hub_options(options))
    if num_stages > 1 and getattr(config.get_text_config(), "tie_word_embeddings", False):
        raise ConfigError(
            f"{type(config).__name__}: the embedding and the head share one weight, but stages of torch cannot. Pass "
            "the model and config=, a configuration with tie_word_embeddings=False, for a separate head that begins as "
            "a copy of the embedding, or train with DeepSpeed."
        )
    stage = build_stage(source, cut_of(config, num_stages, cut), stage_index, config=config, **options)
    return PipelineStage(stage.to(device), stage_index, num_stages, torch.device(device), group=group)
