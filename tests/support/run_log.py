"""Reads ``run.jsonl``, even while the job writes it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIVE_UP_S = 60.0
"""Time after which a wait for one condition fails [s]. No test depends on times."""
JOB_GIVE_UP_S = 600.0
"""Time after which a whole job fails as hung [s]. It may profile and train for minutes on a busy machine."""

Record = dict[str, Any]


def records(folder: Path) -> list[Record]:
    """Return the complete lines of a run's folder in order, none if there is no file yet."""
    path = folder / "run.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def iterations(found: list[Record], *phases: str) -> list[Record]:
    """Return the records of iterations, either all or those of some phases."""
    return [r for r in found if "iteration" in r and (not phases or r["phase"] in phases)]


def events(found: list[Record], *names: str) -> list[Record]:
    """Return the records of events, either all or those with some names."""
    return [r for r in found if "event" in r and (not names or r["event"] in names)]


def phases(found: list[Record]) -> list[str]:
    """Return the phases in the order of their first occurrence."""
    return list(dict.fromkeys(r["phase"] for r in iterations(found)))


def wait_until(condition: Callable[[], Any], what: str, within_s: float = GIVE_UP_S) -> Any:
    """Wait until a condition holds, and return its result."""
    end_s = time.monotonic() + within_s
    while not (so := condition()):
        assert time.monotonic() < end_s, f"it did not happen within {within_s:g} s: {what}"
        time.sleep(0.05)
    return so
