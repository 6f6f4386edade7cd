"""Follows the jobs of a folder by their records."""

from __future__ import annotations

from pathlib import Path

from perseus_ds.artifacts.printable import printable
from perseus_ds.artifacts.record_follower import RecordFollower
from perseus_ds.artifacts.run_file import FILE_NAME
from perseus_ds.errors import ConfigError
from perseus_ds.report.live.facts import JobFacts
from perseus_ds.report.live.progress import JobLog


class JobFollower:
    """Follows one job.

    Args:
        folder: Its output folder.

    Attributes:
        folder: The same.
        problem: Why its records cannot be read now; empty where they can.
        unreadable: Number of lines that are no records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem = ""
        self._records = RecordFollower(folder)
        self._log = JobLog(printable(folder.resolve().name))

    @property
    def unreadable(self) -> int:
        return self._records.unreadable

    def facts(self, now: float) -> JobFacts:
        """Read what is new and return the facts; those known before where it cannot be read.

        Args:
            now: The time [Unix seconds].
        """
        self.problem = ""
        try:
            for is_another_file, records in self._records.read():
                if is_another_file:
                    self._log = JobLog(printable(self.folder.resolve().name))
                self._log.add(records)
        except OSError as error:  # a shared disk that does not answer, a file that is being replaced
            self.problem = str(error)
        return self._log.facts(now)


class Jobs:
    """Follows all jobs of a folder: its own, or those of the folders in it.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[Path, JobFollower] = {}

    def followers(self) -> list[JobFollower]:
        """Return one for each job, those that have begun since the last call too.

        Raises:
            ConfigError: There is no job.
        """
        folder = self._folder
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; expected the output_dir of a training run.")
        for path in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
            if path not in self._followers and (path / FILE_NAME).is_file():
                self._followers[path] = JobFollower(path)
        if not self._followers:
            raise ConfigError(
                f"{folder}: no {FILE_NAME} in it or in a folder of it. A job writes it when it starts; expected the "
                "output_dir of a training run."
            )
        return list(self._followers.values())
