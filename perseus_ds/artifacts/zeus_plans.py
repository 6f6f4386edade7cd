"""Plans of lowtime and Zeus: ``freqs_pipeline_%05d.py``, one Python literal a file.

A list with one list per pipeline rank of ``(instruction, MHz)`` in program order, as Zeus's
pipeline frequency server loads them. They are read as literals and never executed.
"""

from __future__ import annotations

import ast
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.errors import FrontierError
from perseus_ds.pipeline.instruction import Kind

Pairs = list[list[tuple[str, int]]]
"""For every rank, the instruction's kind and its clock [MHz]."""


def export_zeus(frontier: Frontier, directory: Path) -> list[Path]:
    """Write every plan as a file that Zeus's server loads; the number is the plan's in ``frontier.csv``.

    A tail's clock is left out: Zeus knows forward and backward passes only.

    Returns:
        The files, the fastest plan first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, plan in enumerate(frontier.plans):
        path = directory / f"freqs_pipeline_{number:05d}.py"
        write_atomically(path, _literal(number, plan))
        paths.append(path)
    return paths


def _literal(number: int, plan: FrequencyPlan) -> str:
    ranks = [
        [(i.kind.value, clock) for i, clock in zip(instructions, clocks, strict=True) if i.kind is not Kind.TAIL]
        for instructions, clocks in zip(plan.instructions, plan.clocks_mhz, strict=True)
    ]
    lines = ["[", *(f"{rank}," for rank in ranks), "]"]
    return "\n".join([*lines, f"# Plan {number}: {plan.time_s!r} s, {plan.energy_j!r} J"]) + "\n"


def read_zeus(path: Path) -> Pairs:
    """Read one plan file, without executing it.

    Raises:
        FrontierError: The file is not a literal of this form; the message names rank and position.
    """
    try:
        value = ast.literal_eval(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise FrontierError(
            f"{path}: not a Python literal ({error}). Expected one list per rank of (instruction, MHz)."
        ) from None
    except OSError as error:
        raise FrontierError(f"{path}: cannot be read ({error.strerror}).") from None
    if not isinstance(value, list) or not value:
        raise FrontierError(f"{path}: expected one list per rank, found {value!r:.60}.")
    for rank, entries in enumerate(value):
        if not isinstance(entries, list):
            raise FrontierError(f"{path}: rank {rank}: expected a list, found {entries!r:.60}.")
        for position, entry in enumerate(entries):
            match entry:
                case (str(), int(clock)) if clock > 0 and clock is not True:
                    continue
            raise FrontierError(
                f"{path}: rank {rank}, instruction {position}: expected (instruction, MHz) such as "
                f"('forward', 1410), found {entry!r:.60}."
            )
    return value


def read_plans(directory: Path) -> dict[Path, Pairs]:
    """Read all plan files of a folder, in the order of their names.

    Raises:
        FrontierError: There are none, or one is not of this form.
    """
    paths = sorted(directory.glob("freqs_pipeline_*.py"))
    if not paths:
        raise FrontierError(f"{directory}: no freqs_pipeline_*.py in it. Give the folder that lowtime wrote.")
    return {path: read_zeus(path) for path in paths}
