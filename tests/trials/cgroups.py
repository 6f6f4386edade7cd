"""Control groups for trials, as schedulers make them: one that is killed as a whole, one of little memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MEMORY_BYTES = 64 << 20
_ROOT = Path("/sys/fs/cgroup")
# With the unified hierarchy alone, or with one of version 1 for each resource.
_KILLED = [_ROOT / "unified", _ROOT]
_LIMITED = [(_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")]


@contextlib.contextmanager
def killed_as_a_whole(name: str) -> Iterator[Path | None]:
    """A cgroup with a file ``cgroup.kill``; None where this system has none that may be made."""
    with contextlib.ExitStack() as made:
        for parent in _KILLED:
            cgroup = made.enter_context(_cgroup(parent, name))
            if cgroup is not None and (cgroup / "cgroup.kill").exists():
                yield cgroup
                return
        yield None


@contextlib.contextmanager
def of_little_memory(name: str) -> Iterator[Path | None]:
    """A cgroup whose processes the kernel kills if they use more than 64 MiB; None where this system has none."""
    with contextlib.ExitStack() as made:
        for parent, limit in _LIMITED:
            cgroup = made.enter_context(_cgroup(parent, name))
            if cgroup is not None and (cgroup / limit).exists():
                (cgroup / limit).write_text(str(MEMORY_BYTES))
                yield cgroup
                return
        yield None


def join(cgroup: Path) -> None:
    """Move this process, and those it starts from now on, into a cgroup."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def _cgroup(parent: Path, name: str) -> Iterator[Path | None]:
    """Make a cgroup; it is removed at the end, when its processes must have ended."""
    cgroup = parent / name
    try:
        if not (parent / "cgroup.procs").exists():
            raise OSError
        cgroup.mkdir()
    except OSError:
        yield None
        return
    try:
        yield cgroup
    finally:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
