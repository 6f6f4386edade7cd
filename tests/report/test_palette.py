"""Colours can be told from their background, in light and dark."""

import pytest

from perseus_ds.report.palette import PALETTE, SERIES, css

TEXT = [("ink", "ground"), ("ink", "surface"), ("soft", "ground"), ("soft", "surface"), ("blue", "ground")]
TEXT += [("warning", "warning-ground"), ("ink", "busy"), ("ink", "idle"), ("soft", "waiting")]


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_lines_are_visible_by_wcag(scheme):
    colour = {name: getattr(value, scheme) for name, value in PALETTE.items()}
    poor = {pair: contrast(*(colour[name] for name in pair)) for pair in TEXT}
    assert {pair: ratio for pair, ratio in poor.items() if ratio < 4.5} == {}
    lines = {name: contrast(colour[name], colour["surface"]) for name in (*SERIES, "fixed")}
    assert {name: ratio for name, ratio in lines.items() if ratio < (2.5 if name == "fixed" else 3)} == {}


def test_paper_is_light_whatever_the_reader_prefers():
    light, dark = css().split("\n")[:2]
    assert f"--ink:{PALETTE['ink'].light};" in light
    assert dark.startswith("@media screen and (prefers-color-scheme:dark)")
    assert f"--ink:{PALETTE['ink'].dark};" in dark
