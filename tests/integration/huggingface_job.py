"""Trains stages of Hugging Face models on two real ranks, and the whole model on each rank."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tiny_models import tiny, token_ids
from torch.distributed.pipelining import ScheduleGPipe
from transformers import AutoModelForCausalLM

import perseus_ds
from perseus_ds.errors import PerseusError
from perseus_ds.huggingface.stages import CausalLoss, Stage, build_stage

STEPS, MICRO_BATCHES, RATE = 3, 2, 0.05


def whole_model(config):
    """Return the losses of the whole model, and the trained model."""
    model = build_stage(config, (4,), 0).model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        parts = [model(ids, labels=ids, use_cache=False).loss for ids in micro_batches(step)]
        loss = sum(parts) / MICRO_BATCHES
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def micro_batches(step):
    return token_ids(MICRO_BATCHES, seed=step).split(2)


def with_deepspeed(config):
    module = perseus_ds.pipeline_module(config, num_stages=2, cut=(1, 3))
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    # DeepSpeed clips by default, in fp32 by the norm of the first stage's gradients only.
    settings["gradient_clipping"] = 0.0
    settings["perseus"] = {"mode": "observe", "device": "simulated", "output_dir": f"deepspeed-{config.model_type}"}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine, *_ = perseus_ds.initialize(model=module, optimizer=optimizer, config=settings)
    losses = [engine.train_batch(iter([(ids, ids) for ids in micro_batches(step)])).item() for step in range(STEPS)]
    stage = next(part for part in module.modules() if isinstance(part, Stage))
    replicated = sum(parameter.numel() for parameter in module.parameters() if parameter.ds_pipe_replicated)
    perseus_ds.detach(engine)
    return losses, engine, stage, replicated


def with_torch(config):
    rank = dist.get_rank()
    part = perseus_ds.pipeline_stage(config, stage_index=rank, num_stages=2, cut=(1, 3), device="cpu")
    optimizer = torch.optim.SGD(part.submod.parameters(), lr=RATE)
    schedule = ScheduleGPipe(part, MICRO_BATCHES, loss_fn=CausalLoss(config))
    perseus_ds.attach(schedule, {"enabled": False})
    losses = []
    for step in range(STEPS):
        ids = torch.cat(micro_batches(step))
        parts = []
        schedule.step(*([ids] if rank == 0 else []), **({"target": ids, "losses": parts} if rank == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in parts) / MICRO_BATCHES)
    return losses, part, part.submod, 0


def compare(config, train, folder):
    """Return the deviations of losses, parameters and saved logits from those of the whole model."""
    expected, model = whole_model(config)
    losses, trained, stage, replicated = train(config)
    perseus_ds.save_pretrained(trained, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = token_ids()
    parameters = dict(model.named_parameters())
    return {
        "losses": max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) if stage.is_last else 0.0,
        "parameters": max(relative(p, parameters[name]) for name, p in stage.model.named_parameters()),
        "saved": relative(loaded(ids).logits, model(ids, use_cache=False).logits),
        "replicated": replicated,
    }


def save_copies(folder):
    """Save a stage that differs between two data-parallel ranks, and then fail to write on rank 1."""
    rank = dist.get_rank()
    config = tiny("mixtral")
    copies = [build_stage(config, (2, 2), index, seed=rank) for index in range(2)]
    # Both ranks have the second stage; only rank 0 has the first.
    perseus_ds.save_pretrained(copies if rank == 0 else copies[1:], folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: weight for copy in copies for name, weight in copy.model.named_parameters()}
    same = all(torch.equal(weight, weights[name]) for name, weight in loaded.named_parameters())
    file = folder.parent / f"file{rank}"
    file.touch()
    try:
        perseus_ds.save_pretrained(copies[rank], folder if rank == 0 else file)
    except PerseusError as error:
        return {"same": same, "error": str(error)}


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


def main(out):
    deepspeed.init_distributed("gloo")
    result = {}
    for job in json.loads(os.environ["MODELS"]):
        config = tiny(job["family"], **job.get("settings", {}))
        train = {"deepspeed": with_deepspeed, "torch": with_torch}[job["engine"]]
        name = f"{job['engine']} {job['family']}"
        result[name] = compare(config, train, out / name.replace(" ", "-"))
    result["copies"] = save_copies(out / "copies")
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
