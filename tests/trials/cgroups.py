"""Control groups for trials, as created by schedulers: killed as a whole, or with little memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_BYTES = str(64 << 20)
# For each kind, the possible parents (of cgroup version 1 or 2), a file that the new cgroup must have, and the content
# to write into that file.
_KINDS = {
    "killed as a whole": [(_ROOT / "unified", "cgroup.kill", ""), (_ROOT, "cgroup.kill", "")],
    "of little memory": [(_ROOT / "memory", "memory.limit_in_bytes", _BYTES), (_ROOT, "memory.max", _BYTES)],
}


@contextlib.contextmanager
def new_cgroup(kind: str, name: str) -> Iterator[Path | None]:
    """Yield a new cgroup of a kind, which is removed at the end. None if it cannot be created."""
    cgroup = next(filter(None, (_make(parent / name, *file) for parent, *file in _KINDS[kind])), None)
    try:
        yield cgroup
    finally:
        if cgroup is not None:
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def join(cgroup: Path) -> None:
    """Move this process, and all processes that it starts from now on, into a cgroup."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def _make(cgroup: Path, file: str, content: str) -> Path | None:
    """Create a cgroup and set its limit. Returns None if that is not possible."""
    if (cgroup.parent / "cgroup.procs").exists():
        with contextlib.suppress(OSError):
            cgroup.mkdir()
            if (cgroup / file).exists():
                if content:
                    (cgroup / file).write_text(content)
                return cgroup
            cgroup.rmdir()
    return None
