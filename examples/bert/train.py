"""Pre-train BERT with DeepSpeed pipeline parallelism and Perseus.

    deepspeed --num_gpus 4 examples/bert/train.py model=tiny
    torchrun --nproc_per_node 4 examples/bert/train.py model=tiny steps=100 --profile

Configuration: ``configs/bert``, with Hydra. ``--profile`` is short for ``perseus.mode=profile``.
The objective is the masked language model of Devlin et al. (2019), without next-sentence prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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
    from transformers import AutoTokenizer, BertConfig
    from transformers.models.bert.modeling_bert import BertLayer
except ModuleNotFoundError as error:
    sys.exit(f'{error}. Install its requirements in the folder of the repository: pip install ".[examples]"')

INITIAL_STD = 0.02
LAYER_NORM_EPS = 1e-12
MASKED, REPLACED_BY_MASK, REPLACED_BY_ANY = 0.15, 0.8, 0.1  # a tenth of the masked tokens is not replaced
NO_LABEL = -100


class Embedding(nn.Embedding):
    """Token embedding. If tied, it is also the matrix of the language-model head."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class PositionsAndSegments(nn.Module):
    """Adds the embeddings of positions and segments. All tokens belong to the first segment."""

    def __init__(self, model: DictConfig) -> None:
        super().__init__()
        self.positions = nn.Parameter(INITIAL_STD * torch.randn(model.positions, model.width))
        self.segments = nn.Parameter(INITIAL_STD * torch.randn(2, model.width))
        self.norm = nn.LayerNorm(model.width, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(tokens + self.positions[: tokens.shape[1]] + self.segments[0]))


class Block(BertLayer):
    """A transformer block."""

    def __init__(self, config: BertConfig, linear_biases: bool) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL_STD)
                nn.init.zeros_(module.bias)
                if not linear_biases:
                    module.register_parameter("bias", None)


class HeadTransform(nn.Module):
    """Transform of the language-model head before the comparison with token embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        nn.init.normal_(self.dense.weight, std=INITIAL_STD)
        nn.init.zeros_(self.dense.bias)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.gelu(self.dense(hidden)))


def tied_head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits of shape (batch, sequence, vocabulary), without bias, from the embedding's weights."""
    return nn.functional.linear(hidden, embedding.weight)


class OutputBias(nn.Module):
    """Bias of the logit of each token."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.bias


def bert_layers(model: DictConfig) -> list[LayerSpec]:
    """Return the layers of a BERT. A ``PipelineModule`` builds only those of its stage."""
    config = BertConfig(
        hidden_size=model.width,
        num_attention_heads=model.heads,
        intermediate_size=4 * model.width,
        hidden_dropout_prob=model.dropout,
        attention_probs_dropout_prob=model.dropout,
        layer_norm_eps=LAYER_NORM_EPS,
        attn_implementation="sdpa",
    )
    token_embedding = (Embedding, model.vocabulary, model.width)
    return [
        TiedLayerSpec("embedding", *token_embedding),
        LayerSpec(PositionsAndSegments, model),
        *(LayerSpec(Block, config, model.linear_biases) for _ in range(model.layers)),
        LayerSpec(HeadTransform, model.width),
        TiedLayerSpec("embedding", *token_embedding, forward_fn=tied_head),
        LayerSpec(OutputBias, model.vocabulary),
    ]


def masked_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the masked tokens."""
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )
    return total / (labels != NO_LABEL).sum().clamp(min=1)


@dataclass(frozen=True)
class Vocabulary:
    """Conversion of texts to tokens.

    Attributes:
        size: Number of tokens.
        encode: Converts a text to tokens.
        mask: Token that replaces masked ones.
        begin: Token at the start of each sequence, if any ([CLS]).
        end: Token at the end of each sequence, if any ([SEP]).
    """

    size: int
    encode: Callable[[str], list[int]]
    mask: int
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


