"""Finished profiles and frontiers of earlier runs, kept under a key of everything they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_cache_path

from perseus_ds.artifacts.io import write_together
from perseus_ds.artifacts.profile_metadata import ProfileInfo

_FILES = ("profile.json", "profile.csv", "frontier.csv", "frontier.json")


def cache_key(info: ProfileInfo, fingerprints: Sequence[str], settings: Mapping[str, object]) -> str:
    """Return the name of a job, or under which its profile is kept.

    Args:
        info: GPU, driver, schedule, parallelism, micro-batch size and versions, before anything is measured.
        fingerprints: Of every rank's share of the model.
        settings: What else changes what is named.
    """
    content = [info.model_dump(mode="json"), list(fingerprints), dict(settings)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


class Cache:
    """One entry of the user's cache, ``$XDG_CACHE_HOME/perseus-ds`` or ``~/.cache/perseus-ds``."""

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def directory(self) -> Path:
        """Where it is.

        Raises:
            OSError: This user has no home folder, as in some containers.
        """
        try:
            return user_cache_path("perseus-ds") / self._key
        except RuntimeError as error:
            raise OSError(f"no folder for the cache: {error}. Set XDG_CACHE_HOME") from error

    @property
    def is_complete(self) -> bool:
        """Whether all files are there."""
        return all((self.directory / name).is_file() for name in _FILES)

    def store(self, source: Path) -> None:
        """Keep the files of a run's output folder.

        Raises:
            OSError: The disk is full, or the folder cannot be written; no entry is left half-made.
        """
        staging = self.directory.with_name(f"{self.directory.name}.{os.getpid()}")
        staging.mkdir(parents=True)
        try:
            for name in _FILES:
                shutil.copyfile(source / name, staging / name)
            shutil.rmtree(self.directory, ignore_errors=True)
            staging.rename(self.directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def remove(self) -> None:
        """Remove the entry, if there is one."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def restore(self, target: Path) -> None:
        """Copy the files into a run's output folder."""
        target.mkdir(parents=True, exist_ok=True)
        write_together((target / name, (self.directory / name).read_bytes()) for name in _FILES)
