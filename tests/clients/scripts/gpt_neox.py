"""Like GPT-NeoX: tied embeddings, activation checkpointing, base64 config, checkpoint loading.

Each training saves a checkpoint at the same step and continues from that of the previous training, which ran in another
mode or without Perseus; the bits must be the same.
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
        self.is_plain = not keys
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
        before = folder.exists()
        torch.distributed.barrier()  # both ranks have checked
        if not before:
            self.engine.save_checkpoint(str(folder), tag="first")
            (folder / "latest").write_text("first")
        torch.distributed.barrier()
        _, kept = self.engine.load_checkpoint(str(folder))
        assert kept.get("mine") == (5 if before else None)
        self.engine.save_checkpoint(str(folder), tag="plain" if self.is_plain else "perseus", client_state={"mine": 5})

    def generators(self):
        return checkpointing.get_cuda_rng_tracker().get_states()


if __name__ == "__main__":
    main(GptNeox)
