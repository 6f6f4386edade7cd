"""Perseus for DeepSpeed's pipeline engines. Only this folder uses DeepSpeed.

Supported versions are checked here, without importing DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from pathlib import Path

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_DEEPSPEED = "0.14.4"
"""Oldest version that works with the torch of ``requirements.lock``. Tested by ``make test-oldest``."""
NEWEST_DEEPSPEED = "0.19.8"
"""Version in ``requirements.lock``, used by all tests."""
_UNKNOWN = "of unknown version"
REMEDY = f'Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'


def require_deepspeed() -> None:
    """Raise a ``VersionError`` if DeepSpeed is missing or too old."""
    problem = deepspeed_problem()
    if problem:
        raise VersionError(f"{problem}. {REMEDY}")


def deepspeed_problem() -> str:
    """Return why the installed DeepSpeed cannot be used. Empty if it can."""
    found = deepspeed_version()
    if found is None:
        return f"DeepSpeed is not installed, expected deepspeed>={OLDEST_DEEPSPEED}"
    if found != _UNKNOWN and Version(found) < Version(OLDEST_DEEPSPEED):
        return f"DeepSpeed {found} is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    return ""


def deepspeed_version() -> str | None:
    """Return the version of DeepSpeed, which may also be a source tree in Python's path. None if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("deepspeed")
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parents[1] / "version.txt").read_text().strip()
    except OSError:
        return _UNKNOWN
