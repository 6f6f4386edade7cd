"""``perseus-ds watch`` and ``control``, for running jobs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from perseus_ds.cli.values import NONE, Number, NumberOrNone, OptionalCount, OptionalTime, flag_of, limited
from perseus_ds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Show the state of a job, or of all jobs of a folder in one line each.

    The job's folder must be readable, on any node. The command ends with the job. In a terminal, p pauses the plans, r
    resumes them, q quits, and o asks for another command, written as after "perseus-ds control" but without RUN. If
    there is no job yet, the command waits for one.
    """

    examples = (
        "perseus-ds watch perseus",
        "perseus-ds watch . --once",
        "perseus-ds watch perseus --once --json",
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
class JobArguments:
    """Argument that selects a job."""

    run: Positional[Path]
    """the job's output folder, the output_dir of its perseus block"""


@dataclass(frozen=True, kw_only=True)
class StatusCommand(JobArguments):
    """Print the status of the job."""

    examples = ("perseus-ds control status perseus", "perseus-ds control status perseus --json")

    json: bool = False
    """print the status as a JSON object"""

    def execute(self) -> int:
        from pydantic import ValidationError

        from perseus_ds.cli.main import terminal
        from perseus_ds.progress.facts import JobFacts
        from perseus_ds.report.live import JobScreen, Screen

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
class SetCommand(JobArguments):
    """Change the goal of the job, with the keys of goal in the perseus block.

    A goal limits time (--max-slowdown, --finish-by) and power (--watts, --power-fraction, --until). A new limit
    replaces the present one of its kind, and the other kind stays.
    """

    examples = (
        "perseus-ds control set perseus --max-slowdown 0.05",
        "perseus-ds control set perseus --finish-by 2030-01-31T08:00:00+00:00 --total-steps 20000",
        "perseus-ds control set perseus --power-fraction 0.75 --until 3h",
    )

    max_slowdown: NumberOrNone = None
    """fraction of the iteration time at default clocks, such as 0.05, or none for least energy"""
    finish_by: OptionalTime = None
    """time at which the last step must be done, such as 2030-01-31T08:00:00+00:00, or 30h from now"""
    total_steps: OptionalCount = None
    """number of steps of the whole training, for --finish-by"""
    watts: Number = None
    """limit of the average power of all GPUs of the job together [W]"""
    power_fraction: Number = None
    """the same limit as a fraction of the power at default clocks, such as 0.75"""
    until: OptionalTime = None
    """end of the power limit, such as 2030-01-31T18:00:00+00:00, or 3h from now"""

    def execute(self) -> int:
        keys: dict[str, Any] = {key: value for key, value in vars(self).items() if key != "run" and value is not None}
        if self.max_slowdown == NONE:
            keys["max_slowdown"] = None
        if not keys:
            raise ConfigError(
                "no limit is given. Give one, such as --max-slowdown 0.05; `perseus-ds control clear` ends a limit."
            )
        return _command(self.run, {"command": "set", "goal": keys})


@dataclass(frozen=True, kw_only=True)
class ClearCommand(JobArguments):
    """Return to the goal of the job's configuration."""

    examples = ("perseus-ds control clear perseus", "perseus-ds control clear perseus --limit power")

    limit: Literal["time", "power"] | None = None
    """only this limit, by default both"""

    def execute(self) -> int:
        return _command(self.run, {"command": "clear", "limit": self.limit})


@dataclass(frozen=True, kw_only=True)
class StragglerCommand(JobArguments):
    """Report a slower pipeline, so that the others need not wait for it at full speed."""

    examples = ("perseus-ds control straggler perseus --pipeline 1 --slowdown 1.2",)

    pipeline: Annotated[int, limited(int, at_least=0)]
    """index of the data-parallel pipeline"""
    slowdown: Annotated[float, limited(float, at_least=1)]
    """factor by which its iterations take longer; 1 once it has recovered"""
    after_iterations: Annotated[int, limited(int, at_least=0)] = 0
    """number of iterations until the slowdown begins"""

    def execute(self) -> int:
        report = {key: value for key, value in vars(self).items() if key != "run"}
        return _command(self.run, {"command": "straggler", **report})


@dataclass(frozen=True, kw_only=True)
class PauseCommand(JobArguments):
    """Run at default clocks."""

    examples = ("perseus-ds control pause perseus",)

    def execute(self) -> int:
        return _command(self.run, {"command": "pause"})


@dataclass(frozen=True, kw_only=True)
class ResumeCommand(JobArguments):
    """Run under plans again."""

    examples = ("perseus-ds control resume perseus",)

    def execute(self) -> int:
        return _command(self.run, {"command": "resume"})


def _command(run: Path, command: dict[str, Any]) -> int:
    print(_send(run, command)["done"])
    return 0


def _send(run: Path, command: dict[str, Any]) -> dict[str, Any]:
    from perseus_ds.policy.commands import parse_command
    from perseus_ds.server.control_socket import send_command

    try:
        parse_command(command)
    except ConfigError as error:  # names keys of the command
        raise ConfigError(
            re.sub(r"(?m)^command: (?:goal\.)?([a-z_]+):", lambda key: f"{flag_of(key[1])}:", str(error))
        ) from None
    return send_command(run, command)
