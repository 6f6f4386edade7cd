"""Train a small GPT with any schedule of torch.distributed.pipelining, with Perseus.

    torchrun --nproc_per_node 2 examples/torch_pipelining/train.py --schedule ZBVZeroBubble

Without GPUs the model trains on CPUs with gloo, and Perseus sets the clocks of SIMULATED GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import perseus_ds

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
BYTES = 256


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        heads = self.qkv(self.norms[0](hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.mlp(self.norms[1](hidden))


class Stage(nn.Module):
    """Some of the blocks. The first stage also has the embeddings, the last one the head."""

    def __init__(self, arguments: argparse.Namespace, stage: int, stages: int) -> None:
        super().__init__()
        width = arguments.width
        # As evenly as possible: 10 blocks on 4 stages are 3, 3, 2 and 2.
        count = len(range(stage, arguments.layers, stages))
        self.tokens = nn.Embedding(BYTES, width) if stage == 0 else None
        self.positions = nn.Embedding(arguments.length, width) if stage == 0 else None
        self.blocks = nn.Sequential(*(Block(width, arguments.heads) for _ in range(count)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES)) if stage == stages - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None and self.positions is not None:
            hidden = self.tokens(hidden) + self.positions.weight
        hidden = self.blocks(hidden)
        return hidden if self.head is None else self.head(hidden)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next bytes."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_schedule(arguments: argparse.Namespace, device: torch.device) -> tuple[Any, list[Stage]]:
    """Return the schedule of this rank and its part of the model."""
    schedule_class = get_schedule_class(arguments.schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks if single else 2 * ranks
    mine = [rank] if single else [rank, stages - 1 - rank if arguments.schedule in V_SHAPED else rank + ranks]
    model = []
    for stage in mine:
        torch.manual_seed(stage)
        model.append(Stage(arguments, stage, stages).to(device))
    parts = [PipelineStage(part, stage, stages, device) for part, stage in zip(model, mine, strict=True)]
    return schedule_class(parts[0] if single else parts, arguments.micro_batches, loss_fn=loss_fn), model


def read_text(device: torch.device) -> torch.Tensor:
    """Return part of the source of Python's standard library, with one token per byte."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    return torch.tensor(list(text), device=device)


def main() -> None:
    """Train."""
    arguments = read_arguments()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    schedule, model = make_schedule(arguments, device)
    optimizer = torch.optim.AdamW([p for part in model for p in part.parameters()], lr=3e-3)
    block = {"mode": arguments.mode, "output_dir": arguments.out, **json.loads(arguments.perseus)}
    perseus_ds.attach(schedule, block)  # the only line for Perseus

    text = read_text(device)
    generator = torch.Generator().manual_seed(0)
    rows = arguments.micro_batches * arguments.rows
    first = dist.get_rank() == 0
    last = any(isinstance(part.head, nn.Module) for part in model)
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - arguments.length - 1, (rows, 1), generator=generator).to(device)
        batch = text[starts + torch.arange(arguments.length + 1, device=device)]
        losses: list[torch.Tensor] = []
        schedule.step(*([batch[:, :-1]] if first else []), target=batch[:, 1:] if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if last and step % arguments.log_every == 0:
            print(f"step {step:4}  loss {torch.stack(losses).mean().item():.3f}", flush=True)
    perseus_ds.detach(schedule)  # ends the last iteration
    if first and block.get("enabled", True):
        print(table(Path(arguments.out) / "run.jsonl"), flush=True)
    dist.destroy_process_group()


def table(records: Path) -> str:
    """Return a table of Perseus's records by phase: median iteration time and energy of all GPUs."""
    found: dict[str, list[dict[str, Any]]] = {}
    simulated = False
    for line in records.read_text().splitlines():
        record = json.loads(line)
        simulated = record["simulated"]
        if "iteration" in record:
            found.setdefault(record["phase"], []).append(record)
    lines = ["phase        iterations  time [s]  energy [J]" + ("   SIMULATED GPUs" if simulated else "")]
    for phase, iterations in found.items():
        time_s = statistics.median(r["time_s"] for r in iterations)
        known_j = [r["energy_j"] for r in iterations if r["energy_j"] is not None]
        energy_j = f"{statistics.median(known_j):.1f}" if known_j else "unknown"
        lines.append(f"{phase:12} {len(iterations):10}  {time_s:8.3f}  {energy_j:>10}")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--mode", choices=["auto", "observe", "profile", "run"], default="auto")
    parser.add_argument("--out", default="runs/torch_pipelining", help="output folder of Perseus")
    parser.add_argument("--perseus", default="{}", help="further keys of the perseus block, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
