"""``perseus-ds profile``: show, compare, validate, merge and convert profiles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from perseus_ds.cli.arguments import argument, require
from perseus_ds.errors import ConfigError


class Action(Enum):
    """What to do with the profile."""

    show = "a table, and a picture with out="
    compare = "the differences of another profile, other="
    validate = "whether plans can be computed from it"
    merge = "the rows of several profiles as one, other= and out="
    convert = "the CSV of Merak or another program as our files, out="


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show, compare, validate, merge or convert a profile.

    This command measures nothing. A training job measures a profile: write "mode": "profile" in the perseus
    block of its DeepSpeed config.
    """

    examples: ClassVar = (
        "perseus-ds profile show perseus out=profile.png",
        "perseus-ds profile merge monday other=[tuesday,wednesday] out=merged",
    )

    action: Action = argument("what to do", word=True)
    profile: Path = argument("profile.csv, or the folder it is in", word=True)
    other: list[Path] = argument("compare: the other profile; merge: the other profiles", [])
    out: Path | None = argument(
        "show: the picture to write; merge, convert: folder for profile.csv and profile.json", None
    )
    blocking_power_w: float | None = argument(
        "power of a GPU that waits for its neighbour [W]; by default what profile.json says", None, at_least=0
    )


def run(arguments: Arguments) -> int:
    """Do what the action says."""
    from perseus_ds.artifacts.profile import StageProfile
    from perseus_ds.cli import profile_actions

    needed = {Action.compare: ("other",), Action.merge: ("other", "out"), Action.convert: ("out",)}
    require("profile", arguments, *needed.get(arguments.action, ()))
    path, out = arguments.profile, arguments.out or Path()
    profile = StageProfile.load(path)
    power_w = profile.info.blocking_power_w if arguments.blocking_power_w is None else arguments.blocking_power_w
    match arguments.action:
        case Action.show:
            profile_actions.show(profile, power_w, arguments.out)
        case Action.compare:
            if len(arguments.other) > 1:
                raise ConfigError(f"other: compare takes one other profile, got {len(arguments.other)}.")
            profile_actions.compare(path, arguments.other[0])
        case Action.validate:
            profile_actions.validate(path, profile, power_w)
        case Action.merge:
            profile_actions.merge([path, *arguments.other], out)
        case Action.convert:
            profile_actions.convert(profile, power_w, out)
    return 0
