"""A model that trains with a reference in a second engine, which only evaluates."""

import deepspeed
import torch
from client_job import Client, calls, config, main, two_stages
from deepspeed.runtime.pipe.engine import PipelineEngine
from job_parts import batches


def compile_counted(graph, inputs):
    calls["compile"] += 1
    return graph.forward


class OwnEngine(PipelineEngine):
    def train_batch(self, *args, **kwargs):
        calls["train_batch"] += 1
        return super().train_batch(*args, **kwargs)


class ReferenceModel(Client):
    def __init__(self, keys):
        torch._dynamo.reset()
        deepspeed.PipelineEngine = OwnEngine
        self.reference, self.engine = (self.make(keys, seed) for seed in (1, 2))
        super().__init__(keys)

    def make(self, keys, seed):
        torch.manual_seed(seed)
        model = two_stages()
        parameters = list(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config(**keys))
        engine.compile(backend=compile_counted)
        return engine

    def train(self, folder):
        reference = float(self.reference.eval_batch(batches(self.engine.global_steps)))
        return [reference, float(self.engine.train_batch(self.data))]


if __name__ == "__main__":
    main(ReferenceModel)
