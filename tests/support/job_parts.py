"""Common parts of jobs on real ranks: layers, data, hashes, and running several jobs."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """Linear layers and dropout, which draws from torch's generator."""

    def __init__(self, repeat: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.dropout(hidden, 0.1, self.training)


def batches(
    seed: int = 0, sizes: Sequence[int] = (8,), dtype: torch.dtype = torch.float32, nan_at: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random inputs and labels endlessly, with these numbers of rows in turn, and NaN in one of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    for number, rows in enumerate(itertools.cycle(sizes)):
        data = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        if number == nan_at:
            data[0, 0] = float("nan")
        yield data, data.roll(1, dims=1)


def config(rows: int, micro_batches: int, lr: float = 1e-2, **keys: Any) -> dict[str, Any]:
    """Return a DeepSpeed config."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        **keys,
    }


def hash_of(*modules: Iterable[tuple[str | int, torch.Tensor]]) -> str:
    """Return a hash of the tensors of modules, each in the order of its names."""
    found = hashlib.sha256()
    for tensors in modules:
        for _, tensor in sorted(tensors):
            # FSDP frees its shards of parameters, which fails if numpy refers to them.
            own = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().cpu().clone()
            found.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def next_random_number() -> float:
    """Return the next random number without drawing it."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(1).item()


def leave_out_shared_memory() -> None:
    """Disable DeepSpeed's shared-memory operator, which is slow to compile and never used."""
    # Not through the attribute of deepspeed.comm, which is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def of_rank_0(fact: bool) -> bool:
    """Return the value of rank 0, broadcast to all ranks."""
    sent = torch.tensor([fact], dtype=torch.int32)
    dist.broadcast(sent, 0)
    return bool(sent)


def steps_of(job: dict[str, Any], session: Any) -> Iterator[int]:
    """Yield numbers of steps, until a number of them were in the job's last phase or the job is over."""
    last_phase, left = job.get("until", (None, 0))
    for number in range(job["steps"]):
        yield number
        if last_phase is not None:
            left -= of_rank_0(session.phase == last_phase)
            if left == 0:
                return


def train_steps(
    job: dict[str, Any],
    session: Any,
    modules: Sequence[nn.Module],
    train: Callable[[int], list[list[str]]],
) -> dict[str, Any]:
    """Train the steps of a job, and return what Perseus must not change, by step.

    Args:
        job: The job.
        session: Perseus on this rank. None without it.
        modules: What is trained on this rank.
        train: Trains a step, and returns its losses, and those of an evaluation after it.
    """
    report: dict[str, Any] = {"losses": [], "weights": [], "random_after": [], "phases": []}
    for number in steps_of(job, session):
        report["losses"] += train(number)
        if session is not None:
            report["phases"].append(session.phase)
        report["weights"].append(hash_of(*(module.named_parameters() for module in modules)))
        report["random_after"].append(next_random_number())
    return report


def train_jobs(train: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Train the jobs of ``jobs.json`` on this rank, and write their reports to ``rank<N>.json``.

    Args:
        train: Trains a job and returns its report.
    """
    folder = Path(sys.argv[1])
    reports: list[dict[str, Any]] = []
    for job in json.loads((folder / "jobs.json").read_text()):
        # By phases, or like the longest job so far, because the number of its steps depends on the machine.
        longest = max((len(report.get("weights", ())) for report in reports), default=0)
        steps = sys.maxsize if "until" in job else longest
        reports.append(train({"steps": steps, **job}))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
