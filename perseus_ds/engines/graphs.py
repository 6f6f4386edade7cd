"""CUDA graphs of whole iterations: when one is captured, and what surrounds its replays.

While a graph is captured, nothing is executed. Each of its replays is an iteration of the captured order, an
evaluation, or the end of an iteration.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from perseus_ds.engines.hooks import Hooks

Run = Callable[[], Any]


class CudaGraphs:
    """Wraps torch's CUDA graphs until :meth:`remove`, to call functions around their replays.

    Attributes:
        capturing: The graph that is being captured. None if there is none.
    """

    def __init__(self, on_error: Callable[[Exception], object]) -> None:
        """Wrap the graphs. ``on_error`` receives errors of Perseus's own code."""
        self.capturing: Any = None
        self._around: weakref.WeakKeyDictionary[Any, Callable[[Run], Any]] = weakref.WeakKeyDictionary()
        self._hooks = Hooks(on_error)
        for name, around in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            self._hooks.surround(torch.cuda.CUDAGraph, name, around)

    def remove(self) -> None:
        """Restore torch's graphs."""
        self._hooks.remove()
        self._around.clear()

    def surround_replays(self, around: Callable[[Run], Any]) -> None:
        """Call a function with each replay of the graph that is being captured, around those given before."""
        within = self._around.get(self.capturing)
        self._around[self.capturing] = around if within is None else lambda run: around(functools.partial(within, run))

    def _begin(self, method: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        self._around.pop(graph, None)  # of an earlier capture
        begun = method(graph, *args, **kwargs)
        self.capturing = graph
        return begun

    def _end(self, method: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        self.capturing = None
        return method(graph, *args, **kwargs)

    def _replay(self, method: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(method, graph, *args, **kwargs)
        return run() if (around := self._around.get(graph)) is None else around(run)
