"""Lets Megatron-Core train on the CPU, which it does not support. For trials and tests, not for real training.

Megatron-Core 0.14 to 0.19 requires CUDA in many places. These replacements remove the requirement:

- the modules of ``megatron.core`` use a replacement of ``torch`` that allocates on the CPU instead of CUDA, with
  streams and events that are always finished,
- tensors report a CUDA type, which optimizers and gradient clipping require, and ignore ``record_stream``,
- the tracker of CUDA's random states does nothing on ``fork``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from megatron.core import tensor_parallel


class Done:
    """A stream or event on the CPU, where work has finished when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the arguments of CUDA streams and events."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


class Cuda:
    """The module ``torch.cuda`` with the CPU as its only device."""

    FloatTensor = torch.FloatTensor
    Stream = Event = Done
    current_stream = default_stream = staticmethod(functools.cache(Done))
    nvtx = Done()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: Any = None) -> None:
        """Do nothing, because work on the CPU has finished when a call returns."""

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class CpuTorch:
    """The module ``torch`` with tensors on the CPU instead of CUDA."""

    cuda = Cuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return functools.partial(_on_cpu, found) if name in ("zeros", "ones", "empty", "tensor") else found


def _on_cpu(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    return make(*args, device="cpu" if device == "cuda" else device, **kwargs)


def stand_in_for_cuda() -> None:
    """Replace the parts of CUDA that Megatron-Core uses, in the modules imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and getattr(module, "torch", None) is torch:
            module.torch = CpuTorch()  # type: ignore[attr-defined]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    type(tracker).fork = lambda *_, **__: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    of_cpu = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = of_cpu(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = type_of  # type: ignore[assignment,method-assign]
