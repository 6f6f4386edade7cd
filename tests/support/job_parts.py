"""What scripts of jobs on real ranks have in common: layers, data, hashes, connections, and one job after the other."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """Some linear layers and dropout, which draws from torch's generator."""

    def __init__(self, repeat: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.dropout(hidden, 0.1, self.training)


def batches(
    seed: int = 0, rows: int = 8, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random inputs and labels without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        data = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        yield data, data.roll(1, dims=1)


def config(rows: int, micro_batches: int, lr: float = 1e-2, **keys: Any) -> dict[str, Any]:
    """A config of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        **keys,
    }


def hash_of(*modules: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of the tensors of modules, each in the order of their names."""
    found = hashlib.sha256()
    for tensors in modules:
        for _, tensor in sorted(tensors):
            # FSDP shards parameters, and frees them, which it cannot once numpy has seen them.
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(own.detach().float().clone().numpy().tobytes())  # which represents every bf16 and fp16
    return found.hexdigest()


def next_random_number() -> float:
    """Return the random number that would be drawn next, without drawing it."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(1).item()


def leave_out_shared_memory() -> None:
    """Have DeepSpeed do without its operator for shared memory, which it compiles for half a minute and never uses."""
    # Not by its attribute of deepspeed.comm, which is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def told_by_rank_0(fact: bool) -> bool:
    """Return what rank 0 knows, told to all ranks."""
    told = torch.tensor([fact], dtype=torch.int32)
    dist.broadcast(told, 0)
    return bool(told)


def train_jobs(train: Callable[[dict[str, Any], list[dict[str, Any]]], dict[str, Any]]) -> None:
    """Train the jobs of ``jobs.json`` one after the other on this rank, and write what they report to ``rank<N>.json``.

    Args:
        train: Trains a job, which it gets with the reports of those before; returns what to report.
    """
    folder = Path(sys.argv[1])
    reports: list[dict[str, Any]] = []
    for job in json.loads((folder / "jobs.json").read_text()):
        # Until its phases, or as many as the longest job before it: how many that takes depends on the machine.
        longest = max((len(report.get("weights", ())) for report in reports), default=0)
        steps = sys.maxsize if job.keys() & {"until", "orders"} else longest
        reports.append(train({"steps": steps, **job}, reports))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
