"""Jobs with the habits of clients of DeepSpeed, on real ranks; each habit is rebuilt in small.

Called with a folder that holds ``job.json``: the client, a ``perseus`` block or none, and the number of steps; without
one, it trains until Perseus has nothing left to do but run. Every rank writes ``rank<N>.json``. As users' scripts, it
is ``__main__``: no other process can import its schedules and commands.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import deque
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import perseus_ds

WIDTH = 16
MICRO_BATCHES = 4
MOST_STEPS = 1500
AFTERWARDS = 3
calls: dict[str, int] = {}


def called(name: str) -> None:
    calls[name] = calls.get(name, 0) + 1


class Block(nn.Module):
    def __init__(self, repeat: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.dropout(hidden, 0.1)


# A zero-bubble schedule with commands of its own, as Megatron-DeepSpeed has one.


class BackwardOnlyPass(ds.BufferOpInstruction): ...


class WeightPass(ds.BufferOpInstruction): ...


class Compress(ds.PipeInstruction): ...


WEIGHTS_LATER = True  # a global that the schedule reads, as scripts' arguments are
waiting: deque = deque()


class ZeroBubble(ds.TrainSchedule):
    """The weights' part of each backward but the last is done at the end, where the rank would wait."""

    def steps(self):
        left = self.micro_batches if WEIGHTS_LATER else 0
        for step in super().steps():
            found = []
            for command in step:
                if type(command) is ds.BackwardPass and left > 1:
                    left -= 1
                    found.append(BackwardOnlyPass(command.buffer_id))
                elif type(command) is ds.ReduceTiedGrads:
                    found += [WeightPass(0) for _ in range(self.micro_batches - 1)] + [Compress(), command]
                else:
                    found.append(command)
            yield found


def gradients(engine, *arguments, **options):
    engine._running_engine_backward = True  # as the engine's own backward says it
    try:
        return torch.autograd.grad(*arguments, **options)
    finally:
        engine._running_engine_backward = False


def backward_only(engine, buffer_id):
    called("backward_only")
    if engine.is_last_stage():
        outputs, grad = engine.loss / engine.gradient_accumulation_steps(), None
    else:
        outputs, grad = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    if inputs.requires_grad:
        (inputs.grad,) = gradients(engine, outputs, [inputs], grad, retain_graph=True)
    waiting.append((outputs, None if grad is None else grad.clone()))
    engine.pipe_buffers["outputs"][buffer_id] = None


def weight_pass(engine, buffer_id):
    called("weight_pass")
    outputs, grad = waiting.popleft()
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    for parameter, found in zip(parameters, gradients(engine, outputs, parameters, grad), strict=True):
        parameter.grad = found if parameter.grad is None else parameter.grad + found


def compress(engine):
    called("compress")


def zero_bubble():
    ds.TrainSchedule = ZeroBubble
    PipelineEngine._INSTRUCTION_MAP.update(
        {BackwardOnlyPass: backward_only, WeightPass: weight_pass, Compress: compress}
    )
    model = PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
    return model, {}, lambda engine: None


# An engine class of its own, patched steps, a patch after initialize, tied layers, bf16 with ZeRO-1.


class OwnEngine(PipelineEngine):
    def train_batch(self, *args, **kwargs):
        called("own train_batch")
        return super().train_batch(*args, **kwargs)


class Projection(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def loads_first(step):
    return sorted(step, key=lambda command: not isinstance(command, ds.LoadMicroBatch))


def patched():
    deepspeed.PipelineEngine = OwnEngine
    steps = ds.TrainSchedule.steps
    ds.TrainSchedule.steps = lambda self: map(loads_first, steps(self))
    layers = [
        TiedLayerSpec("ends", Projection),
        *(LayerSpec(Block) for _ in range(2)),
        TiedLayerSpec("ends", Projection),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")

    def afterwards(engine):
        reduce_grads = PipelineEngine._INSTRUCTION_MAP[ds.ReduceGrads]

        def own_reduce_grads(engine):
            called("reduce_grads")
            reduce_grads(engine)

        PipelineEngine._INSTRUCTION_MAP[ds.ReduceGrads] = own_reduce_grads

    return model, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, afterwards


# A topology in three dimensions, layers that are split over tensor-parallel ranks, and trackers of generator states.


class Tracker:
    """States of generators by name; each tensor-parallel rank drops out values of its own."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def dropout(self, hidden):
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_["model-parallel-rng"])
        hidden = nn.functional.dropout(hidden, 0.1)
        self.states_["model-parallel-rng"] = torch.get_rng_state()
        torch.set_rng_state(before)
        return hidden


TRACKER = Tracker()


class SumOverSlices(torch.autograd.Function):
    @staticmethod
    def forward(_, value, group):
        value = value.clone()
        torch.distributed.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(_, gradient):
        return gradient, None


class TensorParallel(nn.Module):
    def __init__(self, groups) -> None:
        super().__init__()
        self.groups = groups
        self.inner = nn.Linear(WIDTH, WIDTH // 2)
        self.outer = nn.Linear(WIDTH // 2, WIDTH, bias=False)

    def forward(self, hidden):
        inner = TRACKER.dropout(torch.tanh(self.inner(hidden)))
        return hidden + SumOverSlices.apply(self.outer(inner), self.groups["slice"])


def three_dimensions():
    groups: dict = {}
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    layers = [LayerSpec(TensorParallel, groups) for _ in range(4)]
    model = PipelineModule(layers, topology=topology, loss_fn=nn.MSELoss(), partition_method="uniform")
    groups["slice"] = model.mpu().get_slice_parallel_group()
    seed = 7 + model.mpu().get_slice_parallel_rank()
    TRACKER.states_["model-parallel-rng"] = torch.Generator().manual_seed(seed).get_state()
    return model, {}, lambda engine: None


CLIENTS = {"three dimensions": three_dimensions, "zero-bubble": zero_bubble, "patched": patched}


def batches(dtype):
    generator = torch.Generator().manual_seed(5)
    while True:
        data = torch.randn(8, WIDTH, generator=generator).to(dtype)
        yield data, data.roll(1, dims=1)


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(11)
    model, keys, afterwards = CLIENTS[job["client"]]()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        **keys,
    }
    if job["perseus"]:
        config["perseus"] = job["perseus"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = perseus_ds.initialize(model=model, model_parameters=parameters, config=config)
    afterwards(engine)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    data = batches(torch.bfloat16 if "bf16" in keys else torch.float32)
    losses, last = [], job["steps"] or MOST_STEPS
    for step in itertools.count(1):
        losses.append(float(engine.train_batch(data)))
        if not job["steps"] and last == MOST_STEPS and engine.perseus.profiled:
            last = step + AFTERWARDS
        if step == last:
            break
    weights = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        weights.update(value.float().numpy().tobytes())
    report = {
        "losses": losses,
        "weights": weights.hexdigest(),
        "random": [torch.rand(1).item(), random.random(), np.random.rand()],
        "calls": calls,
        "finished": last < MOST_STEPS,
        "phase": engine.perseus.phase if job["perseus"] else None,
    }
    engine.destroy()
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
