"""DeepSpeed's pipeline engine on one rank, with and without Perseus in the same process."""

import functools
import gc
import itertools
import os
import random
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from frontiers import save_random_plan
from job_parts import config, hash_of
from one_rank_engine import one_rank
from torch import nn

import perseus_ds
from perseus_ds.pipeline.commands import read_schedule, schedule_class


class Block(nn.Module):
    """A transformer layer without attention, with dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))


class CompiledBlock(Block):
    """The same layer, compiled."""

    def __init__(self, width):
        super().__init__(width)
        self._compiled = torch.compile(super().forward)

    def forward(self, hidden):
        return self._compiled(hidden)


@dataclass(frozen=True)
class Setup:
    """Settings of a training: keys of DeepSpeed's config, and type and class of layers.

    Activations may be recomputed in the backward, and those kept for it (checkpointed) be in one buffer (contiguous).
    """

    keys: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    recomputes: bool = False
    contiguous: bool = False
    layer: type[nn.Module] = Block


_BF16 = {"bf16": {"enabled": True}}
SETUPS = {
    "bf16": Setup(_BF16, torch.bfloat16),
    "fp16": Setup({"fp16": {"enabled": True, "initial_scale_power": 8}}, torch.half),
    "ZeRO-1": Setup({**_BF16, "zero_optimization": {"stage": 1}}, torch.bfloat16),
    "recomputation": Setup(_BF16, torch.bfloat16, recomputes=True),
    "contiguous recomputation": Setup(_BF16, torch.bfloat16, recomputes=True, contiguous=True),
    "torch.compile": Setup(_BF16, torch.bfloat16, layer=CompiledBlock),
}


@contextmanager
def training_on(machine):
    """Run as the only rank of a job with a GPU that is never changed, and yield a folder for it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder, one_rank(folder, machine.backend):
        yield Path(folder)


@contextmanager
def engine_of(machine, setup, block, size=None, stages=1):
    """Create an engine, identical for the same arguments, and destroy it at the end. Without a block, no Perseus."""
    width, rows, layers, micro_batches = size or machine.size
    checkpointing.configure(
        None,
        partition_activations=setup.contiguous,
        contiguous_checkpointing=setup.contiguous,
        num_checkpoints=layers,
    )
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = PipelineModule(
        layers=[LayerSpec(setup.layer, width) for _ in range(layers)],
        num_stages=stages,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        activation_checkpoint_interval=int(setup.recomputes),
    ).to(setup.dtype)
    settings = config(rows, micro_batches, lr=1e-3, **setup.keys)
    if block is not None:
        settings["perseus"] = {**machine.block, **block}
    engine, *_ = perseus_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    try:
        yield engine
    finally:
        engine.destroy()
        gc.collect()


def batches(machine, setup, size=None):
    """Yield random inputs and labels endlessly, the same in every call."""
    width, rows, *_ = size or machine.size
    return itertools.cycle(_batches(machine.device, setup.dtype, width, rows))


@functools.cache
def _batches(device, dtype, width, rows):
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(4)]
    return tuple((values, values.roll(1, dims=1)) for values in inputs)


def bits_of(engine, machine, losses):
    """Return everything that training changes, as values that are equal if all bits are."""
    states = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].tolist())]
    if machine.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(machine.device))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    kept = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "losses": tuple(losses),
        "weights": hash_of(engine.module.state_dict().items()),
        "optimizer state": hash_of(enumerate(kept)),
        "random-number generators": (hash_of(enumerate(states)), random.getstate()),
    }


def block_of(machine, mode, folder, micro_batches=None):
    """Return a ``perseus`` block for a mode, with three clocks to profile or a random plan to run."""
    clocks = machine.gpu.supported_clocks_mhz()
    settings = {"sampling": "stride", "clock_stride": max(1, len(clocks) // 2), "warm_up": 2}
    block = {"mode": mode, "output_dir": tempfile.mkdtemp(dir=folder), "cache": False, "profile": settings}
    if mode == "run":
        schedule = read_schedule(schedule_class("1f1b"), ranks=1, micro_batches=micro_batches or machine.size[3])
        block["frontier"] = tempfile.mkdtemp(dir=folder)
        save_random_plan(
            Path(block["frontier"]), schedule, ranks=1, clocks_mhz=clocks[-6:], simulated=machine.simulated
        )
    return block
