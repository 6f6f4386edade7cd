"""What a report is made from: its files, when they were written and what they say of themselves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from perseus_ds.device.gpu.base import counts_whole_module
from perseus_ds.report.sources import Sources


@dataclass(frozen=True)
class Artefact:
    """A file.

    Attributes:
        path: Where it was read.
        written: When it was last written, UTC.
        sha256: The first digits of its hash.
        facts: What it says of its origin.
    """

    path: Path
    written: str
    sha256: str
    facts: str


def artefacts(found: Sources) -> list[Artefact]:
    """Return the files of a report in the order they were read."""
    return [_artefact(path, _facts(path, found)) for path in found.files]


def _artefact(path: Path, facts: list[str | None]) -> Artefact:
    written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return Artefact(
        path=path,
        written=written.strftime("%Y-%m-%d %H:%M"),
        sha256=_sha256(path)[:12],
        facts=", ".join(fact for fact in facts if fact),
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _facts(path: Path, found: Sources) -> list[str | None]:
    if path.name == "run.jsonl":
        history = next(h for h in found.histories if h.folder == path.parent)
        schema = history.starts[-1].schema_version if history.starts else None
        return [
            f"job {history.job[:12]}" if history.job else None,
            f"{history.mode} mode" if history.mode else None,
            f"{len(history.starts)} starts" if len(history.starts) > 1 else None,
            f"schema {schema}" if schema else None,
            history.gpu,
        ]
    if path.name == "frontier.json" and found.frontier is not None:
        origin = found.frontier.provenance
        return [
            f"solver {origin.solver}",
            origin.schedule.rpartition(":")[2],
            f"{origin.blocking_power_w:g} W while waiting",
            f"profile {origin.profile}" if origin.profile else None,
        ]
    if path.name == "profile.csv" and found.profile is not None:
        info = found.profile.info
        versions = [f"{name} {version}" for name, version in info.versions.items()]
        module = "its energy counter covers the whole module" if counts_whole_module(info.gpu or "") else None
        return [info.gpu, module, f"driver {info.driver}" if info.driver else None, info.model, *versions]
    return []
