"""Like EasyLLM: sets the batch size before the first step, and patches the backward."""

import deepspeed
from client_job import MICRO_BATCHES, Client, calls, config, main, two_stages
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

GROUP = 3
counter = -1


def own_backward(backward):
    def patched(engine, buffer_id):
        global counter  # noqa: PLW0603
        calls["backward"] += 1
        counter = (counter + 1) % GROUP
        if engine.is_last_stage():
            engine.loss = engine.loss * (1 + 0.1 * counter)
        backward(engine, buffer_id)

    return patched


class EasyLlm(Client):
    def __init__(self, keys):
        global counter  # noqa: PLW0603
        counter = -1
        model = two_stages()
        parameters = list(model.parameters())
        settings = config(gradient_accumulation_steps=2, **keys)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
        self.engine.set_train_batch_size(self.engine.train_batch_size() * MICRO_BATCHES // 2)
        commands = PipelineEngine._INSTRUCTION_MAP
        commands[schedule.BackwardPass] = own_backward(commands[schedule.BackwardPass])
        super().__init__(keys)

    def generators(self):
        return counter


if __name__ == "__main__":
    main(EasyLlm)
