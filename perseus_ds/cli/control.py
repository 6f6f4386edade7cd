"""``perseus-ds control``: orders to a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from perseus_ds.cli.arguments import Arguments, compose
from perseus_ds.errors import ConfigError
from perseus_ds.policy.control_socket import parse_order, send_order

_KEYS = {"policy": ("policy",), "straggler": ("pipeline", "slowdown", "after_iterations")}


class ControlArguments(Arguments):
    """Arguments of the command; ``configs/cli/control.yaml`` explains them."""

    command: Literal["status", "policy", "straggler", "pause", "resume"]
    run: Path
    policy: dict[str, Any] | None
    pipeline: int | None
    slowdown: float | None
    after_iterations: int


def run(overrides: list[str]) -> int:
    """Send one order and print the answer."""
    words = [f"command={overrides[0]}", *overrides[1:]] if overrides and "=" not in overrides[0] else overrides
    arguments = compose("control", words, ControlArguments)
    order: dict[str, Any] = {"command": arguments.command}
    for key in _KEYS.get(arguments.command, ()):
        value = getattr(arguments, key)
        if value is None:
            raise ConfigError(f"{key} is missing: {arguments.command} needs {', '.join(_KEYS[arguments.command])}.")
        order[key] = value
    parse_order(order)
    answer = send_order(arguments.run, order)
    for key, value in answer.get("status", {}).items():
        print(f"{key:22} {value}")
    if "done" in answer:
        print(answer["done"])
    return 0
