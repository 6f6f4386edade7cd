"""Functions in front of methods of one object each, which leave nothing behind when they are taken away."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""Called with the method and its arguments; calls the method and returns what it returned."""


class Hooks:
    """The methods of single objects that are surrounded; their classes stay as they are."""

    def __init__(self) -> None:
        self._installed: list[tuple[Any, str, Any, bool]] = []
        self._removed = False

    def surround(self, owner: Any, name: str, around: Around) -> None:
        """Have a method of an object called through a function, until :meth:`remove`."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # Whoever has kept this function, such as another hook in front of it, may call it after the removal.
            return method(*args, **kwargs) if self._removed else around(method, *args, **kwargs)

        self._installed.append((owner, name, surrounded, name in vars(owner)))
        setattr(owner, name, surrounded)

    def remove(self) -> None:
        """Leave the objects as they were; a hook that somebody has put in front of ours stays."""
        self._removed = True
        for owner, name, surrounded, was_own in reversed(self._installed):
            if vars(owner).get(name) is not surrounded:
                continue
            if was_own:
                setattr(owner, name, surrounded.__wrapped__)
            else:
                delattr(owner, name)
        self._installed.clear()
