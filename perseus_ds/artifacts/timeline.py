"""``timeline.json``: how iterations really ran, operation by operation, on all ranks of one pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from perseus_ds.artifacts.io import read_json
from perseus_ds.artifacts.validation import explain
from perseus_ds.errors import ConfigError

_FORMAT: Literal["perseus-ds timeline"] = "perseus-ds timeline"


class MeasuredOperation(BaseModel):
    """One operation of one rank; an exchange of several transfers is one each, of the same start and end.

    Attributes:
        kind: An instruction's kind, ``load``, or what is transferred.
        stage: Of an instruction or load; of a transfer the sending one.
        target: Of a transfer the receiving stage.
        start_s: From the start of the pipeline's first rank [s].
        end_s: Likewise. For a transfer, waiting for the other side is included.
        clock_mhz: What the plan asks for; None at default clocks and for what has no clock.
    """

    model_config = ConfigDict(extra="forbid")
    kind: Literal["forward", "backward", "recompute", "tail", "load", "activation", "grad"]
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    target: int | None = None
    clock_mhz: int | None = None


class MeasuredIteration(BaseModel):
    """One iteration as it ran.

    Attributes:
        iteration: Its number in ``run.jsonl``.
        phase: What Perseus was doing.
        plan: The plan's place on the frontier; None at default clocks.
        ranks: By pipeline rank, in program order.
    """

    model_config = ConfigDict(extra="forbid")
    iteration: int
    phase: str
    ranks: list[list[MeasuredOperation]]
    plan: int | None = None


class TimelineFile(BaseModel):
    """All of ``timeline.json``."""

    model_config = ConfigDict(extra="forbid")
    format: Literal["perseus-ds timeline"] = _FORMAT
    schema_version: Literal[1] = 1
    simulated: bool
    gpu: str
    iterations: list[MeasuredIteration] = []

    @classmethod
    def load(cls, path: Path) -> TimelineFile:
        """Read the file.

        Raises:
            ConfigError: It is missing, cut off, foreign or of another version; the message names file and key.
        """
        raw = read_json(path, ConfigError, "timeline.json of a training run")
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(f"{explain(error, cls, f'{path}: ')} Train again to have it written anew.") from None
