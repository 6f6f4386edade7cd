"""``perseus-ds doctor`` and ``reset``: whether this machine will work, and its GPUs at default clocks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from perseus_ds.cli.values import OPTIONAL, Texts


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Return GPUs to their default clocks.

    It is needed if a node's agent was killed together with its job.
    """

    examples = ("perseus-ds reset", "perseus-ds reset --gpus 0 1")

    gpus: Annotated[Texts, OPTIONAL] = field(default_factory=list)
    """index of nvidia-smi, UUID, or the beginning of a UUID; by default all GPUs of this node"""

    def execute(self) -> int:
        from perseus_ds.cli.machine import reset_gpus

        return reset_gpus(self.gpus)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say on one page whether this machine will work, and what to do where it will not."""

    examples = ("perseus-ds doctor", "perseus-ds doctor --lock", "perseus-ds doctor --device simulated")

    device: Literal["nvml", "zeus", "simulated"] = "nvml"
    """nvml: GPUs whose clocks the job changes itself; zeus: GPUs whose clocks zeusd changes; simulated: no real GPU"""
    lock: bool = False
    """also lock clocks for a moment, to try the permission and measure how long it takes"""

    def execute(self) -> int:
        from perseus_ds.cli.machine import examine

        return examine(self.device, lock=self.lock)
