"""``perseus-ds control``: orders to a running job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from perseus_ds.cli.arguments import argument, require


class Command(Enum):
    """What the job is told."""

    status = "print how the job goes"
    policy = "run under another policy, policy="
    straggler = "one pipeline takes longer, pipeline= and slowdown="
    pause = "run at default clocks"
    resume = "run under plans again"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tell a running job what to do, or ask how it goes. Run it on the node of rank 0."""

    examples: ClassVar[tuple[str, ...]] = (
        "perseus-ds control status perseus",
        "perseus-ds control status perseus json=true",
        "perseus-ds control policy perseus policy.name=slowdown policy.max_slowdown=0.05",
        "perseus-ds control straggler perseus pipeline=1 slowdown=1.2",
    )

    command: Command = argument("what the job is told", word=True)
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
    json: bool = argument("status: print it as a JSON object", False)


_KEYS = {Command.policy: ("policy",), Command.straggler: ("pipeline", "slowdown", "after_iterations")}


def run(arguments: Arguments) -> int:
    """Send one order and print the answer."""
    from perseus_ds.policy.control_socket import parse_order, send_order

    keys = _KEYS.get(arguments.command, ())
    require("control", arguments, *keys)
    order = {"command": arguments.command.name, **{key: getattr(arguments, key) for key in keys}}
    parse_order(order)
    answer = send_order(arguments.run, order)
    if "status" in answer:
        _print_status(answer["status"], as_json=arguments.json)
    if "done" in answer:
        print(answer["done"])
    return 0


def _print_status(status: dict[str, Any], *, as_json: bool) -> None:
    import json

    from pydantic import ValidationError
    from rich.console import Console

    from perseus_ds.cli.output import terminal
    from perseus_ds.errors import ConfigError
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
