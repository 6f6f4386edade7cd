"""Which inputs this rank's forwards had in one iteration: numbers that tell their shapes from others."""

from __future__ import annotations


class InputShapes:
    """Numbers for the shapes of the inputs of one iteration.

    Attributes:
        first: Of the first forward; 0 before it, and where shapes are not told.
        total: Of all forwards so far, whatever their order.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.total = 0.0

    def add(self, shape: float) -> bool:
        """Take in the inputs of a forward; return whether it is the first one."""
        is_first = self.total == 0.0
        if is_first:
            self.first = shape
        self.total += shape
        return is_first
