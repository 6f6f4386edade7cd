"""Colours, lines and symbols of all pictures and pages, in one place.

Hues are Okabe and Ito's, which colour-blind people can tell apart, darkened or lightened until they stand out from the
background: at least 3 : 1 for lines and symbols, 4.5 : 1 for text.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_ds.pipeline.instruction import Kind


@dataclass(frozen=True)
class Colour:
    """One colour, as hexadecimal RGB, on light and on dark background."""

    light: str
    dark: str


PALETTE = {
    "ink": Colour("#1b2430", "#e6eaf0"),
    "soft": Colour("#5f6b7a", "#a3afbd"),
    "line": Colour("#d5dae1", "#3a4350"),
    "ground": Colour("#f6f7f9", "#0f1318"),
    "surface": Colour("#ffffff", "#181d24"),
    "grid": Colour("#e6e9ed", "#2b323c"),
    "blue": Colour("#0072b2", "#56b4e9"),
    "orange": Colour("#d55e00", "#f08a3c"),
    "green": Colour("#00875f", "#2fc59b"),
    "purple": Colour("#b85c93", "#e39cc3"),
    "amber": Colour("#a87400", "#e6b93c"),
    "waiting": Colour("#f1f3f6", "#222933"),
    "hatch": Colour("#c6ccd5", "#414b59"),
    "fixed": Colour("#8a94a1", "#6f7b8b"),
    "busy": Colour("#cfe5f2", "#173f58"),
    "idle": Colour("#f8dcc4", "#5a3413"),
    "warning": Colour("#7a3d00", "#ffc78a"),
    "warning-ground": Colour("#fff1e0", "#3a2610"),
}
# Distinct lines of one chart, in this order.
SERIES = ("blue", "orange", "green", "purple", "amber", "soft", "ink")
# Viridis, for clocks and powers: equal steps look equal, and still do in grey.
SCALE = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# By plotly's names.
DASHES = {
    Kind.FORWARD: "solid",
    Kind.BACKWARD: "dash",
    Kind.BACKWARD_INPUT: "longdash",
    Kind.BACKWARD_WEIGHT: "longdashdot",
    Kind.RECOMPUTE: "dashdot",
    Kind.FORWARD_BACKWARD: "10px 2px",
    Kind.TAIL: "dot",
}
SYMBOLS = {
    Kind.FORWARD: "circle",
    Kind.BACKWARD: "square",
    Kind.BACKWARD_INPUT: "diamond",
    Kind.BACKWARD_WEIGHT: "x",
    Kind.RECOMPUTE: "triangle-down",
    Kind.FORWARD_BACKWARD: "hexagon",
    Kind.TAIL: "triangle-up",
}
MEASURED_SYMBOLS = ("diamond", "x", "triangle-up", "pentagon", "cross")


def light(name: str) -> str:
    """Return a colour for pictures, which are on white."""
    return PALETTE[name].light


def variable(name: str) -> str:
    """Return a colour for pages, which follows light and dark."""
    assert name in PALETTE, name
    return f"var(--{name})"


def css() -> str:
    """Return the CSS variables of all colours: light, and dark where the reader prefers that and does not print."""
    lights = "".join(f"--{name}:{colour.light};" for name, colour in PALETTE.items())
    darks = "".join(f"--{name}:{colour.dark};" for name, colour in PALETTE.items())
    return (
        f":root{{color-scheme:light;{lights}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{darks}}}}}\n"
    )
