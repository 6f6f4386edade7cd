"""Wraps methods of engines, which is how Perseus learns of their iterations and operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Hooks:
    """Wraps methods of single objects, without changing their classes, until :meth:`remove`."""

    def __init__(self) -> None:
        self._installed: list[tuple[Any, str, Any, bool]] = []
        self._removed = False

    def surround(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of an object by a call of ``around`` with the method and its arguments."""
        method, was_own = getattr(owner, name), name in vars(owner)
        is_fixed = was_own or isinstance(owner, type)

        @functools.wraps(method)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            # The method of an object's class may have been replaced since.
            now = method if is_fixed else functools.partial(getattr(type(owner), name), owner)
            # Another hook may have stored this function and may call it after the removal.
            return now(*args, **kwargs) if self._removed else around(now, *args, **kwargs)

        self._installed.append((owner, name, surrounded, was_own))
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
