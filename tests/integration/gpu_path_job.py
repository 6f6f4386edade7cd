"""A rank that trains on the path of real GPUs: real NVML calls, stream writes and events, on stub drivers.

Started as ``gpu_path_job.py FOLDER LIBCUDA``, with ``job.json`` in the folder. Tensors stay on the CPU. Each pass also
launches a kernel on the stub of CUDA, and the host runs ahead of it. The host waits for the device before transfers,
which are those of gloo, and after each step, as ``loss.item()`` does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from job_parts import WIDTH, batches, config, leave_out_shared_memory, of_rank_0
from run_log import events, records
from stub_cuda.controller import StubCuda, TorchCuda
from stub_nvml.controller import gpus_here
from torch import nn

import perseus_ds
from perseus_ds.client import runtime
from perseus_ds.engines.engine import Session

MICRO_BATCHES = 4


@dataclass
class Training:
    """What an engine trains: the object to which Perseus is attached, and one step."""

    target: Any
    step: Callable[[], None]

    @property
    def session(self) -> Session:
        return self.target.perseus  # type: ignore[no-any-return]


def use_stub_cuda(stub: StubCuda, uuid: str, bus: int) -> None:
    """Let ``torch.cuda`` of a CPU build act on the stub."""
    properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, total_memory=1 << 36)
    cuda = TorchCuda(stub)
    for name in ("current_device", "current_stream", "synchronize", "Event"):
        setattr(torch.cuda, name, getattr(cuda, name))
    torch.cuda.get_device_properties = lambda device=0: properties
    torch.cuda.memory_stats_as_nested_dict = lambda device=None: {"allocated_bytes": {"all": {"peak": 1 << 20}}}
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda device: stub.stream

    def load(seconds: float) -> None:
        stub.delay(seconds)
        stub.synchronize()

    for name in ("send", "recv", "batch_isend_irecv"):
        setattr(dist, name, after_device(stub, getattr(dist, name)))
    measure = runtime.measure_gpu
    runtime.measure_gpu = lambda clocks, _, device, **place: measure(clocks, load, torch.device("cpu"), **place)


def after_device(stub: StubCuda, transfer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a transfer begin after what was launched before, as one in stream order does."""

    def transfer_in_order(*args: Any, **kwargs: Any) -> Any:
        stub.synchronize()
        return transfer(*args, **kwargs)

    return transfer_in_order


class Launch(torch.autograd.Function):
    """Launches a kernel in the forward pass, and one that takes twice as long in the backward pass."""

    stub: StubCuda
    pass_s: float

    @staticmethod
    def forward(ctx, inputs):
        Launch.stub.delay(Launch.pass_s)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradients):
        Launch.stub.delay(2 * Launch.pass_s)
        return gradients


class Layer(nn.Linear):
    """A layer whose passes are executed by the stub."""

    def forward(self, inputs):
        return Launch.apply(super().forward(inputs))


def on_gpu(engine_class: type) -> None:
    """Let an engine report a GPU as its device."""
    device = torch.device("cuda", 0)
    engine_class.device = lambda self: device


def torch_training(block: dict[str, Any]) -> Training:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    from perseus_ds.engines.torch_pipelining.engine import TorchSchedule

    on_gpu(TorchSchedule)
    dist.init_process_group("gloo")
    stage = PipelineStage(Layer(WIDTH, WIDTH), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    perseus_ds.attach(schedule, block)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    inputs = torch.ones(2 * MICRO_BATCHES, WIDTH)

    def step() -> None:
        schedule.step(*([inputs] if stage.is_first else []), target=inputs if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()

    return Training(schedule, step)


def deepspeed_training(block: dict[str, Any]) -> Training:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    from perseus_ds.engines.deepspeed.engine import DeepSpeedEngine

    on_gpu(DeepSpeedEngine)
    leave_out_shared_memory()
    deepspeed.init_distributed("gloo")
    layers = [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(dist.get_world_size())]
    module = PipelineModule(layers, len(layers), loss_fn=nn.MSELoss(), partition_method="uniform")
    settings = config(2, MICRO_BATCHES, perseus=block)
    engine, *_ = perseus_ds.initialize(model=module, model_parameters=[*module.parameters()], config=settings)
    data = batches(sizes=(2,))
    return Training(engine, lambda: engine.train_batch(data))


def megatron_training(block: dict[str, Any]) -> Training:
    import megatron_job
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from perseus_ds.engines.megatron.engine import MegatronEngine

    on_gpu(MegatronEngine)
    dist.init_process_group("gloo")
    megatron_job.stand_in_for_cuda()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    forward = GPTModel.forward
    GPTModel.forward = lambda *args, **kwargs: Launch.apply(forward(*args, **kwargs))
    model = megatron_job.model_of({"layers": 2})
    optimizer = megatron_job.get_megatron_optimizer(megatron_job.OptimizerConfig(optimizer="adam", lr=0.01), model)
    data = [megatron_job.batches(5)]
    perseus_ds.attach(megatron_job.megatron.core, block)

    def step() -> None:
        model[0].zero_grad_buffer()
        megatron_job.iterate(model, data, MICRO_BATCHES)
        optimizer.step()

    return Training(megatron_job.megatron.core, step)


TRAININGS = {"torch": torch_training, "deepspeed": deepspeed_training, "megatron": megatron_training}


def main() -> None:
    """Train, and report what Perseus used."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job, gpu = json.loads((folder / "job.json").read_text()), gpus_here()[rank]
    Launch.stub, Launch.pass_s = StubCuda(Path(sys.argv[2])), job["pass_s"][rank]
    Launch.stub.use_gpu(gpu, job["power_w"])
    use_stub_cuda(Launch.stub, gpu.uuid.decode().removeprefix("GPU-"), 16 + rank)
    torch.set_num_threads(1)
    training = TRAININGS[job["engine"]](job["block"])
    phases = []
    for step in itertools.count():
        if step == job.get("steps") or (step % 20 == 0 and of_rank_0(is_kept(folder))):
            break
        training.step()
        Launch.stub.synchronize()
        phases.append(training.session.phase)
    used = training.session.runtime
    report = {"phases": phases, "timers": type(used.timers).__name__, "marks": type(used.clocks._marks).__name__}
    perseus_ds.detach(training.target)
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def is_kept(folder: Path) -> bool:
    """Return whether a plan was compared with default clocks, and kept."""
    return any(judged["kept"] for judged in events(records(folder / "perseus"), "proof"))


if __name__ == "__main__":
    main()
