"""Lets Megatron-Core train on the CPU, which it does not do by itself; for trying and for tests, not for training.

Megatron-Core 0.16 asks for CUDA in many places. With these stand-ins it need not have it:

- the modules of ``megatron.core`` see a ``torch`` that puts on the CPU what they ask for on CUDA, and whose streams are
  always done;
- the tracker of CUDA's random states does nothing when it is asked to fork.

Gradients cannot be clipped by Megatron's optimizer, which asks them whether they are on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from megatron.core import tensor_parallel


class Cuda:
    """The module ``torch.cuda`` with one device, which is the CPU."""

    FloatTensor = torch.FloatTensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: Any = None) -> None:
        """The CPU is done when a call returns."""


class CpuTorch:
    """The module ``torch``, with tensors on the CPU where CUDA is asked for."""

    cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return functools.partial(_on_cpu, found) if name in ("zeros", "ones", "empty", "tensor") else found


def _on_cpu(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    return make(*args, device="cpu" if device == "cuda" else device, **kwargs)


def stand_in_for_cuda() -> None:
    """Replace what Megatron-Core needs of CUDA, in the modules that are imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and getattr(module, "torch", None) is torch:
            module.torch = CpuTorch()  # type: ignore[attr-defined]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    type(tracker).fork = lambda *_, **__: contextlib.nullcontext()
