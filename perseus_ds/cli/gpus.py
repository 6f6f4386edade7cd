"""``perseus-ds doctor`` and ``reset``, for this machine and its GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from perseus_ds.cli.values import OPTIONAL, Texts


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Return GPUs to their default clocks.

    This is necessary if the agent of a node was killed together with its job.
    """

    examples = ("perseus-ds reset", "perseus-ds reset --gpus 0 1")

    gpus: Annotated[Texts, OPTIONAL] = field(default_factory=list)
    """index in nvidia-smi, UUID, or beginning of a UUID; by default all GPUs of this node"""

    def execute(self) -> int:
        from perseus_ds.cli.machine import reset_gpus

        return reset_gpus(self.gpus)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report on one page whether this machine is ready, and how to solve problems."""

    examples = ("perseus-ds doctor", "perseus-ds doctor --lock", "perseus-ds doctor --device simulated")

    device: Literal["nvml", "zeus", "simulated"] = "nvml"
    """nvml: the job changes the clocks itself; zeus: zeusd changes the clocks; simulated: no real GPU"""
    lock: bool = False
    """also lock clocks for a moment, to check the permission and measure the latency"""

    def execute(self) -> int:
        from perseus_ds.cli.machine import examine

        return examine(self.device, lock=self.lock)
