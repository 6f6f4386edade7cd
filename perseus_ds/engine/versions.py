"""Which DeepSpeed Perseus works with, and a clear word where it does not."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from perseus_ds.errors import VersionError

OLDEST_DEEPSPEED = "0.14.4"
"""The first that can be imported beside the torch of ``requirements.lock``; tested by ``make test-oldest``."""
REMEDY = f'Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'


def require_deepspeed() -> None:
    """Check that the installed DeepSpeed is one that Perseus knows how to work with, without importing it.

    Raises:
        VersionError: It is missing or too old; the message names the version found and what to install.
    """
    problem = deepspeed_problem()
    if problem:
        raise VersionError(f"{problem}. {REMEDY}")


def deepspeed_problem() -> str:
    """Return what is wrong with the installed DeepSpeed; empty if nothing."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed, expected deepspeed>={OLDEST_DEEPSPEED}"
    if Version(found) < Version(OLDEST_DEEPSPEED):
        return f"DeepSpeed {found} is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    return ""


def require_hooks(pipeline_engine: type) -> None:
    """Check that a pipeline engine still has what Perseus takes hold of.

    Args:
        pipeline_engine: DeepSpeed's class; one released after perseus-ds may have changed it.

    Raises:
        VersionError: The message names what is missing.
    """
    hooks = ("_INSTRUCTION_MAP", "train_batch", "eval_batch", "save_checkpoint", "load_checkpoint", "destroy")
    missing = [hook for hook in hooks if not hasattr(pipeline_engine, hook)]
    if missing:
        raise VersionError(
            f"DeepSpeed {importlib.metadata.version('deepspeed')} is too new for perseus-ds: its "
            f"{pipeline_engine.__name__} has no {', '.join(missing)}. Upgrade perseus-ds, or take an older DeepSpeed."
        )
