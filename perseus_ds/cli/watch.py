"""``perseus-ds watch``: what a job does and saves, while it runs or after it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from perseus_ds.cli.arguments import argument


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show how a job goes, anywhere where its folder can be read; the jobs of a folder in a line each.

    It ends with the job. In a terminal, p pauses the plans, r resumes them and o asks for another policy, where the
    job can be reached: on the node of rank 0, by its owner. q leaves. Where there is no job yet, it waits for one.
    """

    examples = (
        "perseus-ds watch perseus",
        "perseus-ds watch runs --once",
        "perseus-ds watch perseus --json",
    )

    run: Path = argument("the job's output folder, or a folder of several", word=True)
    once: bool = argument("print how it goes now and leave; so does output that is no terminal's", False)
    json: bool = argument("print a JSON object for each job in a line, at each change", False)


def run(arguments: Arguments) -> int:
    """Follow the jobs until all have ended."""
    from rich.console import Console

    from perseus_ds.cli.output import terminal
    from perseus_ds.report.live import Jobs, print_json, print_once, watch

    jobs = Jobs(arguments.run)
    if arguments.json:
        print_json(jobs, once=arguments.once)
    elif arguments.once or not sys.stdout.isatty():
        print_once(jobs, Console(file=terminal()))
    else:
        watch(jobs, Console(file=terminal()))
    return 0
