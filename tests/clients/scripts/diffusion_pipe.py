"""Like diffusion-pipe: patches steps before initialize, and a command after it.

The optimizer is created after initialize, and runs for each parameter in a hook inside the backward (gradient release).
Shapes change between batches.
"""

import deepspeed
import torch
from client_job import Client, calls, config, main, two_stages
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine


def load_first(steps):
    def patched(self):
        calls["steps"] += 1
        for step in steps(self):
            yield sorted(step, key=lambda command: not isinstance(command, schedule.LoadMicroBatch))

    return patched


class NothingToStep(torch.optim.SGD):
    def step(self, closure=None):
        calls["step"] += 1

    def zero_grad(self, set_to_none=True): ...


def add_outside_of_autograd(parameter):
    def add_(*args, **options):
        parameter.data.add_(*args, **options)

    return add_


def release_gradients(parameters):
    optimizers = {p: torch.optim.SGD([p], lr=1e-3, foreach=False) for p in parameters}

    def step(parameter):
        calls["hook"] += 1
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in parameters:
        parameter.add_ = add_outside_of_autograd(parameter)
        parameter.register_post_accumulate_grad_hook(step)
    return NothingToStep(parameters, lr=1e-3)


def reduce_no_gradients(engine):
    calls["reduce_grads"] += 1


class DiffusionPipe(Client):
    def __init__(self, keys):
        schedule.TrainSchedule.steps = load_first(schedule.TrainSchedule.steps)
        model = two_stages(dynamic_shape=True)
        settings = {key: value for key, value in config(**keys).items() if key != "optimizer"}
        settings["gradient_clipping"] = 0.0
        self.engine, *_ = deepspeed.initialize(model=model, config=settings)
        self.engine._support_torch_style_backward = True
        PipelineEngine._INSTRUCTION_MAP[schedule.ReduceGrads] = reduce_no_gradients
        self.engine._configure_optimizer(release_gradients, list(model.parameters()))
        super().__init__(keys)

    def train(self):
        self.engine.reset_activation_shape()
        rows = 6 if self.engine.global_steps % 16 > 12 else 8
        data = (tuple(part[:rows] for part in batch) for batch in self.data)
        return float(self.engine.train_batch(data))


if __name__ == "__main__":
    main(DiffusionPipe)
