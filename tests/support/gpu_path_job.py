"""A rank that trains on the path of real GPUs: real NVML calls, stream writes and events, on stub drivers.

Started as ``gpu_path_job.py FOLDER LIBCUDA UUID,UUID``. Tensors stay on the CPU. Each pass also launches a kernel on
the stub of CUDA, so the host runs ahead of its device as on a real GPU.
"""

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from stub_cuda.controller import StubCuda
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.overrides import TorchFunctionMode

import perseus_ds
from perseus_ds.engines.torch_pipelining.engine import TorchSchedule

WIDTH, PASS_S = 8, 0.005


def use_stub_cuda(stub: StubCuda, uuid: str, bus: int) -> None:
    """Let ``torch.cuda`` of a CPU build act on the stub."""
    properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, total_memory=1 << 36)
    functions = {
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stub.stream,
        "get_device_properties": lambda device=0: properties,
        "synchronize": lambda device=None: stub.synchronize(),
        "memory_stats_as_nested_dict": lambda device=None: {"allocated_bytes": {"all": {"peak": 1 << 20}}},
        "device": lambda device: contextlib.nullcontext(),
        "Event": lambda enable_timing=False, **_: stub.external_event(),
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_getCurrentRawStream = lambda device: stub.stream


class TensorsOnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that code requests on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Launch(torch.autograd.Function):
    """Launches a kernel in the forward pass, and one that takes twice as long in the backward pass."""

    @staticmethod
    def forward(ctx, inputs, stub):
        ctx.stub = stub
        stub.delay(PASS_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradients):
        ctx.stub.delay(2 * PASS_S)
        return gradients, None


class Layer(nn.Linear):
    """A layer whose passes are executed by the stub."""

    stub: StubCuda

    def forward(self, inputs):
        return Launch.apply(super().forward(inputs), self.stub)


def main() -> None:
    """Train with torch's 1F1B, and report what Perseus used."""
    folder, uuids = Path(sys.argv[1]), sys.argv[3].split(",")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Layer.stub = stub = StubCuda(Path(sys.argv[2]))
    use_stub_cuda(stub, uuids[rank].removeprefix("GPU-"), 16 + rank)
    facts = TorchSchedule.facts
    TorchSchedule.facts = lambda self: replace(facts(self), device=torch.device("cuda", 0))
    torch.set_num_threads(1)
    TensorsOnCpu().__enter__()
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    stage = PipelineStage(Layer(WIDTH, WIDTH), rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    perseus_ds.attach(schedule, json.loads((folder / "block.json").read_text()))
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    phases = []
    inputs = torch.ones(WIDTH, WIDTH)
    for _ in range(8):
        schedule.step(*([inputs] if stage.is_first else []), target=inputs if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()
        stub.synchronize()  # as loss.item() does
        phases.append(schedule.perseus.phase)
    runtime = schedule.perseus.runtime
    report = {"phases": phases, "timers": type(runtime.timers).__name__, "marks": type(runtime.clocks._marks).__name__}
    perseus_ds.detach(schedule)
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
