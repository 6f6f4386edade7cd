"""Like qlora-pipe: its own engine class, with its own forward, schedule and commands.

The schedule is that of DPO: each micro-batch also passes through the stages without gradients, as a reference.
"""

import torch
from client_job import MICRO_BATCHES, Client, calls, config, main, two_stages
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn


class LoadIntoTwoBuffers(schedule.PipeInstruction):
    def __init__(self, *buffer_ids):
        super().__init__(buffer_ids=buffer_ids)


class ReferenceForwardPass(schedule.BufferOpInstruction): ...


class DpoSchedule(schedule.TrainSchedule):
    def num_pipe_buffers(self):
        return super().num_pipe_buffers() + 1

    def _buffer_idx(self, micro_batch_id):
        return micro_batch_id % super().num_pipe_buffers()

    def steps(self):
        reference = self.num_pipe_buffers() - 1
        for step in super().steps():
            found = []
            for command in step:
                kind = type(command)
                if kind in (schedule.SendActivation, schedule.RecvActivation):
                    found.append(kind(reference))
                if kind is schedule.ForwardPass:
                    found.append(ReferenceForwardPass(reference))
                load = kind is schedule.LoadMicroBatch
                found.append(LoadIntoTwoBuffers(command.buffer_id, reference) if load else command)
            yield found


def load_into_two_buffers(engine, buffer_ids):
    calls["load"] += 1
    data, labels = engine._next_batch()
    for buffer in buffer_ids:
        if engine.is_first_stage():
            engine.pipe_buffers["inputs"][buffer] = data.clone()
        if engine.is_last_stage():
            engine.pipe_buffers["labels"][buffer] = labels.clone()


def reference_forward(engine, buffer_id):
    calls["reference"] += 1
    engine.module.eval()
    with torch.no_grad():
        outputs = DeepSpeedEngine.forward(engine, engine.pipe_buffers["inputs"][buffer_id].clone())
    engine.module.train()
    engine.pipe_buffers["outputs"][buffer_id] = outputs
    engine.reference_outputs = outputs


def forward(engine, buffer_id):
    calls["forward"] += 1
    outputs = DeepSpeedEngine.forward(engine, engine.pipe_buffers["inputs"][buffer_id].clone())
    engine.pipe_buffers["outputs"][buffer_id] = outputs
    if engine.is_last_stage():
        distance = nn.functional.mse_loss(outputs, engine.reference_outputs)
        engine.loss = nn.functional.mse_loss(outputs, engine.pipe_buffers["labels"][buffer_id]) + 0.1 * distance
        engine.fwd_outputs.append([engine.loss.detach(), distance.detach()])


class OwnEngine(PipelineEngine):
    def train_batch(self):
        calls["train_batch"] += 1
        self.reset_activation_shape()
        self.module.train()
        self._compute_loss = True
        self._exec_schedule(
            DpoSchedule(micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id)
        )
        return self.losses_of_all_stages()

    def losses_of_all_stages(self):
        losses = torch.zeros(MICRO_BATCHES, 2)
        if self.is_last_stage():
            losses = torch.stack([torch.stack(parts) for parts in self.fwd_outputs])
        self.fwd_outputs = []
        torch.distributed.broadcast(losses, src=self.grid.stage_to_global(self.num_stages - 1))
        return losses.mean(0)


class QloraPipe(Client):
    def __init__(self, keys):
        PipelineEngine._INSTRUCTION_MAP.update(
            {
                schedule.ForwardPass: forward,
                LoadIntoTwoBuffers: load_into_two_buffers,
                ReferenceForwardPass: reference_forward,
            }
        )
        model = two_stages()
        settings = config(**keys)
        self.engine = OwnEngine(
            args=None,
            model=model,
            mpu=model.mpu(),
            model_parameters=list(model.parameters()),
            config=settings,
            config_class=DeepSpeedConfig(settings, model.mpu()),
        )
        super().__init__(keys)
        self.engine.set_dataiterator(self.data)

    def train(self):
        return self.engine.train_batch().tolist()


if __name__ == "__main__":
    main(QloraPipe)
