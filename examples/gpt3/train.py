"""Pre-train GPT-3 with DeepSpeed pipeline parallelism and Perseus.

    deepspeed --num_gpus 4 examples/gpt3/train.py model=tiny
    torchrun --nproc_per_node 4 examples/gpt3/train.py model=tiny steps=100 --profile

Configuration: ``configs/gpt3``, with Hydra. ``--profile`` is short for ``perseus.mode=profile``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[2]))

import perseus_ds
from examples.deepspeed_training import deepspeed_config, read_texts, require_batches, run, start_ranks, train
from perseus_ds.errors import ConfigError

try:
    import hydra
    from transformers import AutoTokenizer, GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
except ModuleNotFoundError as error:
    sys.exit(f'{error}. Install its requirements in the folder of the repository: pip install ".[examples]"')

INITIAL_STD = 0.02


class Embedding(nn.Embedding):
    """Token embedding. If tied, it is also the language-model head."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class Positions(nn.Embedding):
    """Adds the learned embedding of each position."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.weight[: hidden.shape[1]]


class Block(GPT2Block):
    """A transformer block. As in GPT-2, initial weights of residual branches are smaller in deeper models."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__(config, layer_idx=index)
        for projection in (self.attn.c_proj, self.mlp.c_proj):
            nn.init.normal_(projection.weight, std=INITIAL_STD / (2 * config.n_layer) ** 0.5)


class Head(nn.Linear):
    """Language-model head with its own weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


def tied_head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of shape (batch, sequence, vocabulary), using the embedding's weights."""
    return nn.functional.linear(hidden, embedding.weight)


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy. ``labels`` are the inputs shifted by one token."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gpt3_layers(model: DictConfig) -> list[LayerSpec]:
    """Return the layers of a GPT-3. A ``PipelineModule`` builds only those of its stage."""
    config = GPT2Config(
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        n_positions=model.sequence_length,
        vocab_size=model.vocabulary,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,  # transformers warns if they are outside of a tiny vocabulary
        eos_token_id=None,
        attn_implementation="sdpa",  # causal without a mask; "eager" would need one
    )
    token_embedding = (Embedding, model.vocabulary, model.width)
    blocks = [LayerSpec(Block, config, index) for index in range(model.layers)]
    body = [LayerSpec(Positions, model.sequence_length, model.width), *blocks, LayerSpec(nn.LayerNorm, model.width)]
    if model.tie_head:
        return [
            TiedLayerSpec("embedding", *token_embedding),
            *body,
            TiedLayerSpec("embedding", *token_embedding, forward_fn=tied_head),
        ]
    return [LayerSpec(*token_embedding), *body, LayerSpec(Head, model.width, model.vocabulary, bias=False)]


def read_tokens(data: DictConfig, vocabulary: int) -> torch.Tensor:
    """Return the first tokens of the configured texts as int64. Without a tokenizer, each byte is a token."""
    encode = tokenizer_encoder(data.tokenizer, vocabulary) if data.tokenizer else lambda text: list(text.encode())
    tokens: list[int] = []
    for text in read_texts(data.path):
        tokens += encode(text)
        if len(tokens) >= data.max_tokens:
            break
    return torch.tensor(tokens[: data.max_tokens], dtype=torch.int64)


def tokenizer_encoder(path: str, vocabulary: int) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text and appends an end token, with the tokenizer in a folder."""
    if not Path(path).is_dir():
        raise ConfigError(f"data.tokenizer: {path} is not a folder. Expected the folder of a tokenizer.")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model.vocabulary: expected at least {len(tokenizer)}, the tokenizer's size, got {vocabulary}."
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer.encode(text, add_special_tokens=False) + end


def next_token_dataset(tokens: torch.Tensor, sequence_length: int, seed: int) -> TensorDataset:
    """Cut text into shuffled pairs (tokens, next tokens) of ``sequence_length``."""
    count = max(0, len(tokens) - 1) // sequence_length
    inputs = tokens[: count * sequence_length].view(count, sequence_length)
    labels = tokens[1 : count * sequence_length + 1].view(count, sequence_length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs[order], labels[order])


def training_data(cfg: DictConfig, pipelines: int) -> TensorDataset:
    """Return (tokens, next tokens), enough for the given number of data-parallel pipelines."""
    data = next_token_dataset(read_tokens(cfg.data, cfg.model.vocabulary), cfg.model.sequence_length, cfg.seed)
    require_batches(len(data), "sequences", cfg, pipelines)
    return data


@hydra.main(version_base="1.3", config_path="../../configs/gpt3", config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> None:
    """Train, or measure a profile."""
    ranks = start_ranks()
    stages = cfg.stages or ranks

    with torch.no_grad():  # tying the head copies weights between stages
        module = PipelineModule(
            layers=gpt3_layers(cfg.model),
            num_stages=stages,
            loss_fn=causal_lm_loss,
            partition_method=cfg.model.partition,
            activation_checkpoint_interval=1 if cfg.model.activation_checkpointing else 0,
            checkpointable_layers=["Block"],
            seed_layers=True,  # the same weights for all partitions
            seed_fn=torch.manual_seed,
            base_seed=cfg.seed,
        )
    engine, *_ = perseus_ds.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=training_data(cfg, pipelines=ranks // stages),
        config=deepspeed_config(cfg, pipelines=ranks // stages),
    )
    train(engine, cfg)


if __name__ == "__main__":
    run(main)
