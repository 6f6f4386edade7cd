"""Trains a client in auto mode, in run mode under the plans found, and without Perseus, one after the other.

The scripts in ``tests/clients/scripts`` call :func:`main` with a class that creates a client's engine the way the
client does, from keys that the job adds to the DeepSpeed config. Perseus attaches as with its launcher. Like users'
scripts, these are ``__main__``: no other process can import their schedules and commands.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import job_parts
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from job import QUICK_PROFILE, SIMULATED
from job_parts import Block, batches, hash_of
from torch import nn

from perseus_ds import launch

MODES = ("auto", "run", "plain")
ROWS = 8
MICRO_BATCHES = 4
STEPS = 4
MOST_STEPS = 100_000
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

    def train(self, folder: Path) -> Any:
        """Train an iteration and return its losses, given a folder for all modes."""
        return float(self.engine.train_batch(self.data))

    def generators(self) -> Any:
        """Return the states of the client's own random-number generators."""


def main(client: type[Client]) -> None:
    """Train in each mode, and write the report of each rank to ``rank<N>.json``."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    seen: dict[str, Any] = {}
    for mode in MODES:
        steps = max([len(other["steps"]) for other in seen.values()], default=0)
        seen[mode] = _train(client, folder, mode, steps)
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _train(client: type[Client], folder: Path, mode: str, most_steps: int) -> dict[str, Any]:
    calls.clear()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)
    with _patches_undone():
        keys = {}
        if mode != "plain":
            launch.attach_when_engines_are_imported()
            keys = {"perseus": _block(folder, mode)}
        trained = client(keys)
        steps, phases = [], [""]
        while not _is_done(mode, phases, most_steps):
            steps.append([trained.train(folder), hash_of(trained.engine.module.state_dict().items()), _random(trained)])
            phases.append(trained.engine.perseus.phase if keys else mode)
        called = dict(calls)
        trained.engine.destroy()
    return {"steps": steps, "phases": phases[1:], "calls": called}


def _block(folder: Path, mode: str) -> dict[str, Any]:
    block = {
        "mode": mode,
        "device": "simulated",
        "simulated": SIMULATED,
        "profile": QUICK_PROFILE,
        "output_dir": str(folder / mode),
        "cache": False,
    }
    return {**block, "frontier": str(folder / "auto")} if mode == "run" else block


def _is_done(mode: str, phases: list[str], most_steps: int) -> bool:
    """Auto and run modes end shortly after their plan starts to run."""
    steps = len(phases) - 1
    if mode == "plain":
        return steps == most_steps
    return phases.count("run") > STEPS or steps == MOST_STEPS


@contextmanager
def _patches_undone() -> Iterator[None]:
    """Restore everything that a client replaces in DeepSpeed, for the next training."""
    owners: list[Any] = [deepspeed, schedule, schedule.TrainSchedule, PipelineEngine, DeepSpeedEngine, checkpointing]
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
