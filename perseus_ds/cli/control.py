"""``perseus-ds control``: orders to a running job."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from perseus_ds.cli.arguments import argument, require
from perseus_ds.errors import ConfigError


class Command(Enum):
    """What is ordered."""

    status = "print how the job goes"
    policy = "run under another policy, policy="
    straggler = "one pipeline takes longer, pipeline= and slowdown="
    reduce = "draw less power for a while, power_fraction= and duration="
    pause = "run at default clocks"
    resume = "run under plans again"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Give a running job an order, or ask how it goes. Run it on the node of rank 0."""

    examples = (
        "perseus-ds control status perseus",
        "perseus-ds control status perseus json=true",
        "perseus-ds control policy perseus policy.name=slowdown policy.max_slowdown=0.05",
        "perseus-ds control straggler perseus pipeline=1 slowdown=1.2",
        "perseus-ds control reduce perseus power_fraction=0.75 duration=3h within=30s",
    )

    command: Command = argument("what is ordered", word=True)
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


_KEYS = {
    Command.policy: ("policy",),
    Command.straggler: ("pipeline", "slowdown", "after_iterations"),
    Command.reduce: ("power_fraction", "duration"),
}
_UNITS_S = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}


def run(arguments: Arguments) -> int:
    """Send one order and print the answer."""
    from perseus_ds.policy.control_socket import parse_order, send_order

    if arguments.command is Command.policy and not arguments.policy:
        raise ConfigError(
            "policy.name is missing: write policy.name=energy_optimal, or another policy with its keys "
            '(see "perseus-ds control --help").'
        )
    keys = _KEYS.get(arguments.command, ())
    require("control", arguments, *keys)
    order = {"command": arguments.command.name, **{key: getattr(arguments, key) for key in keys}}
    if arguments.command is Command.reduce:
        order["duration_s"] = _seconds("duration", order.pop("duration"))
        order["within_s"] = None if arguments.within is None else _seconds("within", arguments.within)
    parse_order(order)
    answer = send_order(arguments.run, order)
    if "status" in answer:
        _print_status(answer["status"], as_json=arguments.json)
    if "done" in answer:
        print(answer["done"])
    return 0


def _seconds(name: str, text: str) -> float:
    """Return a time that is written with its unit, or as several such parts, like ``1h30m`` [s].

    Raises:
        ConfigError: It is none.
    """
    part = r"(\d{1,9}(?:\.\d{1,9})?)(h|min|m|s)"
    if re.fullmatch(f"(?:{part})+", text) is None:
        raise ConfigError(f"{name}={text}: expected a time such as 90s, 30min, 3h or 1h30m.")
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(part, text))


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
