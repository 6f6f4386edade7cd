"""Counts floating-point operations, from which simulated GPUs know how much work an instruction is."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of kernels without changing which kernels run.

    PyTorch's own ``FlopCounterMode`` decomposes composite operators, which could change results. Code under
    ``torch.compile`` compiles as without a counter; its kernels are counted where they are matrix products of their
    own.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether ``torch.compile`` compiles in spite of this mode; if not, functions called in it never are."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out
