"""Which inputs this rank's forwards had in one iteration: numbers that tell their shapes from others."""

from __future__ import annotations

from collections.abc import Callable


class InputShapes:
    """Numbers for the shapes of the inputs of one iteration.

    Args:
        forwards: How many forwards it has.
        tell: Called with ``first`` and ``total`` once they are known; None for nothing.

    Attributes:
        first: Of the first forward; 0 before it, and where shapes are not told.
        total: Of all forwards so far, whatever their order.
    """

    def __init__(self, forwards: int = 0, tell: Callable[[float, float], None] | None = None) -> None:
        self.first = 0.0
        self.total = 0.0
        self._left = forwards
        self._tell = tell

    def add(self, shape: float) -> bool:
        """Take in the inputs of a forward; return whether it is the first one."""
        is_first = self.total == 0.0
        if is_first:
            self.first = shape
        self.total += shape
        self._left -= 1
        if self._left == 0 and self._tell is not None:
            self._tell(self.first, self.total)
        return is_first