def read_vocabulary(path: str | None, largest: int) -> Vocabulary:
    """Return the vocabulary of a Hugging Face tokenizer's folder. By default, the 256 bytes and a mask."""
    if path is None:
        return Vocabulary(size=257, encode=lambda text: list(text.encode()), mask=256)
    if not Path(path).is_dir():
        raise ConfigError(f"data.tokenizer: {path} is not a folder. Expected the folder of a tokenizer.")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.mask_token_id is None:
        raise ConfigError(f"data.tokenizer: {path} has no mask token, which a masked language model needs.")
    if len(tokenizer) > largest:
        raise ConfigError(f"model.vocabulary: expected at least {len(tokenizer)}, the tokenizer's size, got {largest}.")
    return Vocabulary(
        size=len(tokenizer),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        mask=tokenizer.mask_token_id,
        begin=() if tokenizer.cls_token_id is None else (tokenizer.cls_token_id,),
        end=() if tokenizer.sep_token_id is None else (tokenizer.sep_token_id,),
    )


def read_sequences(data: DictConfig, vocabulary: Vocabulary, sequence_length: int) -> torch.Tensor:
    """Return texts as tokens of shape (sequences, sequence_length), int64."""
    tokens: list[int] = []
    for text in read_texts(data.path):
        tokens += vocabulary.encode(text)
        if len(tokens) >= data.max_tokens:
            break
    room = sequence_length - len(vocabulary.begin) - len(vocabulary.end)
    count = min(len(tokens), data.max_tokens) // room
    windows = torch.tensor(tokens[: count * room], dtype=torch.int64).view(count, room)
    begin, end = (torch.tensor(t, dtype=torch.int64).expand(count, -1) for t in (vocabulary.begin, vocabulary.end))
    return torch.cat([begin, windows, end], dim=1)


def masked_dataset(sequences: torch.Tensor, vocabulary: Vocabulary, seed: int) -> TensorDataset:
    """Mask sequences and shuffle them.

    The mask is fixed, so that first-stage tokens and last-stage labels agree. Of 15 % of the tokens of each sequence,
    80 % become the mask, 10 % any token, and 10 % are kept. Only these have labels. All sequences have equally many, so
    that the mean over micro-batches gives each label the same weight.
    """
    random = torch.Generator().manual_seed(seed)
    draw = torch.rand(sequences.shape, generator=random)
    for special in (*vocabulary.begin, *vocabulary.end):
        draw[sequences == special] = 2.0
    lowest = draw.topk(round(MASKED * sequences.shape[1]), largest=False).indices
    chosen = torch.zeros_like(sequences, dtype=torch.bool).scatter(1, lowest, True) & (draw < 1)
    fate = torch.rand(sequences.shape, generator=random)
    anything = torch.randint(vocabulary.size, sequences.shape, generator=random)
    inputs = sequences.where(~chosen | (fate >= REPLACED_BY_MASK), vocabulary.mask)
    inputs = torch.where(chosen & (fate >= 1 - REPLACED_BY_ANY), anything, inputs)
    order = torch.randperm(len(sequences), generator=random)
    return TensorDataset(inputs[order], sequences.where(chosen, NO_LABEL)[order])


def training_data(cfg: DictConfig, pipelines: int) -> TensorDataset:
    """Return (masked tokens, labels), enough for the given number of data-parallel pipelines."""
    vocabulary = read_vocabulary(cfg.data.tokenizer, largest=cfg.model.vocabulary)
    data = masked_dataset(read_sequences(cfg.data, vocabulary, cfg.model.sequence_length), vocabulary, cfg.seed)
    require_batches(len(data), "sequences", cfg, pipelines)
    return data


@hydra.main(version_base="1.3", config_path="../../configs/bert", config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> None:
    """Train, or measure a profile."""
    ranks = start_ranks()
    stages = cfg.stages or ranks

    with torch.no_grad():  # tying the head copies weights between stages
        module = PipelineModule(
            layers=bert_layers(cfg.model),
            num_stages=stages,
            loss_fn=masked_lm_loss,
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
