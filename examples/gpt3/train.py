"""Pre-train GPT-3 with DeepSpeed pipeline parallelism and Perseus.

    deepspeed --num_gpus 4 examples/gpt3/train.py model=tiny
    torchrun --nproc_per_node 4 examples/gpt3/train.py model=tiny steps=100 --profile

Configuration: ``configs/gpt3``, by Hydra. ``--profile`` is short for ``perseus.mode=profile``.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.utils.data import TensorDataset

import perseus_ds
from perseus_ds.engines.engine import reported_once
from perseus_ds.errors import ConfigError

try:
    import hydra
    from hydra.errors import HydraException
    from transformers import AutoTokenizer, GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
except ModuleNotFoundError as error:
    sys.exit(f'{error}. Install what this example needs, in the folder of the repository: pip install ".[examples]"')

INITIAL_STD = 0.02


class Embedding(nn.Embedding):
    """Token embedding; tied, it is the language-model head as well."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class Positions(nn.Embedding):
    """Adds the learned embedding of each position."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.weight[: hidden.shape[1]]


class Block(GPT2Block):
    """A transformer block; its residual branches start smaller the deeper the model is, as in GPT-2."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__(config, layer_idx=index)
        for projection in (self.attn.c_proj, self.mlp.c_proj):
            nn.init.normal_(projection.weight, std=INITIAL_STD / (2 * config.n_layer) ** 0.5)


class Head(nn.Linear):
    """Language-model head with weights of its own."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


def tied_head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of shape (batch, sequence, vocabulary), using the embedding's weights."""
    return nn.functional.linear(hidden, embedding.weight)


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy; ``labels`` are the inputs shifted by one token."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gpt3_layers(model: DictConfig) -> list[LayerSpec]:
    """Return the layers of a GPT-3 of the given shape, for a ``PipelineModule`` to build its own share of."""
    config = GPT2Config(
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        n_positions=model.sequence_length,
        vocab_size=model.vocabulary,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,  # transformers warns of those outside of a tiny vocabulary
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


def read_texts(path: str | None) -> Iterator[str]:
    """Yield the texts of a file, of a folder saved by ``datasets``, or of the Python standard library's modules."""
    if path is not None and Path(path).is_dir():
        yield from read_saved_dataset(path)
        return
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def read_saved_dataset(path: str) -> Iterator[str]:
    """Yield the ``text`` column of what Hugging Face's ``save_to_disk`` wrote."""
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(
            f"data.path: to read the folder {path}, pip install datasets; or give a text file."
        ) from error
    saved = load_from_disk(path)
    saved = saved.get("train", saved) if isinstance(saved, dict) else saved
    if "text" not in saved.column_names:
        raise ConfigError(f"data.path: {path} has the columns {saved.column_names}; expected one called text.")
    yield from saved["text"]


def read_tokens(data: DictConfig, vocabulary: int) -> torch.Tensor:
    """Return the first tokens of the texts that ``data`` names, int64; without a tokenizer, one token a byte."""
    encode = tokenizer_encoder(data.tokenizer, vocabulary) if data.tokenizer else lambda text: list(text.encode())
    tokens: list[int] = []
    for text in read_texts(data.path):
        tokens += encode(text)
        if len(tokens) >= data.max_tokens:
            break
    return torch.tensor(tokens[: data.max_tokens], dtype=torch.int64)


def tokenizer_encoder(path: str, vocabulary: int) -> Callable[[str], list[int]]:
    """Return what makes tokens of a text, its end marked, by the Hugging Face tokenizer of a folder."""
    if not Path(path).is_dir():
        raise ConfigError(f"data.tokenizer: {path} is not a folder; expected one with a tokenizer in it.")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model.vocabulary: expected at least {len(tokenizer)}, the tokenizer's size, got {vocabulary}."
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer.encode(text, add_special_tokens=False) + end


def next_token_dataset(tokens: torch.Tensor, sequence_length: int, seed: int) -> TensorDataset:
    """Cut text into (tokens, next tokens) of ``sequence_length`` each, shuffled."""
    count = max(0, len(tokens) - 1) // sequence_length
    inputs = tokens[: count * sequence_length].view(count, sequence_length)
    labels = tokens[1 : count * sequence_length + 1].view(count, sequence_length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs[order], labels[order])


def training_data(cfg: DictConfig, pipelines: int) -> TensorDataset:
    """Return (tokens, next tokens) as the configuration says, enough for this many data-parallel pipelines."""
    data = next_token_dataset(read_tokens(cfg.data, cfg.model.vocabulary), cfg.model.sequence_length, cfg.seed)
    least = cfg.model.micro_batch_size * pipelines
    if len(data) < least:
        raise ConfigError(f"data: {len(data)} sequences, less than a micro-batch for each pipeline: {least}.")
    return data


def deepspeed_config(cfg: DictConfig, pipelines: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration, ``perseus`` block included, for this many data-parallel pipelines."""
    size = cfg.model.micro_batch_size
    parts = [cfg.deepspeed, cfg.deepspeed_on_gpu] if torch.cuda.is_available() else [cfg.deepspeed]
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge(*parts), resolve=True)  # type: ignore[assignment]
    config["train_micro_batch_size_per_gpu"] = size
    config["gradient_accumulation_steps"] = cfg.micro_batches or max(1, cfg.model.global_batch // (size * pipelines))
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    config["perseus"] = settings["perseus"]
    return config


@hydra.main(version_base="1.3", config_path="../../configs/gpt3", config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> None:
    """Train, or measure a profile."""
    deepspeed.init_distributed()
    ranks = torch.distributed.get_world_size()
    if torch.cuda.is_available():
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    elif ranks > 1:
        torch.set_num_threads(1)  # the ranks share the cores
    stages = cfg.stages or ranks

    with torch.no_grad():  # tying the head copies weights between stages
        module = PipelineModule(
            layers=gpt3_layers(cfg.model),
            num_stages=stages,
            loss_fn=causal_lm_loss,
            partition_method=cfg.model.partition,
            activation_checkpoint_interval=1 if cfg.model.activation_checkpointing else 0,
            checkpointable_layers=["Block"],
            seed_layers=True,  # the same weights however the layers are spread over stages
            seed_fn=torch.manual_seed,
            base_seed=cfg.seed,
        )
    engine, *_ = perseus_ds.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=training_data(cfg, pipelines=ranks // stages),
        config=deepspeed_config(cfg, pipelines=ranks // stages),
    )
    profiling = cfg.perseus.enabled and cfg.perseus.mode == "profile"
    for _ in range(cfg.steps):
        engine.train_batch()
        if profiling and engine.perseus.profiled:
            break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # DeepSpeed's launcher adds --local_rank, which Hydra does not know; the environment says the same.
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    sys.argv[1:] = ["perseus.mode=profile" if a == "--profile" else a for a in arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what is wrong comes through, and one rank prints it without a traceback
    with reported_once(HydraException, OmegaConfBaseException):
        main()
