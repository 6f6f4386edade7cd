"""Like GPT-NeoX: tied embeddings, activation checkpointing, base64 config, checkpoint loading.

Both trainings continue from a checkpoint of the one with Perseus; the bits must be the same.
"""

import base64
import json

import torch
from client_job import Client, calls, config, main
from deepspeed import initialize
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from job_parts import WIDTH, Block, batches
from torch import nn

SAVED_AT = 2


class Projection(nn.Linear):
    """A layer tied to another one."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class GptNeox(Client):
    def __init__(self, keys):
        layers = [
            TiedLayerSpec("ends", Projection),
            *(LayerSpec(Block) for _ in range(2)),
            TiedLayerSpec("ends", Projection),
        ]
        checkpointing.configure(None, deepspeed_config=config())
        model = PipelineModule(
            layers,
            num_stages=2,
            loss_fn=nn.MSELoss(),
            partition_method="uniform",
            activation_checkpoint_interval=1,
        )
        train_batch = PipelineEngine.train_batch

        def counted(engine, *args, **kwargs):
            calls["train_batch"] += 1
            return train_batch(engine, *args, **kwargs)

        PipelineEngine.train_batch = counted
        self.has_perseus = bool(keys)
        text = base64.urlsafe_b64encode(json.dumps(config(**keys)).encode()).decode()
        self.engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=text)
        super().__init__(keys)

    def train(self, folder):
        if self.engine.global_steps == SAVED_AT:
            self.take_over(folder / "checkpoints")
        losses = [float(self.engine.train_batch(data_iter=self.data))]
        if self.engine.global_steps % 3 == 0:
            losses.append(float(self.engine.eval_batch(batches(9))))
        return losses

    def take_over(self, folder):
        if self.has_perseus:
            self.engine.save_checkpoint(str(folder), tag="perseus", client_state={"mine": 5})
        torch.distributed.barrier()
        _, kept = self.engine.load_checkpoint(str(folder))
        assert kept["mine"] == 5

    def generators(self):
        return checkpointing.get_cuda_rng_tracker().get_states()


if __name__ == "__main__":
    main(GptNeox)
