"""A 1F1B training loop on plain torch.distributed, to which a few lines add Perseus.

It has two stages. Started by torchrun with the folder of job.json. Of DeepSpeed, only the schedule is used.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import perseus_ds
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.instruction import Instruction, Kind

MICRO_BATCHES, WIDTH = 4, 32


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(stage)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3 - stage)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = read_schedule(schedule_class("1f1b"), ranks=last + 1, micro_batches=MICRO_BATCHES)
    perseus = perseus_ds.PerseusRuntime.for_loop(job["perseus"], schedule, pipeline=range(last + 1))
    losses = []
    data = torch.Generator().manual_seed(5)
    for _ in range(job["steps"]):
        with perseus.iteration():
            losses.append(iteration(model, perseus, stage, last, data))
        optimizer.step()
        optimizer.zero_grad()
    (folder / f"rank{stage}.json").write_text(json.dumps({"losses": losses}))
    perseus.close()
    dist.barrier()
    dist.destroy_process_group()


def iteration(model, perseus, stage, last, data) -> float:
    """Run forwards ahead, then alternate forwards and backwards, and return the loss."""
    pending, sent, total = [], [], 0.0
    ahead = min(last - stage, MICRO_BATCHES)
    order = ["forward"] * ahead + ["forward", "backward"] * (MICRO_BATCHES - ahead) + ["backward"] * ahead
    done = {"forward": 0, "backward": 0}
    for kind in order:
        instruction = Instruction(stage, Kind(kind), done[kind])
        done[kind] += 1
        if kind == "forward":
            received = torch.randn(8, WIDTH, generator=data) if stage == 0 else torch.empty(8, WIDTH)
            if stage > 0:
                dist.recv(received, stage - 1)
            received.requires_grad_()
            with perseus.instruction(instruction):
                output = model(received)
                loss = output.square().mean() if stage == last else None
            pending.append((received, output if loss is None else loss))
            if stage < last:
                sent.append(dist.isend(output.detach(), stage + 1))
        else:
            received, output = pending.pop(0)
            gradient = None
            if stage < last:
                gradient = torch.empty_like(output)
                dist.recv(gradient, stage + 1)
            with perseus.instruction(instruction):
                output.backward(gradient)
            if stage > 0:
                sent.append(dist.isend(received.grad, stage - 1))
            total += float(output) if stage == last else 0.0
    for transfer in sent:
        transfer.wait()
    return total


if __name__ == "__main__":
    main()
