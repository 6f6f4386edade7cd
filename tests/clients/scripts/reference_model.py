"""A model that trains against a second engine, which only evaluates; both are compiled."""

import deepspeed
import torch
from client_job import calls, main
from client_parts import Block, batches, config
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn


def compile_counted(graph, inputs):
    calls["compile"] += 1
    return graph.forward


class OwnEngine(PipelineEngine):
    def train_batch(self, *args, **kwargs):
        calls["train_batch"] += 1
        return super().train_batch(*args, **kwargs)


class ReferenceModel:
    def __init__(self, keys):
        torch._dynamo.reset()
        deepspeed.PipelineEngine = OwnEngine
        self.reference, self.engine = (self.make(keys, seed) for seed in (1, 2))
        self.data = batches()

    def make(self, keys, seed):
        torch.manual_seed(seed)
        model = PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
        parameters = list(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config(**keys))
        engine.compile(backend=compile_counted)
        return engine

    def train(self, folder):
        reference = float(self.reference.eval_batch(batches(self.engine.global_steps)))
        return [reference, float(self.engine.train_batch(self.data))]

    def generators(self):
        return None


if __name__ == "__main__":
    main(ReferenceModel)
