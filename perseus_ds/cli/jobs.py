"""``perseus-ds watch`` and ``control``, for running jobs."""

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

from perseus_ds.cli.values import Amount, Number, OptionalCount, OptionalSeconds, Seconds, Text, flag_of, limited
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show the state of a job, or of all jobs of a folder in one line each.

    The job's folder must be readable, on any node. The command ends with the job. In a terminal, p pauses the plans, r
    resumes them, q quits, and o asks for another order, written as after "perseus-ds control" but without RUN. If
    there is no job yet, the command waits for one.
    """

    examples = (
        "perseus-ds watch perseus",
        "perseus-ds watch runs --once",
        "perseus-ds watch perseus --json",
    )

    run: Positional[Path]
    """the job's output folder, or a folder of several jobs"""
    once: bool = False
    """print the present state and exit; the default if the output is not a terminal"""
    json: bool = False
    """print each job as a JSON object in one line, at each change"""

    def execute(self) -> int:
        from perseus_ds.cli.main import terminal
        from perseus_ds.report.live import Jobs, Screen, print_json, print_once, watch

        jobs = Jobs(self.run)
        if self.json:
            print_json(jobs, once=self.once)
        elif self.once or not sys.stdout.isatty():
            print_once(jobs, Screen(file=terminal()))
        else:
            watch(jobs, Screen(file=terminal()), answer_to)
        return 0


def answer_to(arguments: list[str]) -> str:
    """Return the output of ``perseus-ds control`` in one line and without boxes."""
    from perseus_ds.cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(["control", *arguments])
    return " ".join(re.sub(r"(?m)^[+|]|[+|]$|-{4,}", " ", printed.getvalue()).split())


@dataclass(frozen=True, kw_only=True)
class Job:
    """Argument that selects a job."""

    run: Positional[Path]
    """the job's output folder, the output_dir of its perseus block"""


@dataclass(frozen=True, kw_only=True)
class Status(Job):
    """Print the status of the job."""

    examples = ("perseus-ds control status perseus", "perseus-ds control status perseus --json")

    json: bool = False
    """print the status as a JSON object"""

    def execute(self) -> int:
        from pydantic import ValidationError

        from perseus_ds.cli.main import terminal
        from perseus_ds.report.live import JobScreen, Screen
        from perseus_ds.server.progress import JobFacts

        status = _send(self.run, {"command": "status"})["status"]
        if self.json:
            print(json.dumps(status))
            return 0
        try:
            facts = JobFacts.model_validate(status)
        except ValidationError:
            raise ConfigError("the job runs another version of Perseus; use --json to print its answer.") from None
        Screen(file=terminal()).print(JobScreen(facts))
        return 0


@dataclass(frozen=True, kw_only=True)
class Policy(Job):
    """Change the policy, with the keys of a policy in the perseus block."""

    examples = (
        "perseus-ds control policy perseus --name energy_optimal",
        "perseus-ds control policy perseus --name slowdown --max-slowdown 0.05",
        "perseus-ds control policy perseus --name power_cap --watts 5000",
    )

    name: str
    """slowdown, deadline, power_cap, energy_optimal or reduce"""
    max_slowdown: Number = None
    """slowdown: fraction of the iteration time at default clocks, such as 0.05"""
    finish_by: Text = None
    """deadline: time at which the last step must be done, such as 2030-01-31T08:00:00+00:00"""
    total_steps: OptionalCount = None
    """deadline: number of steps of the whole training"""
    watts: Number = None
    """power_cap: power of all GPUs of the job together [W]"""
    power_fraction: Number = None
    """reduce: fraction of the job's mean power at default clocks, such as 0.75, in force until --until"""
    until: Text = None
    """reduce: end of the reduction, such as 2030-01-31T08:00:00+00:00"""

    def execute(self) -> int:
        keys = {key: value for key, value in vars(self).items() if key != "run" and value is not None}
        return _order(self.run, {"command": "policy", "policy": keys})


@dataclass(frozen=True, kw_only=True)
class Straggler(Job):
    """Report a slower pipeline, so that the others need not wait for it at full speed."""

    examples = ("perseus-ds control straggler perseus --pipeline 1 --slowdown 1.2",)

    pipeline: Annotated[int, limited(int, at_least=0)]
    """index of the data-parallel pipeline"""
    slowdown: Annotated[float, limited(float, at_least=1)]
    """factor by which its iterations take longer; 1 once it has recovered"""
    after_iterations: Annotated[int, limited(int, at_least=0)] = 0
    """number of iterations until the slowdown begins"""

    def execute(self) -> int:
        order = {key: value for key, value in vars(self).items() if key != "run"}
        return _order(self.run, {"command": "straggler", **order})


@dataclass(frozen=True, kw_only=True)
class Reduce(Job):
    """Reduce power for a limited time."""

    examples = ("perseus-ds control reduce perseus --power-fraction 0.75 --duration 3h --within 30s",)

    power_fraction: Amount
    """fraction of the job's mean power at default clocks, such as 0.75; above 0, at most 1"""
    duration: Seconds
    """duration of the reduction, such as 90s, 30min, 3h or 1h30m"""
    within: OptionalSeconds = None
    """time within which it is needed, such as 30s; the answer reports if the job needs longer"""

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


def _order(run: Path, order: dict[str, Any]) -> int:
    print(_send(run, order)["done"])
    return 0


def _send(run: Path, order: dict[str, Any]) -> dict[str, Any]:
    from perseus_ds.policy.policies import parse_order
    from perseus_ds.server.control_socket import send_order

    try:
        parse_order(order)
    except ConfigError as error:  # names keys of the order
        raise ConfigError(
            re.sub(r"(?m)^order: (?:policy\.)?([a-z_]+):", lambda key: f"{flag_of(key[1])}:", str(error))
        ) from None
    return send_order(run, order)
