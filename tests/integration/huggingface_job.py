"""Trains stages of Hugging Face models on two pipelines of two real ranks, and the whole model on each rank.

The numbers of trained tokens differ between micro-batches and between pipelines.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from tiny_models import tiny, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from transformers import AutoModelForCausalLM

import perseus_ds
from perseus_ds.errors import PerseusError
from perseus_ds.huggingface.stages import CausalLoss, Stage, build_stage

STAGES, PIPELINES, MICRO_BATCHES, RATE = 2, 2, 2, 0.05
CUT = (1, 3)
# For each micro-batch of each pipeline: how many of the 16 tokens of each sequence are ignored. One has no target.
NOT_LEARNT = ((3, 16), (0, 11))
MODELS = {
    "deepspeed": [tiny("mixtral", tie_word_embeddings=False), tiny("qwen3", tie_word_embeddings=True)],
    "torch": [tiny("mixtral", tie_word_embeddings=False), tiny("qwen3", tie_word_embeddings=False)],
}


def micro_batches(pipeline, seed):
    """Return pairs of token ids and labels."""
    parts = token_ids(MICRO_BATCHES * PIPELINES, seed).split(2)[MICRO_BATCHES * pipeline :][:MICRO_BATCHES]
    pairs = [(ids, ids.clone()) for ids in parts]
    for (_, labels), count in zip(pairs, NOT_LEARNT[pipeline], strict=True):
        labels[:, :count] = -100
    return pairs


def with_whole_model(config):
    """Train, evaluate and train like transformers' Trainer, and return the losses and the model."""
    model = build_stage(config, (4,), 0).model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for seed in range(3):
        pairs = [pair for pipeline in range(PIPELINES) for pair in micro_batches(pipeline, seed)]
        trained = sum((labels[:, 1:] != -100).sum() for _, labels in pairs)
        found = [model(ids, labels=labels, num_items_in_batch=trained, use_cache=False) for ids, labels in pairs]
        # Losses of tokens are summed; those of routers, which are the same for each micro-batch, are averaged.
        routers = [config.router_aux_loss_coef * each.aux_loss for each in found if "aux_loss" in each]
        loss = sum(each.loss for each in found) - sum(routers) * (1 - 1 / len(pairs))
        losses.append(loss.item())
        if seed != 1:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def with_deepspeed(config):
    """Do the same with DeepSpeed, the second training after Perseus was detached, and return the engine too."""
    topology = PipeDataParallelTopology(STAGES, PIPELINES)
    module = perseus_ds.pipeline_module(config, num_stages=STAGES, cut=CUT, topology=topology)
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    # DeepSpeed clips by default, in fp32 by the norm of the first stage's gradients only.
    settings["gradient_clipping"] = 0.0
    settings["perseus"] = {"mode": "observe", "device": "simulated", "output_dir": f"deepspeed-{config.model_type}"}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine, *_ = perseus_ds.initialize(model=module, optimizer=optimizer, config=settings)
    pipeline = engine.grid.get_data_parallel_rank()
    losses = [engine.train_batch(iter(micro_batches(pipeline, 0))), engine.eval_batch(iter(micro_batches(pipeline, 1)))]
    perseus_ds.detach(engine)
    losses.append(engine.train_batch(iter(micro_batches(pipeline, 2))))
    stage = next(part for part in module.modules() if isinstance(part, Stage))
    replicated = sum(parameter.numel() for parameter in module.parameters() if parameter.ds_pipe_replicated)
    return [loss.item() for loss in losses], engine, stage, replicated


def with_torch(config):
    """Do the same with a schedule of torch, with Perseus disabled."""
    pipeline, index = divmod(dist.get_rank(), STAGES)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same_stage = [dist.new_group([0, 2]), dist.new_group([1, 3])][index]
    part = perseus_ds.pipeline_stage(
        config, stage_index=index, num_stages=STAGES, cut=CUT, device="cpu", group=pipelines[pipeline]
    )
    optimizer = torch.optim.SGD(part.submod.parameters(), lr=RATE)
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=CausalLoss(config))
    perseus_ds.attach(schedule, {"enabled": False}, data_parallel=same_stage)
    losses = []
    for seed, run in enumerate((schedule.step, schedule.eval, schedule.step)):
        ids, labels = (torch.cat(values) for values in zip(*micro_batches(pipeline, seed), strict=True))
        parts = []
        run(*([ids] if index == 0 else []), **({"target": labels, "losses": parts} if index == 1 else {}))
        mean = torch.stack(parts).mean().detach() if parts else torch.zeros(())
        dist.all_reduce(mean, group=same_stage)
        losses.append(mean.item() / PIPELINES)
        if run == schedule.step:
            for parameter in part.submod.parameters():
                parameter.grad /= PIPELINES
                dist.all_reduce(parameter.grad, group=same_stage)
            optimizer.step()
        optimizer.zero_grad()
    return losses, part, part.submod, 0


def compare(config, train, folder):
    """Return the deviations of losses, parameters and saved logits from those of the whole model."""
    expected, model = with_whole_model(config)
    losses, trained, stage, replicated = train(config)
    perseus_ds.save_pretrained(trained, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = token_ids()
    parameters = dict(model.named_parameters())
    return {
        "losses": max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) if stage.is_last else 0.0,
        "parameters": max(relative(p, parameters[name]) for name, p in stage.model.named_parameters()),
        "saved": relative(loaded(ids).logits, model(ids, use_cache=False).logits),
        "is_last": stage.is_last,
        "replicated": replicated,
    }


def saved_by_fsdp(config, folder):
    """Return the deviation of saved logits from those of the whole model, for stages that two ranks share."""
    index = dist.get_rank() % STAGES
    stage = build_stage(config, CUT, index)
    groups = init_device_mesh("cpu", (PIPELINES, STAGES), mesh_dim_names=("pipelines", "stages"))
    fully_shard(stage, mesh=groups["pipelines"])
    perseus_ds.save_pretrained(stage, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole, ids = build_stage(config, (4,), 0), token_ids()
    return relative(loaded(ids).logits, whole(ids))


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


def error_of_rank_1(folder):
    """Return the error on this rank if rank 1 cannot write its stage."""
    rank = dist.get_rank()
    file = folder.parent / f"file{rank}"
    file.touch()
    try:
        perseus_ds.save_pretrained(build_stage(tiny("llama"), (2, 2), rank % 2), file if rank == 1 else folder)
    except PerseusError as error:
        return str(error)


def main(out):
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    trainings = {"deepspeed": with_deepspeed, "torch": with_torch}
    models = [(engine, config) for engine, configs in MODELS.items() for config in configs]
    result = {
        f"{engine} {config.model_type}": compare(config, trainings[engine], out / f"{engine}-{config.model_type}")
        for engine, config in models
    }
    result["fsdp"] = saved_by_fsdp(tiny("qwen3", tie_word_embeddings=False), out / "fsdp")
    result["error"] = error_of_rank_1(out / "copies")
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
