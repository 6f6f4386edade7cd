"""Pre-train or fine-tune a Hugging Face model with DeepSpeed pipeline parallelism and Perseus.

    deepspeed --num_gpus 4 examples/huggingface/train.py model.name=Qwen/Qwen3-0.6B data.path=my_texts lr=1e-5
    torchrun --nproc_per_node 2 examples/huggingface/train.py     # a tiny model, also without GPUs

Configuration: ``configs/huggingface``, with Hydra. ``--profile`` is short for ``perseus.mode=profile``.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from omegaconf import DictConfig
from tqdm import trange

sys.path.append(str(Path(__file__).parents[2]))

import perseus_ds
from examples.deepspeed_training import deepspeed_config, run, start_ranks
from perseus_ds.errors import ConfigError

try:
    import hydra
    import transformers
    from datasets import Dataset, disable_progress_bars, load_dataset, load_from_disk
    from transformers import AutoConfig, ByT5Tokenizer, PreTrainedTokenizerBase

    from perseus_ds.huggingface.stages import read_tokenizer
except ModuleNotFoundError as error:
    sys.exit(f'{error}. Install its requirements in the folder of the repository: pip install ".[examples]"')


def read_texts(data: DictConfig) -> Dataset:
    """Return the configured texts as a dataset with a column ``text``."""
    path = Path(data.path or sysconfig.get_path("stdlib"))
    if not path.exists():
        try:
            return load_dataset(data.path, data.subset, split="train")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.path: {path} is neither a file nor a folder, and cannot be read from the hub "
                f"({str(error).splitlines()[0]}). Use an existing path, such as a folder saved by datasets."
            ) from error
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = load_from_disk(data.path)
        return saved if isinstance(saved, Dataset) else saved["train"]
    files = [path] if path.is_file() else sorted(path.rglob("*.txt") if data.path else path.glob("asyncio/*.py"))
    if not files:
        raise ConfigError(f"data.path: {path} contains neither *.txt files nor a dataset saved by datasets.")
    return load_dataset("text", data_files=[str(file) for file in files], sample_by="document", split="train")


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Return the texts' tokens as sequences of equal length, with an end token after each text."""
    if "text" not in texts.column_names:
        raise ConfigError(f"data.path: the columns are {texts.column_names}, expected one called text.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def sequences(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable(text + end for text in encoded))
        return {"input_ids": [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]}

    return texts.map(sequences, batched=True, remove_columns=texts.column_names).with_format("torch")


def batches(
    data: Dataset, *, size: int, pipelines: int, pipeline: int, seed: int, start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one pipeline's micro-batches endlessly, as tokens and labels, in a new order each epoch.

    Args:
        data: Sequences of tokens.
        size: Sequences per micro-batch.
        pipelines: Number of pipelines that train on the data.
        pipeline: Number of this pipeline.
        seed: Seed of the orders.
        start: Number of micro-batches to skip, which were trained before the checkpoint.
    """
    per_epoch = len(data) // (size * pipelines)
    first, done = divmod(start, per_epoch)
    for epoch in count(first):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
        rows = order[: per_epoch * pipelines * size].view(per_epoch, pipelines, size)
        for chosen in rows[done:, pipeline]:
            tokens = data[chosen.tolist()]["input_ids"]
            yield tokens, tokens  # the loss compares each token's prediction with the next token
        done = 0


def split(cfg: DictConfig, data: Dataset, global_batch: int) -> tuple[Dataset, Dataset]:
    """Return sequences for training, and held-out sequences for evaluation."""
    held_out = cfg.evaluation.batches * global_batch
    if len(data) < held_out + global_batch:
        raise ConfigError(
            f"data: {len(data)} sequences of {cfg.sequence_length} tokens, expected {held_out + global_batch} or more: "
            f"{global_batch} for a step and {held_out} for evaluation (evaluation.batches={cfg.evaluation.batches})."
        )
    if not held_out:
        return data, data
    parts = data.train_test_split(test_size=held_out, seed=cfg.seed)
    return parts["train"], parts["test"]


def prepare(cfg: DictConfig, ranks: int) -> tuple[PipelineEngine, PreTrainedTokenizerBase, Dataset]:
    """Return the engine (from a checkpoint if there is one), the tokenizer and the sequences of tokens."""
    stages = cfg.stages or ranks
    name = cfg.data.tokenizer or cfg.model.name
    tokenizer = read_tokenizer(name) if name else ByT5Tokenizer(extra_ids=0)  # one token per byte
    module = perseus_ds.pipeline_module(
        cfg.model.name or AutoConfig.for_model(**cfg.model.config),
        num_stages=stages,
        cut=cfg.model.cut,
        pretrained=cfg.model.pretrained,
        dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        seed=cfg.seed,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        sequence_length=cfg.sequence_length,
        vocabulary=len(tokenizer),
    )
    sequences = pack(read_texts(cfg.data), tokenizer, cfg.sequence_length)
    engine, *_ = perseus_ds.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=deepspeed_config(cfg, pipelines=ranks // stages),
    )
    if cfg.checkpoint.path and Path(cfg.checkpoint.path, "latest").exists():
        with torch.no_grad():  # DeepSpeed copies tied weights between stages
            engine.load_checkpoint(cfg.checkpoint.path)
    return engine, tokenizer, sequences


@hydra.main(version_base="1.3", config_path="../../configs/huggingface", config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> None:
    """Train, evaluate and save, or measure a profile."""
    ranks = start_ranks()
    rank = torch.distributed.get_rank()
    if rank > 0:
        disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()

    engine, tokenizer, sequences = prepare(cfg, ranks)
    to_train, to_evaluate = split(cfg, sequences, engine.train_batch_size())
    start = engine.global_steps
    share = {
        "size": cfg.micro_batch_size,
        "pipelines": engine.grid.get_data_parallel_world_size(),
        "pipeline": engine.grid.get_data_parallel_rank(),
        "seed": cfg.seed,
    }
    training = batches(to_train, **share, start=start * engine.gradient_accumulation_steps())
    profiling = cfg.perseus.enabled and cfg.perseus.mode == "profile"
    for step in trange(start + 1, cfg.steps + 1, initial=start, total=cfg.steps, disable=True if rank else None):
        engine.train_batch(training)  # prints the loss every log_every steps
        if profiling and engine.perseus.profiled:
            break
        if cfg.evaluation.batches and (step % cfg.evaluation.every == 0 or step == cfg.steps):
            evaluation = batches(to_evaluate, **share)
            losses = [engine.eval_batch(evaluation).item() for _ in range(cfg.evaluation.batches)]
            if rank == 0:
                print(f"steps: {step} evaluation loss: {sum(losses) / len(losses):.4f}", flush=True)
        if cfg.checkpoint.path and (step % cfg.checkpoint.every == 0 or step == cfg.steps):
            engine.save_checkpoint(cfg.checkpoint.path)
    if cfg.output_dir and not profiling:
        perseus_ds.save_pretrained(engine, cfg.output_dir)
        if rank == 0:
            tokenizer.save_pretrained(cfg.output_dir)
            print(f"the trained model is in {cfg.output_dir}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(main)
