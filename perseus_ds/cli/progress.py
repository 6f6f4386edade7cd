"""A progress bar on stderr for work that takes more than a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that is told what is being done and how much of it is done, 0 to 1."""
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, bar_format=layout, delay=1.0, leave=False, disable=None) as bar:

        def progress(what: str, done: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield progress
