"""What checks on a real GPU have measured: ``evidence.json``, written by ``make test-gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from perseus_ds.artifacts.io import FileModel, read_model, write_atomically
from perseus_ds.artifacts.validation import MOST_EVIDENCE_BYTES, Duration, Many, Text
from perseus_ds.errors import ConfigError
from perseus_ds.units import printable

FILE_NAME = "evidence.json"
Lines = Annotated[str, Field(max_length=10_000), AfterValidator(printable)]
"""A text of several lines."""
Number = Annotated[float, Field(ge=-1e18, le=1e18)]


class Figure(FileModel):
    """One measured figure, and the limits that it must keep, if any.

    Attributes:
        unit: Its unit, such as ``ms``; empty for a number or a ratio.
    """

    name: Text
    value: Number
    unit: Text = ""
    at_least: Number | None = None
    at_most: Number | None = None

    @property
    def is_within_limits(self) -> bool:
        """Whether it keeps its limits."""
        least, most = self.at_least, self.at_most
        return (least is None or self.value >= least) and (most is None or self.value <= most)

    @property
    def limits(self) -> str:
        """Its limits in words; empty without any."""
        named = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{word} {limit:g} {self.unit}".rstrip() for word, limit in named if limit is not None)


class Machine(FileModel):
    """Where checks ran.

    Attributes:
        simulated: Whether it is a stand-in without a GPU: its figures say nothing of a GPU.
        driver: Version of the driver, None for a stand-in.
        versions: Of packages, and of CUDA.
    """

    simulated: bool
    gpu: Text
    driver: Text | None
    versions: dict[Text, Text]


class CheckResult(FileModel):
    """The result of one check.

    Attributes:
        title: What it shows, one sentence.
        outcome: ``passed``, or ``failed``: a figure is beyond its limits, or the check could not be made.
        reason: Why it failed; None if it passed.
    """

    name: Text
    title: Text
    outcome: Literal["passed", "failed"]
    reason: Lines | None = None
    took_s: Duration
    figures: Many[Figure] = Field(default_factory=list)
    notes: Many[Lines] = Field(default_factory=list)


class Evidence(FileModel):
    """All checks that were made on one machine.

    Attributes:
        made: When the last of them ended, UTC.
        checks: In the order of their numbers.
        not_made: Titles of the checks that were not made there.
    """

    format: Literal["perseus-ds evidence"] = "perseus-ds evidence"
    schema_version: Literal[1] = 1
    made: Text
    machine: Machine
    checks: Many[CheckResult]
    not_made: Many[Text] = Field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Write ``evidence.json`` into a folder, and return its path.

        Raises:
            OSError: It cannot be written there.
        """
        path = folder / FILE_NAME
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Evidence:
        """Read an ``evidence.json``.

        Raises:
            ConfigError: It is missing, or no such file; the message names the key.
        """
        return read_model(cls, path, ConfigError, "evidence.json of checks on a GPU", most_bytes=MOST_EVIDENCE_BYTES)
