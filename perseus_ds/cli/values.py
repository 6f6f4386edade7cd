"""Types of values on the command line: numbers with limits, lists, times, and shared arguments."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

# Products of larger numbers could overflow.
_LARGEST = 1e18
_SECONDS = {"h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0}

NONE = "none"
"""The argument for a value of None."""
OPTIONAL = tyro.conf.arg(help_behavior_hint="(optional)")
"""For arguments with a description of their default."""


def flag_of(key: str) -> str:
    """Return the flag of the setting or argument with this Python name."""
    return f"--{key.replace('_', '-')}"


def limited(kind: type[float], at_least: float | None = None) -> PrimitiveConstructorSpec[Any]:
    """Return the parser of a number within limits."""
    return _spec(kind.__name__.upper(), lambda words: _number(kind, at_least, words[0]))


def _number(kind: type[float], at_least: float | None, word: str) -> float:
    try:
        value = kind(word)
        if (-_LARGEST if at_least is None else at_least) <= value <= _LARGEST:
            return value
    except ValueError:
        pass
    limit = "" if at_least is None else f", at least {at_least:g}"
    raise ValueError(f"expected a {'whole ' * (kind is int)}number{limit}, got {reprlib.repr(word)}.")


def _time(words: list[str]) -> str:
    """Return a time of a calendar, which may be given by how much later than now it is."""
    part = rf"(\d{{1,6}}(?:\.\d{{1,9}})?) ?({'|'.join(_SECONDS)})"
    if re.fullmatch(f"(?:{part})+", words[0]) is None:
        if re.match(r"\d{4}-\d{2}-\d{2}", words[0]) is None:
            found = reprlib.repr(words[0])
            raise ValueError(f"expected a time such as 2030-01-31T08:00:00+00:00, or 3h for 3 h from now, got {found}.")
        return words[0]
    later_s = sum(float(count) * _SECONDS[unit] for count, unit in re.findall(part, words[0]))
    return (datetime.now(timezone.utc) + timedelta(seconds=later_s)).isoformat(timespec="seconds")


def _number_or_none(words: list[str]) -> float | str:
    return NONE if words[0].lower() in (NONE, "null") else _number(float, None, words[0])


def _several(metavar: str, read: Callable[[str], Any]) -> PrimitiveConstructorSpec[Any]:
    def read_all(words: list[str]) -> list[Any]:
        if not words:
            raise ValueError("expected at least one value, got none.")
        return [read(word) for word in words]

    return _spec(f"{metavar} [{metavar} ...]", read_all, nargs="*")


def _spec(metavar: str, read: Callable[[list[str]], Any], nargs: Any = 1) -> PrimitiveConstructorSpec[Any]:
    def written(value: Any) -> list[str]:
        values = value if isinstance(value, list) else [value]
        return [f"{each:g}" if isinstance(each, float) else str(each) for each in values]

    return PrimitiveConstructorSpec(
        nargs=nargs, metavar=metavar, instance_from_str=read, is_instance=lambda _: True, str_from_instance=written
    )


Count = Annotated[int, limited(int, at_least=1)]
OptionalCount = Annotated[int | None, limited(int, at_least=1), OPTIONAL]
Counts = Annotated[list[int], _several("INT", lambda word: _number(int, 1, word)), OPTIONAL]
OptionalIndex = Annotated[int | None, limited(int, at_least=0), OPTIONAL]
Amount = Annotated[float, limited(float, at_least=0)]
OptionalAmount = Annotated[float | None, limited(float, at_least=0), OPTIONAL]
Number = Annotated[float | None, limited(float), OPTIONAL]
NumberOrNone = Annotated[float | str | None, _spec("FLOAT|none", _number_or_none), OPTIONAL]
OptionalTime = Annotated[str | None, _spec("TIME", _time), OPTIONAL]
Text = Annotated[str | None, OPTIONAL]
OptionalPath = Annotated[Path | None, OPTIONAL]
Texts = Annotated[list[str], _several("NAME", str)]
Paths = Annotated[list[Path], _several("PATH", Path), OPTIONAL]

ProfilePath = Annotated[
    Path, tyro.conf.arg(help="profile.csv or its folder; profile.json is read from the same folder")
]
BlockingPower = Annotated[
    float | None,
    limited(float, at_least=0),
    tyro.conf.arg(
        help="power of a GPU that waits for another rank [W]; by default the value in profile.json",
        help_behavior_hint="(optional)",
    ),
]
ScheduleName = Annotated[
    str | None,
    tyro.conf.arg(
        help="1f1b, dualpipev or package.module:Class, which is imported; by default the schedule in profile.json, "
        "otherwise 1f1b",
        help_behavior_hint="(optional)",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Arguments that select a run and its files."""

    run: tyro.conf.Positional[Path]
    """output_dir of a training run, or a folder of several runs with their profile and frontier"""
    out: OptionalPath = None
    """file to write, or an existing folder for it; by default in the folder of the run"""
    frontier: OptionalPath = None
    """frontier.json or its folder; by default in the folder of the run, or at the path that the run names"""
    profile: OptionalPath = None
    """profile.csv or its folder; by default in the folder of the run, or at the path that the frontier names"""
    runs: Paths = field(default_factory=list)
    """output folders of training runs, instead of those in the folder of the run"""
