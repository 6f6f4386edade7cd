"""Layers, data and generator states of the clients that tests rebuild."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WIDTH = 16
ROWS = 8
MICRO_BATCHES = 4


class Block(nn.Module):
    """Some linear layers and dropout, which draws from torch's generator."""

    def __init__(self, repeat: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(repeat))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.dropout(hidden, 0.1, self.training)


class Projection(nn.Linear):
    """A layer that can be tied to another one."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Tracker:
    """States of generators by name, as Megatron's tracker keeps them, here for the CPU."""

    def __init__(self, seed: int = 0) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.states_["model-parallel-rng"] = torch.Generator().manual_seed(seed).get_state()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def dropout(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_["model-parallel-rng"])
        hidden = nn.functional.dropout(hidden, 0.1)
        self.states_["model-parallel-rng"] = torch.get_rng_state()
        torch.set_rng_state(before)
        return hidden


def config(**keys: Any) -> dict[str, Any]:
    """A config of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        **keys,
    }


def batches(seed: int = 5, dtype: torch.dtype = torch.float32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random inputs and labels without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        data = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
        yield data, data.roll(1, dims=1)
