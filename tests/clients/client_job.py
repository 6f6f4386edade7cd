"""Jobs that train a client, with and without Perseus. Started by ``job.run_jobs``.

The scripts in ``tests/clients/scripts`` call :func:`main` with a class that creates a client's engine the way the
client does, from keys that the job adds to the DeepSpeed config. Perseus attaches as with its launcher. Like users'
scripts, these are ``__main__``: no other process can import their schedules and commands.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import job_parts
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from job_parts import Block, batches, train_jobs, train_steps
from torch import nn

from perseus_ds import launch

ROWS = 8
MICRO_BATCHES = 4
calls: Counter[str] = Counter()
"""Number of calls of each of the client's patches, by name."""


def two_stages(**settings: Any) -> PipelineModule:
    """Return a module of four layers for two pipeline ranks."""
    return PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss(), **settings)


def config(**keys: Any) -> dict[str, Any]:
    """Return a DeepSpeed config."""
    return job_parts.config(ROWS, MICRO_BATCHES, lr=1e-3, **keys)


class Client:
    """A client's training code.

    Attributes:
        engine: The client's engine.
        data: Training data.
    """

    engine: Any

    def __init__(self, keys: dict[str, Any]) -> None:
        """Make the engine, with these keys in its config."""
        self.data = batches()

    def train(self) -> Any:
        """Train an iteration and return its losses."""
        return float(self.engine.train_batch(self.data))

    def generators(self) -> Any:
        """Return the states of the client's own random-number generators."""


def main(client: type[Client]) -> None:
    """Train the jobs of ``jobs.json`` on this rank."""
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    train_jobs(partial(_train, client))


def _train(client: type[Client], job: dict[str, Any]) -> dict[str, Any]:
    calls.clear()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    generators = []
    with _patches_undone():
        if "perseus" in job:
            launch.attach_when_engines_are_imported()
        trained = client({"perseus": job["perseus"]} if "perseus" in job else {})

        def step(number: int) -> list[list[str]]:
            loss = trained.train()
            generators.append(_random(trained))
            return [[repr(loss)]]

        session = getattr(trained.engine, "perseus", None)
        report = train_steps(job, session, [trained.engine.module], step)
        trained.engine.destroy()
    return {**report, "generators": generators, "calls": dict(calls), "left": []}


@contextmanager
def _patches_undone() -> Iterator[None]:
    """Restore everything that a client replaces in DeepSpeed, for the next training."""
    owners: list[Any] = [deepspeed, schedule, schedule.TrainSchedule, PipelineEngine, DeepSpeedEngine]
    before = [(owner, dict(vars(owner))) for owner in owners]
    commands = dict(PipelineEngine._INSTRUCTION_MAP)
    try:
        yield
    finally:
        for owner, values in before:
            for name, value in values.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        PipelineEngine._INSTRUCTION_MAP.clear()
        PipelineEngine._INSTRUCTION_MAP.update(commands)


def _random(client: Client) -> str:
    states = [torch.get_rng_state().numpy(), random.getstate(), np.random.get_state(), client.generators()]
    return hashlib.sha256(pickle.dumps(states)).hexdigest()
