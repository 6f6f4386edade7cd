"""Profile mode leaves training as it is, whatever a client keeps beside the engine."""

import sys
import types

import deepspeed
import numpy as np
import pytest
import torch
from client_parts import Tracker
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from one_rank_engine import WIDTH, batches, config, module, one_rank, same, weights
from torch import nn

import perseus_ds

MOST_STEPS = 300
AFTERWARDS = 3
SIMULATED = {"longest_instruction_s": 0.004, "counter_period_s": 0.002, "lock_latency_s": 0.0005}
PROFILE = {"min_clock_mhz": 1300, "sampling": "stride", "clock_stride": 8, "max_window_s": 0.05, "warm_up": 2}


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture
def client():
    """A module of a client, with a tracker in a variable of it."""
    variables = types.ModuleType("client_of_deepspeed")
    variables.TRACKER = Tracker(1)
    variables.NOISE = np.random.default_rng(1)
    sys.modules[variables.__name__] = variables
    yield variables
    del sys.modules[variables.__name__]


class TrackedDropout(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden):
        return sys.modules["client_of_deepspeed"].TRACKER.dropout(super().forward(hidden))


class NumpyNoise(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden):
        return super().forward(hidden) * (1 + 0.01 * sys.modules["client_of_deepspeed"].NOISE.random())


def train(client, layer, folder=None, prepare=lambda engine: None, steps=None):
    """Train for so many steps; under Perseus, until the profile is measured and a little longer."""
    client.TRACKER, client.NOISE = Tracker(1), np.random.default_rng(1)
    torch.manual_seed(5)
    model = module(layer=layer)
    keys = {}
    if folder is not None:
        keys["perseus"] = {
            "mode": "profile",
            "device": "simulated",
            "output_dir": str(folder),
            "simulated": SIMULATED,
            "profile": PROFILE,
        }
    initialize = deepspeed.initialize if folder is None else perseus_ds.initialize
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config(**keys))
    prepare(engine)
    torch.manual_seed(0)
    data = batches()
    losses = []
    while len(losses) < (steps or MOST_STEPS):
        losses.append(engine.train_batch(data).item())
        if folder is not None and steps is None and engine.perseus.profiled:
            steps = len(losses) + AFTERWARDS
    if folder is not None:
        engine.perseus.close()
    return losses, weights(engine), (client.TRACKER.states_["model-parallel-rng"].tolist(), client.NOISE.random())


@pytest.mark.parametrize("layer", [TrackedDropout, NumpyNoise])
def test_generators_of_a_client_do_not_change_training(client, layer, tmp_path):
    ours, our_bits, our_drawn = train(client, layer, tmp_path)
    losses, bits, drawn = train(client, layer, steps=len(ours))
    assert ours == losses
    assert same(our_bits, bits)
    assert our_drawn == drawn
    assert (tmp_path / "profile.csv").exists()


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


def release_gradients(engine):
    """Train inside the backward, as diffusion-pipe's gradient release does."""
    for parameter in engine.module.parameters():
        own = torch.optim.SGD([parameter], lr=1e-3)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())


def test_an_optimizer_inside_the_backward_is_measured_while_training_goes_on(client, tmp_path, capsys):
    ours, our_bits, _ = train(client, Plain, tmp_path, prepare=release_gradients)
    losses, bits, _ = train(client, Plain, prepare=release_gradients, steps=len(ours))
    assert len(ours) < MOST_STEPS
    assert ours == losses
    assert same(our_bits, bits)
    assert "passes cannot be repeated outside of training" in capsys.readouterr().out


FORWARDS = 0


def counted(backward):
    backwards, last = 0, None

    def patched(engine, buffer_id):
        nonlocal backwards, last
        backwards += 1
        engine.loss = engine.loss * (1 + 0.1 * (backwards % 3))
        backward(engine, buffer_id)
        last = buffer_id

    del last  # has no value before the first call
    return patched


class CountsInAGlobal(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden):
        return super().forward(hidden) * scale()


def scale():
    global FORWARDS  # noqa: PLW0603
    FORWARDS += 1
    return 1 + 0.1 * (FORWARDS % 5)


def test_counters_that_passes_keep_in_globals_and_closures_do_not_change_training(client, tmp_path, monkeypatch):
    """As EasyLLM, whose own backward counts its calls."""
    commands = PipelineEngine._INSTRUCTION_MAP
    backward = commands[schedule.BackwardPass]
    trained = []
    for folder in (tmp_path, None):
        monkeypatch.setattr(sys.modules[__name__], "FORWARDS", 0)
        monkeypatch.setitem(commands, schedule.BackwardPass, counted(backward))
        trained.append(train(client, CountsInAGlobal, folder, steps=len(trained[0][0]) if trained else None))
    (ours, our_bits, _), (losses, bits, _) = trained
    assert ours == losses
    assert same(our_bits, bits)
    assert (tmp_path / "profile.csv").exists()
