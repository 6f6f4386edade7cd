"""The extension that DeepSpeed compiles when a job starts: compiled once, copied for every trial.

A process that is killed while it loads the extension leaves a file ``lock``, for whose end all others would wait.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import job


def compiled(folder: Path, ranks: int) -> Path:
    """Return a folder in which it is compiled; what other tests have compiled is used."""
    extensions = folder / "extensions"
    if Path(job.EXTENSIONS).is_dir():
        shutil.copytree(job.EXTENSIONS, extensions, ignore=shutil.ignore_patterns("lock"))
    assert job.run(folder / "compiling", ranks, {"TORCH_EXTENSIONS_DIR": str(extensions)}, steps=1).ranks
    return extensions


def copied(extensions: Path, folder: Path) -> dict[str, str]:
    """Copy it for one job; returns the variables that have the job use its copy."""
    copy = shutil.copytree(extensions, folder / "extensions")
    return {"TORCH_EXTENSIONS_DIR": str(copy)}
