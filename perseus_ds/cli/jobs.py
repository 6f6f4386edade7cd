"""``perseus-ds watch`` and ``control``: jobs while they run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from perseus_ds.cli.values import Amount, Number, OptionalCount, OptionalSeconds, Seconds, Text, flag_of, one
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show how a job goes, anywhere where its folder can be read; the jobs of a folder in a line each.

    It ends with the job. In a terminal, p pauses the plans, r resumes them and o asks for another order, written as
    after "perseus-ds control" but without RUN, where the job can be reached: on the node of rank 0, by its owner. q
    leaves. Where there is no job yet, it waits for one.
    """

    examples = (
        "perseus-ds watch perseus",
        "perseus-ds watch runs --once",
        "perseus-ds watch perseus --json",
    )

    run: Positional[Path]
    """the job's output folder, or a folder of several"""
    once: bool = False
    """print how it goes now and leave; so does output that is no terminal's"""
    json: bool = False
    """print a JSON object for each job in a line, at each change"""

    def execute(self) -> int:
        from rich.console import Console

        from perseus_ds.cli.output import terminal
        from perseus_ds.report.live import Jobs, print_json, print_once, watch

        jobs = Jobs(self.run)
        if self.json:
            print_json(jobs, once=self.once)
        elif self.once or not sys.stdout.isatty():
            print_once(jobs, Console(file=terminal()))
        else:
            watch(jobs, Console(file=terminal()), answer_to)
        return 0


def answer_to(words: list[str]) -> str:
    """Return what ``perseus-ds control`` prints with these arguments, in one line and without boxes."""
    from perseus_ds.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(["control", *words])
    return " ".join(re.sub(r"(?m)^[+|]|[+|]$|-{4,}", " ", printed.getvalue()).split())


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which job is ordered."""

    run: Positional[Path]
    """the job's output folder, output_dir of its perseus block"""


@dataclass(frozen=True, kw_only=True)
class Status(Job):
    """Print how the job goes."""

    examples = ("perseus-ds control status perseus", "perseus-ds control status perseus --json")

    json: bool = False
    """print it as a JSON object"""

    def execute(self) -> int:
        return _order(self.run, {"command": "status"}, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Policy(Job):
    """Run under another policy, with the keys that it has in the perseus block."""

    examples = (
        "perseus-ds control policy perseus --name energy_optimal",
        "perseus-ds control policy perseus --name slowdown --max-slowdown 0.05",
        "perseus-ds control policy perseus --name power_cap --watts 5000",
    )

    name: str
    """slowdown, deadline, power_cap, energy_optimal or reduce"""
    max_slowdown: Number = None
    """slowdown: as a fraction of the fastest iteration, such as 0.05"""
    finish_by: Text = None
    """deadline: when the last step must be done, such as 2030-01-31T08:00:00+00:00"""
    total_steps: OptionalCount = None
    """deadline: steps of the whole training"""
    watts: Number = None
    """power_cap: of all GPUs of the job together [W]"""
    signal: Text = None
    """power_cap, reduce: file with watts or fractions over time, or with one number"""
    power_fraction: Number = None
    """reduce: of the job's average power at default clocks, such as 0.75; until --until"""
    until: Text = None
    """reduce: when that ends, such as 2030-01-31T08:00:00+00:00"""

    def execute(self) -> int:
        keys = {key: value for key, value in vars(self).items() if key != "run" and value is not None}
        return _order(self.run, {"command": "policy", "policy": keys})


@dataclass(frozen=True, kw_only=True)
class Straggler(Job):
    """Say that one pipeline takes longer, so that the others need not wait for it at full speed."""

    examples = ("perseus-ds control straggler perseus --pipeline 1 --slowdown 1.2",)

    pipeline: Annotated[int, one(int, at_least=0)]
    """which data-parallel pipeline"""
    slowdown: Annotated[float, one(float, at_least=1)]
    """how many times as long its iterations take; 1 when it has recovered"""
    after_iterations: Annotated[int, one(int, at_least=0)] = 0
    """number of iterations until then"""

    def execute(self) -> int:
        order = {key: value for key, value in vars(self).items() if key != "run"}
        return _order(self.run, {"command": "straggler", **order})


@dataclass(frozen=True, kw_only=True)
class Reduce(Job):
    """Draw less power for a while."""

    examples = ("perseus-ds control reduce perseus --power-fraction 0.75 --duration 3h --within 30s",)

    power_fraction: Amount
    """of the job's average power at default clocks, such as 0.75; above 0, at most 1"""
    duration: Seconds
    """for how long, such as 90s, 30min, 3h or 1h30m"""
    within: OptionalSeconds = None
    """how soon it is needed, such as 30s; the answer says so if the job takes longer"""

    def execute(self) -> int:
        order = {"power_fraction": self.power_fraction, "duration_s": self.duration, "within_s": self.within}
        return _order(self.run, {"command": "reduce", **order})


@dataclass(frozen=True, kw_only=True)
class Pause(Job):
    """Run at default clocks."""

    examples = ("perseus-ds control pause perseus",)

    def execute(self) -> int:
        return _order(self.run, {"command": "pause"})


@dataclass(frozen=True, kw_only=True)
class Resume(Job):
    """Run under plans again."""

    examples = ("perseus-ds control resume perseus",)

    def execute(self) -> int:
        return _order(self.run, {"command": "resume"})


def _order(run: Path, order: dict[str, Any], *, as_json: bool = False) -> int:
    from perseus_ds.policy.control_socket import parse_order, send_order

    try:
        parse_order(order)
    except ConfigError as error:  # it names keys of the order
        raise ConfigError(
            re.sub(r"(?m)^order: (?:policy\.)?([a-z_]+):", lambda key: f"{flag_of(key[1])}:", str(error))
        ) from None
    answer = send_order(run, order)
    if "status" in answer:
        _print_status(answer["status"], as_json=as_json)
    if "done" in answer:
        print(answer["done"])
    return 0


def _print_status(status: dict[str, Any], *, as_json: bool) -> None:
    from pydantic import ValidationError
    from rich.console import Console

    from perseus_ds.cli.output import terminal
    from perseus_ds.report.live import JobScreen
    from perseus_ds.runtime.progress import JobFacts

    if as_json:
        print(json.dumps(status))
        return
    try:
        facts = JobFacts.model_validate(status)
    except ValidationError:
        raise ConfigError("the job runs another version of Perseus; write --json for its answer.") from None
    Console(file=terminal()).print(JobScreen(facts))
