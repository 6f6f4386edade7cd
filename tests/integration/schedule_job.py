"""Jobs that train small stages with torch's schedules on real ranks, one after the other.

Started by ``job.run_jobs``. The report of each job has the losses, a hash of the weights and the next random number
after each step, the phases, and which changes by Perseus are left at the end.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from job_parts import WIDTH, Block, next_random_number, train_jobs, train_steps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import perseus_ds
from perseus_ds.engines.torch_pipelining.order import read_class

ROWS = 4


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_jobs(train)


def needs_shapes() -> bool:
    """Return whether torch requires the shapes of a stage's inputs, as version 2.4 does."""
    return inspect.signature(PipelineStage).parameters["input_args"].default is inspect.Parameter.empty


def schedule_of(job: dict[str, Any], mesh: DeviceMesh) -> tuple[Any, list[nn.Module]]:
    """Return a schedule for this rank, and its layers by stage."""
    group = mesh["pp"].get_group()
    schedule_class = getattr(schedules, f"Schedule{job['schedule']}")
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
            if job.get("fsdp"):
                from torch.distributed.fsdp import fully_shard  # torch 2.6 and later

                fully_shard(block, mesh=mesh["dp"])
            layers.append(block)
    shapes = {"input_args": torch.empty(ROWS, WIDTH)} if needs_shapes() else {}
    stages = [
        PipelineStage(block, stage, len(work), torch.device("cpu"), group=group, **shapes)
        for stage, block in zip(mine, layers, strict=True)
    ]
    micro_batches, loss_fn = job["micro_batches"], nn.MSELoss()
    schedule = schedule_class(stages[0] if single else stages, micro_batches, loss_fn=loss_fn)
    if "runtime" in job:  # options of torch's runtime, which the schedule's own class does not have
        order = schedule.pipeline_order
        schedule = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss_fn, **job["runtime"])
        schedule._prepare_schedule_with_comms(order)
    return schedule, layers


def count_of(schedule: Any, job: dict[str, Any], step: int) -> int:
    """Return the number of micro-batches of a step, after setting torch's attribute for it."""
    counts = job.get("counts")
    if counts is not None:
        schedule._n_microbatches = counts[step % len(counts)]
    return int(schedule._n_microbatches)


def step_by(schedule: Any, job: dict[str, Any], step: int, inputs: tuple[Any, ...], targets: dict[str, Any]) -> bool:
    """Call the schedule as the job requires, and return whether gradients are complete."""
    is_final = (step + 1) % job.get("calls_per_step", 1) == 0
    more: dict[str, Any] = {"finalize_gradients": is_final} if "calls_per_step" in job else {}
    count = job["micro_batches"]
    if not job.get("split"):
        schedule.step(*inputs, **targets, **more)
        return is_final
    # Inputs split by the caller, with torch 2.14.1 and later.
    more["arg_mbs"] = [*zip(*(each.chunk(count) for each in inputs), strict=True)] or [()] * count
    more["kwarg_mbs"] = [{} for _ in range(count)]
    if targets:
        more |= {"target_mbs": [*targets["target"].chunk(count)], "losses": targets["losses"]}
    schedule.step(**more)
    return is_final


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train with one schedule and return its report."""
    pipelines = job.get("pipelines", 1)
    mesh = init_device_mesh("cpu", (pipelines, dist.get_world_size() // pipelines), mesh_dim_names=("dp", "pp"))
    schedule, layers = schedule_of(job, mesh)
    optimizer = torch.optim.Adam([p for block in layers for p in block.parameters()], lr=1e-2)
    if job.get("perseus") is not None:
        perseus_ds.attach(schedule, job["perseus"], pipeline=mesh["pp"], data_parallel=mesh["dp"])
    session = getattr(schedule, "perseus", None)
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    rank = dist.get_rank()
    torch.manual_seed(11 + rank)
    data = torch.Generator().manual_seed(5 + mesh["dp"].get_local_rank())

    def step(number: int) -> list[list[str]]:
        inputs = torch.randn(count_of(schedule, job, number) * ROWS, WIDTH, generator=data)
        given = (inputs,) if is_first else ()
        losses = []
        if number == 0 and "evaluate_after" in job:  # training must do the setup that an evaluation skips
            losses.append(evaluate(given, inputs))
        of_step: list[torch.Tensor] = []
        targets = {"target": inputs.roll(1, dims=1), "losses": of_step} if is_last else {}
        if step_by(schedule, job, number, given, targets):
            if pipelines > 1 and not job.get("fsdp"):
                for parameter in optimizer.param_groups[0]["params"]:
                    dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
            optimizer.step()
            optimizer.zero_grad()
        losses.append([repr(loss.item()) for loss in of_step])
        if number == job.get("evaluate_after"):
            losses.append(evaluate(given, inputs.roll(1, dims=1)))
        return losses

    def evaluate(given: tuple[Any, ...], target: torch.Tensor) -> list[str]:
        losses: list[torch.Tensor] = []
        schedule.eval(*given, **({"target": target, "losses": losses} if is_last else {}))
        return [repr(loss.item()) for loss in losses]

    report = train_steps(job, session, layers, step)
    if session is not None:
        perseus_ds.detach(schedule)
    report["random_after"][-1] = next_random_number()
    report["left"] = [
        sorted({"step", "eval", "_maybe_compute_loss", "perseus"} & vars(schedule).keys()),
        [name for stage in stages for name in vars(stage) if name.endswith(("_chunk", "_grad", "_reduction"))],
    ]
    return report


if __name__ == "__main__":
    main()
