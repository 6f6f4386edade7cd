"""Like Megatron-DeepSpeed's zero-bubble H1: its own schedule, commands and gradient store."""

import queue

import deepspeed
import torch
from client_job import Client, calls, config, main, two_stages
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

WEIGHTS_LATER = True  # a global read by the schedule, like arguments of scripts


class BackwardOnlyPass(schedule.BufferOpInstruction): ...


class WeightPass(schedule.PipeInstruction): ...


class Compress(schedule.PipeInstruction): ...


class WeightGradStore:
    """Holds backwards until their weights' part is run."""

    waiting = queue.Queue()
    split = 0


class ZeroBubble(schedule.TrainSchedule):
    """Does the weights' part of all backwards but the last at the end, when the rank would wait."""

    def steps(self):
        left = self.micro_batches if WEIGHTS_LATER else 0
        for step in super().steps():
            found = []
            for command in step:
                if type(command) is schedule.BackwardPass and left > 1:
                    left -= 1
                    found.append(BackwardOnlyPass(command.buffer_id))
                elif type(command) is schedule.ReduceTiedGrads:
                    found += [WeightPass() for _ in range(self.micro_batches - 1)] + [Compress(), command]
                else:
                    found.append(command)
            yield found


def gradients(engine, *arguments, **options):
    engine._running_engine_backward = True  # as the engine's own backward sets it
    try:
        return torch.autograd.grad(*arguments, **options)
    finally:
        engine._running_engine_backward = False


def backward_only(engine, buffer_id):
    calls["backward_only"] += 1
    if engine.is_last_stage():
        outputs, grad = engine.loss / engine.gradient_accumulation_steps(), None
    else:
        outputs, grad = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    if inputs.requires_grad:
        (inputs.grad,) = gradients(engine, outputs, [inputs], grad, retain_graph=True)
    WeightGradStore.waiting.put((outputs, None if grad is None else grad.clone()))
    WeightGradStore.split += 1
    engine.pipe_buffers["outputs"][buffer_id] = None


def weight_pass(engine):
    calls["weight_pass"] += 1
    outputs, grad = WeightGradStore.waiting.get()
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    for parameter, found in zip(parameters, gradients(engine, outputs, parameters, grad), strict=True):
        parameter.grad = found if parameter.grad is None else parameter.grad + found


def compress(engine):
    calls["compress"] += 1


class ZeroBubbleH1(Client):
    def __init__(self, keys):
        WeightGradStore.split = 0
        schedule.TrainSchedule = ZeroBubble
        PipelineEngine._INSTRUCTION_MAP.update(
            {BackwardOnlyPass: backward_only, WeightPass: weight_pass, Compress: compress}
        )
        model = two_stages()
        parameters = list(model.parameters())
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config(**keys))
        super().__init__(keys)

    def generators(self):
        return WeightGradStore.split


if __name__ == "__main__":
    main(ZeroBubbleH1)
