"""Like Megatron-DeepSpeed: 3D parallelism, generator trackers, growing lengths, bf16, ZeRO-1."""

import deepspeed
import torch
from client_job import Client, calls, config, main
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from job_parts import WIDTH, batches
from torch import nn

GROWS_EVERY = 5


class Tracker:
    """The state of an additional generator, like Megatron's tracker, but on the CPU."""

    def seed(self, seed):
        self.state = torch.Generator().manual_seed(seed).get_state()

    def dropout(self, hidden):
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        hidden = nn.functional.dropout(hidden, 0.1)
        self.state = torch.get_rng_state()
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
    """Each tensor-parallel rank has a half of the layer, and its own dropout."""

    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.inner = nn.Linear(WIDTH, WIDTH // 2)
        self.outer = nn.Linear(WIDTH // 2, WIDTH, bias=False)

    def forward(self, hidden):
        inner = TRACKER.dropout(torch.tanh(self.inner(hidden)))
        return hidden + SumOverSlices.apply(self.outer(inner), self.groups["slice"])


class MegatronDeepSpeed(Client):
    def __init__(self, keys):
        groups = {}
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        layers = [LayerSpec(TensorParallel, groups) for _ in range(4)]
        model = PipelineModule(layers, topology=topology, loss_fn=nn.MSELoss(), partition_method="uniform")
        groups["slice"] = model.mpu().get_slice_parallel_group()
        TRACKER.seed(7 + model.mpu().get_slice_parallel_rank())
        step = PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep]

        def counted_step(engine, *arguments):
            calls["optimizer_step"] += 1
            step(engine, *arguments)

        PipelineEngine._INSTRUCTION_MAP[schedule.OptimizerStep] = counted_step
        settings = config(bf16={"enabled": True}, zero_optimization={"stage": 1}, **keys)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        del settings["optimizer"]
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.data, self.evaluated = batches(dtype=torch.bfloat16), batches(9, dtype=torch.bfloat16)
        self.rows = 0

    def train(self):
        rows = min(8, 4 + 2 * (self.engine.global_steps // GROWS_EVERY))
        if rows != self.rows:
            self.rows = rows
            self.engine.reset_activation_shape()
        losses = [float(self.engine.train_batch(self.of_this_length(self.data)))]
        if self.engine.global_steps % 4 == 0:
            losses.append(float(self.engine.eval_batch(self.of_this_length(self.evaluated))))
        return losses

    def of_this_length(self, data):
        return (tuple(part[: self.rows] for part in batch) for batch in data)

    def generators(self):
        return TRACKER.state.numpy()


if __name__ == "__main__":
    main(MegatronDeepSpeed)
