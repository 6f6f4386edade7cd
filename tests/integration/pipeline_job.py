"""A training job of any user's: a small PipelineModule on real DeepSpeed ranks, described by a JSON file.

Started by torchrun with the file's path. Every rank writes ``rank<N>.json`` into the job's folder: losses by step,
a hash of its weights, what Perseus says of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import perseus_ds

WIDTH = 16


class Block(nn.Module):
    """A layer with dropout and batch statistics, whose random numbers and buffers a careless profiler would disturb."""

    def __init__(self, repeat: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.dropout(self.norm(hidden))


def batches(seed: int):
    generator = torch.Generator().manual_seed(seed)
    while True:
        data = torch.randn(8, WIDTH, generator=generator)
        yield data, data.roll(1, dims=1)


def pipeline_module(job: dict) -> PipelineModule:
    layers = [LayerSpec(Block, repeat) for repeat in job["work"]]
    loss = nn.MSELoss()
    common = {"layers": layers, "num_stages": job["stages"], "loss_fn": loss, "partition_method": "uniform"}
    if job.get("dualpipev"):
        from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

        return DualPipeVModule(**common)
    return PipelineModule(**common, seed_layers=True, base_seed=7)


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(11)
    module = pipeline_module(job)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": job["micro_batches"],
        "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        **job.get("deepspeed", {}),
    }
    if job.get("perseus") is not None:
        config["perseus"] = job["perseus"]
    engine, *_ = perseus_ds.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
    )
    rank = torch.distributed.get_rank()
    data = batches(100 + engine.grid.get_data_parallel_id())
    losses = []
    for step in range(job["steps"]):
        losses.append(float(engine.train_batch(data)))
        if step == job.get("evaluate_after"):
            losses.append(float(engine.eval_batch(batches(3))))
        if step == job.get("end_after"):
            end(job["end_by"], rank)
    weights = hashlib.sha256()
    for _, value in sorted(module.state_dict().items()):
        weights.update(value.numpy().tobytes())
    report = {
        "engine": type(engine).__name__,
        "bases": [base.__name__ for base in type(engine).__mro__],
        "losses": losses,
        "weights": weights.hexdigest(),
        "random": torch.rand(1).item(),
        "plan": getattr(getattr(engine, "perseus", None), "plan", None) is not None,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def end(how: str, rank: int) -> None:
    """End as jobs do that do not come to their end."""
    if how == "exit":
        sys.exit(0)
    if how == "exception":
        raise RuntimeError("the user's own mistake")
    if how == "kill" and rank != 1:
        return
    os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))


if __name__ == "__main__":
    main()
