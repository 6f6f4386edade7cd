"""Hooks that replace methods of single objects or surround replays of CUDA graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], Any]


class Hooks:
    """Wraps methods of single objects without changing their classes."""

    def __init__(self) -> None:
        self._installed: list[tuple[Any, str, Any, bool]] = []
        self._removed = False

    def surround(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of an object by a call of ``around`` with the method and its arguments."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # Another hook may have stored this function and may call it after the removal.
            return method(*args, **kwargs) if self._removed else around(method, *args, **kwargs)

        self._installed.append((owner, name, surrounded, name in vars(owner)))
        setattr(owner, name, surrounded)

    def remove(self) -> None:
        """Restore the objects. A hook that was installed over one of ours stays."""
        self._removed = True
        for owner, name, surrounded, was_own in reversed(self._installed):
            if vars(owner).get(name) is not surrounded:
                continue
            if was_own:
                setattr(owner, name, surrounded.__wrapped__)
            else:
                delattr(owner, name)
        self._installed.clear()


class CudaGraphs:
    """Tracks which CUDA graph is being captured, and calls functions around its replays.

    Attributes:
        capturing: The graph that is being captured. None if there is none.
    """

    def __init__(self) -> None:
        """Wrap the methods of torch's graphs until :meth:`remove`."""
        self.capturing: Any = None
        self._around: weakref.WeakKeyDictionary[Any, Callable[[Run], Any]] = weakref.WeakKeyDictionary()
        self._hooks = Hooks()
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
