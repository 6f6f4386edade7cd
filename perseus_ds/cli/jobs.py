"""``perseus-ds watch`` and ``control``: jobs while they run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from perseus_ds.cli.arguments import argument, read_amount, require
from perseus_ds.errors import ConfigError

_TIMES = "a time such as 90s, 30min, 3h or 1h30m", {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Watch:
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
            watch(jobs, Console(file=terminal()))
        return 0


class Order(Enum):
    """What is ordered."""

    status = "print how the job goes"
    policy = "run under another policy, policy="
    straggler = "one pipeline takes longer, pipeline= and slowdown="
    reduce = "draw less power for a while, power_fraction= and duration="
    pause = "run at default clocks"
    resume = "run under plans again"


_KEYS = {
    Order.policy: ("policy",),
    Order.straggler: ("pipeline", "slowdown", "after_iterations"),
    Order.reduce: ("power_fraction", "duration"),
}


@dataclass(frozen=True, kw_only=True)
class Control:
    """Give a running job an order, or ask how it goes. Run it on the node of rank 0."""

    examples = (
        "perseus-ds control status perseus",
        "perseus-ds control status perseus json=true",
        "perseus-ds control policy perseus policy.name=slowdown policy.max_slowdown=0.05",
        "perseus-ds control straggler perseus pipeline=1 slowdown=1.2",
        "perseus-ds control reduce perseus power_fraction=0.75 duration=3h within=30s",
    )

    command: Order = argument("what is ordered", word=True)
    run: Path = argument("the job's output folder, output_dir of its perseus block", word=True)
    policy: dict[str, Any] = argument(
        "policy: the keys of the policy, such as policy.name=energy_optimal, or policy.name=power_cap "
        "policy.watts=5000; the others are on the page on policies",
        {},
    )
    pipeline: int | None = argument("straggler: which data-parallel pipeline", None, at_least=0)
    slowdown: float | None = argument(
        "straggler: how many times as long its iterations take; 1 when it has recovered", None, at_least=1
    )
    after_iterations: int = argument("straggler: number of iterations until then", 0, at_least=0)
    power_fraction: float | None = argument(
        "reduce: of the job's average power at default clocks, such as 0.75; above 0, at most 1", None, at_least=0
    )
    duration: str | None = argument("reduce: for how long, such as 90s, 30min, 3h or 1h30m", None)
    within: str | None = argument(
        "reduce: how soon it is needed, such as 30s; the answer says so if the job takes longer", None
    )
    json: bool = argument("status: print it as a JSON object", False)

    def execute(self) -> int:
        from perseus_ds.policy.control_socket import parse_order, send_order

        if self.command is Order.policy and not self.policy:
            raise ConfigError(
                "policy.name is missing: write policy.name=energy_optimal, or another policy with its keys "
                '(see "perseus-ds control --help").'
            )
        keys = _KEYS.get(self.command, ())
        require("control", vars(self), keys)
        order = {"command": self.command.name, **{key: getattr(self, key) for key in keys}}
        if self.command is Order.reduce:
            order["duration_s"] = read_amount("duration", order.pop("duration"), *_TIMES)
            order["within_s"] = None if self.within is None else read_amount("within", self.within, *_TIMES)
        parse_order(order)
        answer = send_order(self.run, order)
        if "status" in answer:
            _print_status(answer["status"], as_json=self.json)
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
        raise ConfigError("the job runs another version of Perseus; write json=true for its answer.") from None
    Console(file=terminal()).print(JobScreen(facts))
