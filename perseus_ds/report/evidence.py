"""What checks on a GPU have measured, as a page and as text."""

from __future__ import annotations

from perseus_ds.artifacts.evidence import Evidence
from perseus_ds.report.rendering import rendered


def evidence_page(evidence: Evidence) -> str:
    """Return the page."""
    machine = evidence.machine
    versions = [f"{name} {version}" for name, version in machine.versions.items()]
    return rendered(
        "evidence.html",
        {"figures": {}},
        title=f"Perseus: evidence from {machine.gpu}",
        eyebrow="perseus-ds report",
        heading=f"Checks on {machine.gpu}",
        facts=[*([f"driver {machine.driver}"] if machine.driver else []), *versions, f"measured {evidence.made}"],
        simulated=machine.simulated,
        missing=[f"not made: {title}" for title in evidence.not_made],
        evidence=evidence,
        passed=_passed(evidence),
    )


def evidence_text(evidence: Evidence) -> str:
    """Return lines of a terminal: how many checks passed, and why others failed."""
    lines = [f"{_passed(evidence)} of {len(evidence.checks)} checks passed on {evidence.machine.gpu}."]
    lines += [f"FAILED: {check.title}: {check.reason}" for check in evidence.checks if check.outcome == "failed"]
    lines += [f"Not made: {title}" for title in evidence.not_made]
    if evidence.machine.simulated:
        lines.append("SIMULATED: a stand-in took the place of the GPU; no figure says anything of a GPU.")
    return "\n".join(lines)


def _passed(evidence: Evidence) -> int:
    return sum(check.outcome == "passed" for check in evidence.checks)
