"""``evidence.json``: results of checks on a real GPU, written by ``make test-gpu``."""

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
"""A text that may have several lines."""
Number = Annotated[float, Field(ge=-1e18, le=1e18)]


class Figure(FileModel):
    """One measured figure with its limits, if any. The unit is empty for a number or a ratio."""

    name: Text
    value: Number
    unit: Text = ""
    at_least: Number | None = None
    at_most: Number | None = None

    @property
    def is_within_limits(self) -> bool:
        least, most = self.at_least, self.at_most
        return (least is None or self.value >= least) and (most is None or self.value <= most)

    @property
    def limits(self) -> str:
        """The limits in words, empty if there are none."""
        named = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{word} {limit:g} {self.unit}".rstrip() for word, limit in named if limit is not None)


class Machine(FileModel):
    """The machine that ran the checks, with versions of packages and of CUDA.

    A stand-in without a GPU is ``simulated`` and has no driver; its figures do not apply to GPUs.
    """

    simulated: bool
    gpu: Text
    driver: Text | None
    versions: dict[Text, Text]


class CheckResult(FileModel):
    """The result of one check. It fails if a figure is beyond its limits or if it cannot run."""

    name: Text
    title: Text
    outcome: Literal["passed", "failed"]
    reason: Lines | None = None
    took_s: Duration
    figures: Many[Figure] = Field(default_factory=list)
    notes: Many[Lines] = Field(default_factory=list)


class Evidence(FileModel):
    """The results of all checks on one machine, of which the last ended at ``made`` (UTC)."""

    format: Literal["perseus-ds evidence"] = "perseus-ds evidence"
    schema_version: Literal[1] = 1
    made: Text
    machine: Machine
    checks: Many[CheckResult]
    not_made: Many[Text] = Field(default_factory=list)

    @property
    def passed(self) -> int:
        return sum(check.outcome == "passed" for check in self.checks)

    def save(self, folder: Path) -> Path:
        """Write ``evidence.json`` into a folder, and return its path."""
        path = folder / FILE_NAME
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Evidence:
        return read_model(cls, path, ConfigError, "evidence.json of checks on a GPU", most_bytes=MOST_EVIDENCE_BYTES)
