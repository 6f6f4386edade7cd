"""Simulated GPUs: device models, their physics, and the work that is executed on them.

A job with simulated GPUs takes the same way through engine, client, agent and server as one with real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import perseus_ds.gpu

if TYPE_CHECKING:
    from perseus_ds.gpu.base import Gpu


def open_gpu(address: str, logs: Sequence[memoryview] = ()) -> Gpu:
    """Return the real or simulated GPU of an :attr:`~perseus_ds.gpu.base.Gpu.address`.

    Args:
        address: The address.
        logs: Memory of the work log and of the clock log of a simulated GPU.

    Raises:
        GpuError: It cannot be opened.
    """
    device, _, identity = address.partition(":")
    if device == "simulated":
        from perseus_ds.simulation.gpu import open_address

        return open_address(identity, logs)
    return perseus_ds.gpu.open_gpu(address)
