"""Trains two pipelines of two stages on four real ranks, with unequal numbers of tokens."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from tiny_models import tiny, token_ids
from torch.distributed.pipelining import Schedule1F1B

import perseus_ds
from perseus_ds.huggingface.stages import CausalLoss, Stage, build_stage

STAGES, PIPELINES, MICRO_BATCHES = 2, 2, 2
# For each micro-batch of each pipeline: how many of the 16 tokens of each sequence are ignored. One has no target.
NOT_LEARNT = ((3, 16), (0, 11))
CONFIG = tiny("llama")


class Recorder(torch.optim.SGD):
    """Keeps the gradients of each step, and changes no parameters."""

    def step(self, closure=None):
        del closure
        self.gradients = [parameter.grad.clone() for parameter in self.param_groups[0]["params"]]


def micro_batches(pipeline, seed):
    """Return pairs of token ids and labels."""
    parts = token_ids(MICRO_BATCHES * PIPELINES, seed).split(2)[MICRO_BATCHES * pipeline :][:MICRO_BATCHES]
    pairs = [(ids, ids.clone()) for ids in parts]
    for (_, labels), count in zip(pairs, NOT_LEARNT[pipeline], strict=True):
        labels[:, :count] = -100
    return pairs


def of_whole_model(seed):
    """Return loss and gradients by parameter, computed like in transformers' Trainer."""
    model = build_stage(CONFIG, (4,), 0).model
    pairs = [pair for pipeline in range(PIPELINES) for pair in micro_batches(pipeline, seed)]
    trained = sum((labels[:, 1:] != -100).sum() for _, labels in pairs)
    losses = [model(ids, labels=labels, num_items_in_batch=trained, use_cache=False).loss for ids, labels in pairs]
    sum(losses).backward()
    return sum(losses).item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def with_deepspeed():
    """Return losses of training and of an evaluation, and gradients after Perseus was detached."""
    topology = PipeDataParallelTopology(STAGES, PIPELINES)
    module = perseus_ds.pipeline_module(CONFIG, num_stages=STAGES, topology=topology)
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    settings["gradient_clipping"] = 0.0
    settings["perseus"] = {"mode": "observe", "device": "simulated", "output_dir": "deepspeed"}
    optimizer = Recorder(module.parameters(), lr=1.0)
    engine, *_ = perseus_ds.initialize(model=module, optimizer=optimizer, config=settings)
    pipeline = engine.grid.get_data_parallel_rank()
    losses = [engine.train_batch(iter(micro_batches(pipeline, seed=0))).item()]
    losses.append(engine.eval_batch(iter(micro_batches(pipeline, seed=1))).item())
    perseus_ds.detach(engine)
    losses.append(engine.train_batch(iter(micro_batches(pipeline, seed=2))).item())
    stage = next(part for part in module.modules() if isinstance(part, Stage))
    return losses, stage, dict(zip(module.parameters(), optimizer.gradients, strict=True))


def with_torch():
    """Return the same for a torch schedule with Perseus disabled."""
    pipeline, index = divmod(dist.get_rank(), STAGES)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same_stage = [dist.new_group([0, 2]), dist.new_group([1, 3])][index]
    part = perseus_ds.pipeline_stage(
        CONFIG, stage_index=index, num_stages=STAGES, device="cpu", group=pipelines[pipeline]
    )
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=CausalLoss(CONFIG))
    perseus_ds.attach(schedule, {"enabled": False}, data_parallel=same_stage)
    losses = []
    for seed, run in enumerate((schedule.step, schedule.eval, schedule.step)):
        part.submod.zero_grad()
        ids, labels = (torch.cat(values) for values in zip(*micro_batches(pipeline, seed), strict=True))
        parts = []
        run(*([ids] if index == 0 else []), **({"target": labels, "losses": parts} if index == 1 else {}))
        mean = torch.stack(parts).mean().detach() if parts else torch.zeros(())
        dist.all_reduce(mean, group=same_stage)
        losses.append(mean.item() / PIPELINES)
    gradients = {parameter: parameter.grad / PIPELINES for parameter in part.submod.parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=same_stage)
    return losses, part.submod, gradients


def compare(losses, stage, gradients):
    """Return the deviations of the losses and of the last gradients from those of the whole model."""
    expected = [of_whole_model(seed) for seed in range(3)]
    return {
        "losses": max(abs(a - b) / b for a, (b, _) in zip(losses, expected, strict=True)),
        "gradients": max(
            relative(gradients[parameter], expected[2][1][name]) for name, parameter in stage.model.named_parameters()
        ),
        "is_last": stage.is_last,
    }


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


def main(out):
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    result = {"deepspeed": compare(*with_deepspeed()), "torch": compare(*with_torch())}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
