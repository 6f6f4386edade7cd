"""Plans of lowtime and Zeus: ``freqs_pipeline_%05d.py``, one Python literal a file.

A list with one list per pipeline rank of ``(instruction, MHz)`` in program order, as Zeus's
pipeline frequency server loads them. They are read as data and never executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as shortened

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.io import parse_json, read_text, write_together
from perseus_ds.artifacts.limits import MIB, MOST_CLOCK_MHZ, MOST_STAGES
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.validation import brief
from perseus_ds.errors import FrontierError
from perseus_ds.pipeline.instruction import Kind

Pairs = list[list[tuple[str, int]]]
"""For every rank, the instruction's kind and its clock [MHz]."""
_MOST_BYTES = 4 * MIB
# Python's own parser takes 100 times the time and memory for the same list.
_COMMENT, _TRAILING_COMMA, _TO_JSON = re.compile(r"#[^\n]*"), re.compile(r",\s*\]"), str.maketrans("()'", '[]"')


def export_zeus(frontier: Frontier, directory: Path) -> list[Path]:
    """Write every plan as a file that Zeus's server loads, or none; the number is the plan's in ``frontier.csv``.

    A tail's clock is left out: Zeus knows forward and backward passes only.

    Returns:
        The files, the fastest plan first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"freqs_pipeline_{number:05d}.py" for number in range(len(frontier.plans))]
    plans = zip(paths, enumerate(frontier.plans), strict=True)
    write_together((path, _literal(number, plan)) for path, (number, plan) in plans)
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
        FrontierError: The file is not a list of this form; the message names rank and position.
    """
    text = read_text(path, FrontierError, "file of a plan", _MOST_BYTES)
    try:
        value = parse_json(_TRAILING_COMMA.sub("]", _COMMENT.sub("", text).translate(_TO_JSON)))
    except ValueError as error:
        raise FrontierError(
            f"{path}: not a list ({brief(error)}). Expected one list per rank of (instruction, MHz)."
        ) from None
    if not isinstance(value, list) or not 0 < len(value) <= MOST_STAGES:
        raise FrontierError(f"{path}: expected one list per rank, at most {MOST_STAGES}, found {shortened(value)}.")
    for rank, entries in enumerate(value):
        if not isinstance(entries, list):
            raise FrontierError(f"{path}: rank {rank}: expected a list, found {shortened(entries)}.")
        for position, entry in enumerate(entries):
            match entry:
                case [str(kind), int(clock)] if len(kind) <= 80 and 0 < clock <= MOST_CLOCK_MHZ and clock is not True:
                    entries[position] = kind, clock
                    continue
            raise FrontierError(
                f"{path}: rank {rank}, instruction {position}: expected (instruction, MHz) such as "
                f"('forward', 1410), found {shortened(entry)}."
            )
    return value


def read_plans(directory: Path) -> Iterator[tuple[Path, Pairs]]:
    """Return all plan files of a folder in the order of their names; each is read when it is asked for.

    Raises:
        FrontierError: There are none, or one is not of this form.
    """
    paths = sorted(directory.glob("freqs_pipeline_*.py"))
    if not paths:
        raise FrontierError(f"{directory}: no freqs_pipeline_*.py in it. Give the folder that lowtime wrote.")
    return ((path, read_zeus(path)) for path in paths)
