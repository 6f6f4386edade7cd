"""A real DeepSpeed pipeline engine in this process: one rank, on gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
import job_parts
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_parts import WIDTH, leave_out_shared_memory
from torch import nn

leave_out_shared_memory()
config = partial(job_parts.config, rows=4, micro_batches=2)
batches = partial(job_parts.batches, sizes=(4,))


@contextmanager
def one_rank(folder: Any, backend: str = "gloo") -> Iterator[None]:
    """Run as the only rank of a job."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(place)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    deepspeed.init_distributed(backend, dist_init_required=False)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        deepspeed_comm.cdb = None
        for name in place:
            del os.environ[name]


class Layer(nn.Module):
    """Has a buffer, dropout and a counter, all of which change in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.forwards = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return nn.functional.dropout(self.norm(self.linear(hidden)), 0.1, self.training)


def module(layers: int = 2, **arguments: Any) -> PipelineModule:
    """Return a pipeline of one stage."""
    arguments = {"loss_fn": nn.MSELoss(), "partition_method": "uniform", "num_stages": 1, **arguments}
    return PipelineModule(layers=[LayerSpec(Layer) for _ in range(layers)], **arguments)
