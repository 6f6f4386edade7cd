"""``perseus-ds doctor``: one page that says whether this machine will work."""

from __future__ import annotations

import platform
import sys

from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.cli.diagnostics import Finding, examine_gpus, examine_software

_COLOURS = {"ok": "32", "info": "0", "warn": "33", "fail": "31"}


class DoctorArguments(Arguments):
    """Arguments of the command; ``configs/cli/doctor.yaml`` explains them."""

    lock: bool


def run(overrides: list[str]) -> int:
    """Print the page; returns 1 if a line of it is red."""
    arguments = compose("doctor", overrides, DoctorArguments)
    sections = [examine_software(), *examine_gpus(lock=arguments.lock)]
    print(f"perseus-ds on {platform.node() or 'this node'} ({platform.system()} {platform.release()})")
    for findings in sections:
        print()
        for finding in findings:
            _print(finding)
    failures = sum(finding.level == "fail" for findings in sections for finding in findings)
    print(f"\nTo be solved first: {failures} of the lines above." if failures else "\nThis machine is ready.")
    return 1 if failures else 0


def _print(finding: Finding) -> None:
    mark = f"{finding.level:4}"
    if sys.stdout.isatty():
        mark = f"\033[{_COLOURS[finding.level]}m{mark}\033[0m"
    print(f"{mark}  {finding.what:13} {finding.text}")
    if finding.remedy:
        print(f"{'':20} -> {finding.remedy}")
