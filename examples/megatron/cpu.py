"""Lets Megatron-Core train on the CPU, which it does not do by itself; for trying and for tests, not for training.

Megatron-Core 0.14 to 0.19 asks for CUDA in many places. With these stand-ins it need not have it:

- the modules of ``megatron.core`` see a ``torch`` that puts on the CPU what they ask for on CUDA, and whose streams and
  events are always done;
- tensors say that their type is one of CUDA, as optimizers and the clipping of gradients ask of them, and may be
  recorded on a stream;
- the tracker of CUDA's random states does nothing when it is asked to fork.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from megatron.core import tensor_parallel


class Done:
    """A stream or an event of the CPU, on which all is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what streams and events of CUDA are made of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


class Cuda:
    """The module ``torch.cuda`` with one device, which is the CPU."""

    FloatTensor = torch.FloatTensor
    Stream = Event = Done
    current_stream = default_stream = staticmethod(functools.cache(Done))
    nvtx = Done()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: Any = None) -> None:
        """The CPU is done when a call returns."""

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


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
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    of_cpu = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = of_cpu(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = type_of  # type: ignore[assignment,method-assign]
