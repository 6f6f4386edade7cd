"""``perseus-ds control``: orders to a running job."""

from __future__ import annotations

from collections.abc import Iterator
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

    examples: ClassVar = (
        "perseus-ds control status perseus",
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


_KEYS = {Command.policy: ("policy",), Command.straggler: ("pipeline", "slowdown", "after_iterations")}


def run(arguments: Arguments) -> int:
    """Send one order and print the answer."""
    from perseus_ds.policy.control_socket import parse_order, send_order

    keys = _KEYS.get(arguments.command, ())
    require("control", arguments, *keys)
    order = {"command": arguments.command.name, **{key: getattr(arguments, key) for key in keys}}
    parse_order(order)
    answer = send_order(arguments.run, order)
    for line in _lines(answer.get("status", {})):
        print(line)
    if "done" in answer:
        print(answer["done"])
    return 0


def _lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each fact; those about the last and the next iteration below a heading."""
    for key, value in status.items():
        if not isinstance(value, dict):
            yield f"{key:22} {value}"
    for key, facts in status.items():
        if isinstance(facts, dict) and facts:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(facts))
