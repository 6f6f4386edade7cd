"""Jobs that train small stages by a schedule of torch on real ranks, one after the other in the same processes.

Started with the path of a folder whose ``jobs.json`` describes them. Every rank writes ``rank<N>.json``: for each job,
the losses and a hash of the weights after each step, a random number drawn at its end, and what Perseus says of itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import perseus_ds
from perseus_ds.engines.torch_pipelining.order import read_class

WIDTH = 16
ROWS = 4


class Block(nn.Module):
    """Layers with dropout, whose random numbers a careless observer would disturb."""

    def __init__(self, repeat: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.dropout(hidden)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: list[dict[str, Any]] = []
    for job in json.loads((folder / "jobs.json").read_text()):
        # Until its phase, or as many as the longest job before it: how many that takes depends on the machine.
        steps = {"steps": sys.maxsize if "until" in job else max((len(done["weights"]) for done in results), default=0)}
        results.append(train({**steps, **job}, folder))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def schedule_of(job: dict[str, Any], group: dist.ProcessGroup) -> tuple[Any, list[nn.Module]]:
    """Return a schedule for this rank and its layers, by stage."""
    schedule_class = get_schedule_class(job["schedule"])
    single = issubclass(schedule_class, PipelineScheduleSingle)
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    work = job.get("work", [3, 2] if single else [3, 1, 2, 2])
    order = read_class(
        schedule_class, ranks=ranks, stages_per_rank=len(work) // ranks, micro_batches=job["micro_batches"]
    )
    mine = sorted({i.stage for i in order.instructions[here]})
    layers: list[nn.Module] = []
    for stage, repeat in enumerate(work):
        torch.manual_seed(stage)
        block = Block(repeat)
        if stage in mine:
            layers.append(block)
    stages = [
        PipelineStage(block, stage, len(work), torch.device("cpu"), group=group)
        for stage, block in zip(mine, layers, strict=True)
    ]
    made = schedule_class(stages[0] if single else stages, job["micro_batches"], loss_fn=nn.MSELoss())
    return made, layers


def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by one schedule; return what to report."""
    pipelines = job.get("pipelines", 1)
    mesh = init_device_mesh("cpu", (pipelines, dist.get_world_size() // pipelines), mesh_dim_names=("dp", "pp"))
    schedule, layers = schedule_of(job, mesh["pp"].get_group())
    optimizer = torch.optim.Adam([p for block in layers for p in block.parameters()], lr=1e-2)
    if job.get("perseus") is not None:
        perseus_ds.attach(schedule, job["perseus"], pipeline=mesh["pp"], data_parallel=mesh["dp"])
    attachment = getattr(schedule, "perseus", None)
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    rank = dist.get_rank()
    torch.manual_seed(11 + rank)
    data = torch.Generator().manual_seed(5 + mesh["dp"].get_local_rank())
    report: dict[str, Any] = {"losses": [], "weights": [], "random_after": [], "phases": []}
    last_phase, left = job.get("until", (None, 0))
    for step in range(job["steps"]):
        if attachment is not None:
            report["phases"].append(attachment.phase)
        if last_phase is not None:
            left -= attachment.phase == last_phase
            if left < 0:
                break
        inputs = torch.randn(job["micro_batches"] * ROWS, WIDTH, generator=data)
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if any(stage.is_first for stage in stages) else ()
        targets = {"target": inputs.roll(1, dims=1), "losses": losses} if any(s.is_last for s in stages) else {}
        schedule.step(*arguments, **targets)
        for parameter in optimizer.param_groups[0]["params"] if pipelines > 1 else ():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        report["losses"].append([repr(loss.item()) for loss in losses])
        weights = hashlib.sha256()
        for block in layers:
            for _, value in sorted(block.state_dict().items()):
                weights.update(value.numpy().tobytes())
        report["weights"].append(weights.hexdigest())
        report["random_after"].append(next_random_number())
        if step == job.get("evaluate_after"):
            schedule.eval(*arguments, target=targets.get("target"), losses=losses if targets else None)
            report["losses"].append([repr(loss.item()) for loss in losses])
    if attachment is not None:
        perseus_ds.detach(schedule)
    report["random"] = next_random_number()
    report["left"] = [
        sorted({"step", "eval", "_maybe_compute_loss", "perseus"} & vars(schedule).keys()),
        [name for stage in stages for name in vars(stage) if name.endswith("_chunk") or name == "perform_reduce_grad"],
    ]
    return report


def next_random_number() -> float:
    """Return the random number that would be drawn next, without drawing it."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(1).item()


if __name__ == "__main__":
    main()
