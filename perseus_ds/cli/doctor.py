"""``perseus-ds doctor``: one page that says whether this machine will work."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from perseus_ds.cli.arguments import argument

if TYPE_CHECKING:
    from perseus_ds.cli.diagnostics import Finding

_COLOURS = {"ok": "32", "info": "0", "warn": "33", "fail": "31"}


class Device(Enum):
    """Which "device" of the perseus block the machine has to be ready for."""

    nvml = "real GPUs whose clocks the job changes itself"
    zeus = "real GPUs whose clocks zeusd changes for the job"
    simulated = "simulated GPUs; no real one is looked at"


# Findings that only matter to some devices; all others matter to all.
_ONLY_FOR = {
    "nvidia-ml-py": {Device.nvml, Device.zeus},
    "zeusd": {Device.zeus},
    "lock": {Device.nvml},
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say on one page whether this machine will work, and what to do where it will not."""

    examples: ClassVar[tuple[str, ...]] = (
        "perseus-ds doctor",
        "perseus-ds doctor lock=true",
        "perseus-ds doctor device=simulated",
    )

    device: Device = argument("what the machine has to be ready for", Device.nvml)
    lock: bool = argument(
        "true: also lock clocks for a moment, to try the permission and measure how long it takes", False
    )


def run(arguments: Arguments) -> int:
    """Print the page; returns 1 if the machine is not ready for the device."""
    from perseus_ds.cli.diagnostics import examine_gpus, examine_software

    software = examine_software()
    simulated = arguments.device is Device.simulated
    gpus = [] if simulated else examine_gpus(lock=arguments.lock)
    print(f"perseus-ds on {platform.node() or 'this node'} ({platform.system()} {platform.release()})")
    for findings in [software, *gpus]:
        print()
        for finding in findings:
            _print(finding)
    to_solve = _failures([software, *gpus], arguments.device)
    print(f"\n{_verdict(arguments.device, to_solve, _failures([software], Device.simulated))}")
    return 1 if to_solve else 0


def _failures(sections: list[list[Finding]], device: Device) -> list[str]:
    """Return the names of the failures that matter to a device, each once."""
    failed = [
        finding.what
        for findings in sections
        for finding in findings
        if finding.level == "fail" and device in _ONLY_FOR.get(finding.what, {device})
    ]
    return list(dict.fromkeys(failed))


def _verdict(device: Device, to_solve: list[str], to_solve_simulated: list[str]) -> str:
    if device is Device.simulated:
        return f"To solve: {', '.join(to_solve)}." if to_solve else "This machine is ready for simulated GPUs."
    if not to_solve:
        return "This machine is ready."
    if to_solve_simulated:
        return f"To solve: {', '.join(to_solve)}."
    return f"This machine is ready for simulated GPUs; for real ones solve: {', '.join(to_solve)}."


def _print(finding: Finding) -> None:
    mark = f"{finding.level:4}"
    if sys.stdout.isatty():
        mark = f"\033[{_COLOURS[finding.level]}m{mark}\033[0m"
    print(f"{mark}  {finding.what:13} {finding.text}")
    if finding.remedy:
        print(f"{'':20} -> {finding.remedy}")
