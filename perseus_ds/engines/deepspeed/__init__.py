"""Perseus for DeepSpeed's pipeline engines. Only this folder uses DeepSpeed.

Supported versions are checked here, without importing DeepSpeed.
"""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_DEEPSPEED = "0.14.4"
"""Oldest version that works with the torch of ``requirements.lock``. Tested by ``make test-oldest``."""
NEWEST_DEEPSPEED = "0.19.8"
"""Version in ``requirements.lock``, used by all tests."""
REMEDY = f'Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'


def require_deepspeed() -> None:
    """Raise a ``VersionError`` if DeepSpeed is missing or too old."""
    problem = deepspeed_problem()
    if problem:
        raise VersionError(f"{problem}. {REMEDY}")


def deepspeed_problem() -> str:
    """Return why the installed DeepSpeed cannot be used. Empty if it can."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed, expected deepspeed>={OLDEST_DEEPSPEED}"
    if Version(found) < Version(OLDEST_DEEPSPEED):
        return f"DeepSpeed {found} is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    return ""
