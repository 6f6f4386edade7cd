"""Charts of pages and pictures: equal contents, and colours with enough contrast."""

from dataclasses import replace

import pytest
from live_records import iteration, started, write
from matplotlib.figure import Figure
from pipelines import synthetic_profile

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.report import figures
from perseus_ds.report.facts import MeasuredPoint, Trend
from perseus_ds.report.figures import (
    PALETTE,
    SERIES,
    frontier_figure,
    frontier_traces,
    profile_curves,
    stage_groups,
)
from perseus_ds.report.inputs import read_run
from perseus_ds.report.pictures import frontier_picture


def test_picture_and_page_show_the_same_points_under_the_same_names_in_the_same_colours(job, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    measured = [MeasuredPoint("plan 2", 2, 1.1, 700.0, 9)]
    frontier_picture(job.frontier, tmp_path / "frontier.png", in_use=job.frontier.plans[2], measured=measured)
    traces = frontier_traces(job.frontier, in_use=2, in_use_label="plan 2, in use", measured=measured)
    page = frontier_figure(job.frontier, traces, 2)["data"]
    lines = [line for line in drawn[0].axes[0].get_lines() if not line.get_label().startswith("_")]
    assert len(lines) == len(traces) == len(page) - 1  # the page also marks the plan that is shown
    for line, trace in zip(lines, page, strict=False):
        assert list(line.get_xdata()) == pytest.approx(trace["x"])
        assert list(line.get_ydata()) == pytest.approx(trace["y"])
        name = (trace.get("line") or trace["marker"])["color"].removeprefix("var(--").removesuffix(")")
        assert line.get_color() == PALETTE[name][0]
        if trace["name"] != "plan 2, in use":  # the picture names the plan by its purpose, the page by its number
            assert line.get_label() == trace["name"]


def test_stages_that_take_the_same_are_one_curve():
    ours = synthetic_profile(3).measurements
    copies = [replace(m, stage=m.stage + 3, time_s=m.time_s * (1.1 if m.stage == 1 else 1.0)) for m in ours]
    both = StageProfile([*ours, *copies])
    assert stage_groups(both) == [(0, 3), (1,), (2, 5), (4,)]
    curves = profile_curves(both)
    assert [curve.label for curve in curves[::2]] == ["stages 0, 3", "stage 1", "stages 2, 5", "stage 4"]
    assert len({(curve.colour, curve.kind) for curve in curves}) == len(curves) == 8


def test_the_history_has_energies_above_times_and_what_default_clocks_take(tmp_path):
    planned = iteration(2, "run", 1.5, 60.0, plan=3, default_time_s=1.2, default_energy_j=80.0)
    write(tmp_path, [started(), iteration(1, "observe", 2.0, 100.0), planned])
    drawn = figures.history_figure([read_run(tmp_path)])["data"]
    assert [(trace["name"], trace.get("yaxis", "y"), trace["y"]) for trace in drawn] == [
        ("observe", "y", [100.0]), ("observe", "y2", [2.0]),
        ("run", "y", [60.0]), ("run", "y2", [1.5]),
        ("default clocks, mean", "y", [80.0, 80.0]), ("default clocks, mean", "y2", [1.2, 1.2]),
    ]  # fmt: skip


def test_a_trend_is_in_per_cent_and_powers_are_in_watts():
    trend = Trend((1.0, 2.0), "hours", energy=(-0.1, -0.2), time=(0.01, 0.02), texts=("", ""))
    assert [trace["y"] for trace in figures.trend_figure(trend)["data"]] == [[-10.0, -20.0], [1.0, 2.0]]
    profile = synthetic_profile(1)
    (curve, *_) = profile_curves(profile)
    options = profile.options(0, curve.kind)
    assert curve.values(profile, "power") == pytest.approx(options.energy_j / options.time_s)


def test_a_difference_of_one_percent_looks_small():
    points = [figures.trace(name, [x], [100 * x], "blue", symbol="x") for name, x in (("a", 1.0), ("b", 1.01))]
    low, high = figures.points_figure(points)["layout"]["xaxis"]["range"]
    assert high - low == pytest.approx(0.101)
    assert low < 1.0
    assert high > 1.01


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
    colour = {name: pair[scheme == "dark"] for name, pair in PALETTE.items()}
    poor = {pair: contrast(*(colour[name] for name in pair)) for pair in TEXT}
    assert {pair: ratio for pair, ratio in poor.items() if ratio < 4.5} == {}
    lines = {name: contrast(colour[name], colour["surface"]) for name in (*SERIES, "fixed")}
    assert {name: ratio for name, ratio in lines.items() if ratio < (2.5 if name == "fixed" else 3)} == {}
