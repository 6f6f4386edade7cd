"""Wraps methods of engines, which is how Perseus learns of their iterations and operations.

Perseus's code runs before and after a user's. An error of the user's code passes unchanged. An error of Perseus's own
code does not reach the user's: the method is called as without Perseus, or its result is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
Method = Callable[..., Any]


def _raise(error: Exception) -> None:
    raise error


class Hooks:
    """Wraps methods of single objects, without changing their classes, until :meth:`remove`."""

    def __init__(self, on_error: Callable[[Exception], object] = _raise) -> None:
        """Create hooks.

        Args:
            on_error: Receives errors of Perseus's own code. What it raises is raised instead of them.
        """
        self._on_error = on_error
        self._installed: list[tuple[Any, str, Any, bool]] = []
        self._removed = False

    def surround(self, owner: Any, name: str, around: Method) -> None:
        """Replace a method of an object by a call of ``around`` with a :class:`Call` and the method's arguments."""
        method, was_own = getattr(owner, name), name in vars(owner)
        is_fixed = was_own or isinstance(owner, type)

        def find() -> Method:
            # The method of an object's class may have been replaced since.
            return method if is_fixed else functools.partial(getattr(type(owner), name), owner)

        surrounded = functools.wraps(method)(self._surrounded(find, around))
        self._installed.append((owner, name, surrounded, was_own))
        setattr(owner, name, surrounded)

    def surrounded(self, function: Method, around: Method) -> Method:
        """Return a function that calls ``around`` with a :class:`Call` of a function and its arguments."""
        return functools.wraps(function)(self._surrounded(lambda: function, around))

    def guarded(self, function: Method) -> Method:
        """Return a function of Perseus that others call. After an error or the removal, its result is None."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._on_error(error)
                return None

        return guarded

    def each_within(
        self, items: Iterable[T], context_of: Callable[[T], AbstractContextManager[None] | None]
    ) -> Iterator[T]:
        """Yield items that others process, each within its own context until the next one is taken.

        ``context_of`` returns the context of an item, or None. After an error or the removal, none is entered.
        """
        for item in items:
            context = None
            if not self._removed:
                try:
                    context = context_of(item)
                    if context is not None:
                        context.__enter__()
                except Exception as error:
                    context = None
                    self._on_error(error)
            yield item
            if context is not None:
                try:
                    context.__exit__(None, None, None)
                except Exception as error:
                    self._on_error(error)

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

    def _surrounded(self, find: Callable[[], Method], around: Method) -> Method:
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            method = find()
            if self._removed:  # another hook may have stored this function and may call it after the removal
                return method(*args, **kwargs)
            call = Call(method)
            try:
                try:
                    return around(call, *args, **kwargs)
                except Exception as error:
                    if error is call.error:
                        raise
                    self._on_error(error)
                if call.error is not None:
                    raise call.error
                return call.result if call.is_over else method(*args, **kwargs)
            finally:
                call.error = None  # its traceback has this frame, and so the arguments, which may be large

        return surrounded


class Call:
    """One call of a wrapped method, which is made in the same way.

    Attributes:
        method: The method.
        is_over: Whether it has returned.
        result: What it has returned.
        error: What it has raised. None if it has raised nothing.
    """

    __slots__ = ("error", "is_over", "method", "result")

    def __init__(self, method: Method) -> None:
        self.method = method
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.method(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.is_over = True
        return self.result
