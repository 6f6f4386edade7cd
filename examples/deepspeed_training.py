"""Common parts of the examples that train with DeepSpeed and are configured with Hydra."""

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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from perseus_ds.engines.engine import reported_once
from perseus_ds.errors import ConfigError


def deepspeed_config(cfg: DictConfig, pipelines: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration with its ``perseus`` block, for the given number of pipelines."""
    sizes = cfg if "global_batch" in cfg else cfg.model
    size = sizes.micro_batch_size
    parts = [cfg.deepspeed, cfg.deepspeed_on_gpu] if torch.cuda.is_available() else [cfg.deepspeed]
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge(*parts), resolve=True)  # type: ignore[assignment]
    config["train_micro_batch_size_per_gpu"] = size
    config["gradient_accumulation_steps"] = cfg.micro_batches or max(1, sizes.global_batch // (size * pipelines))
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    config["perseus"] = settings["perseus"]
    return config


def read_texts(path: str | None) -> Iterator[str]:
    """Yield the texts of a file, a folder saved by ``datasets``, or the Python standard library."""
    if path is not None and Path(path).is_dir():
        yield from _read_saved_dataset(path)
        return
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def _read_saved_dataset(path: str) -> Iterator[str]:
    """Yield the ``text`` column of a dataset that was saved by Hugging Face's ``save_to_disk``."""
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(
            f"data.path: reading the folder {path} requires the package datasets. Install it, or use a text file."
        ) from error
    saved = load_from_disk(path)
    saved = saved.get("train", saved) if isinstance(saved, dict) else saved
    if "text" not in saved.column_names:
        raise ConfigError(f"data.path: {path} has the columns {saved.column_names}, expected one called text.")
    yield from saved["text"]


def require_batches(count: int, what: str, cfg: DictConfig, pipelines: int) -> None:
    """Check that there is a micro-batch for each data-parallel pipeline."""
    least = cfg.model.micro_batch_size * pipelines
    if count < least:
        raise ConfigError(f"data: {count} {what}, expected at least {least}, a micro-batch for each pipeline.")


def start_ranks() -> int:
    """Connect the ranks and select this one's GPU. Return the number of ranks."""
    deepspeed.init_distributed()
    ranks = torch.distributed.get_world_size()
    if torch.cuda.is_available():
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    elif ranks > 1:
        torch.set_num_threads(1)  # the ranks share the cores
    return ranks


def train(engine: Any, cfg: DictConfig) -> None:
    """Train for the configured number of steps, or until a profile is measured."""
    profiling = cfg.perseus.enabled and cfg.perseus.mode == "profile"
    for _ in range(cfg.steps):
        engine.train_batch()
        if profiling and engine.perseus.profiled:
            break
    torch.distributed.destroy_process_group()


def run(main: Callable[[], None]) -> None:
    """Run an example's main function, which Hydra calls with the configuration."""
    from hydra.errors import HydraException

    # DeepSpeed's launcher adds --local_rank, which Hydra does not accept. The environment contains the same value.
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    sys.argv[1:] = ["perseus.mode=profile" if a == "--profile" else a for a in arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions are not caught, so that one rank prints them without a traceback
    with reported_once(HydraException, OmegaConfBaseException):
        main()
