"""Charts of pages and pictures show the same, computed once."""

import pytest
from matplotlib.figure import Figure
from pipelines import synthetic_profile
from run_folders import make_job

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.report.figures import frontier_figure
from perseus_ds.report.jobs import MeasuredPoint
from perseus_ds.report.palette import PALETTE
from perseus_ds.report.pictures import frontier_picture
from perseus_ds.report.series import frontier_series, profile_curves, stage_groups, stages_in_words


@pytest.fixture(scope="module")
def job():
    return make_job()


def test_picture_and_page_show_the_same_points_under_the_same_names_in_the_same_colours(job, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    measured = [MeasuredPoint("plan 2", 2, 1.1, 700.0, 9)]
    frontier_picture(job.frontier, tmp_path / "frontier.png", in_use=job.frontier.plans[2], measured=measured)
    series = frontier_series(job.frontier, in_use=2, in_use_label="plan 2, in use", measured=measured)
    page = frontier_figure(job.frontier, series, 2)["data"]
    lines = [line for line in drawn[0].axes[0].get_lines() if not line.get_label().startswith("_")]
    assert len(lines) == len(series) == len(page) - 1  # the page also marks the plan that is shown
    for line, trace in zip(lines, page, strict=False):
        assert list(line.get_xdata()) == pytest.approx(trace["x"])
        assert list(line.get_ydata()) == pytest.approx(trace["y"])
        name = (trace.get("line") or trace["marker"])["color"].removeprefix("var(--").removesuffix(")")
        assert line.get_color() == PALETTE[name].light
    names = [line.get_label() for line in lines]
    assert [name for name in names if "in use" not in name] == [
        trace["name"] for trace in page[:-1] if "in use" not in trace["name"]
    ]


def test_stages_that_take_the_same_are_one_curve():
    profile = synthetic_profile(3)
    copies = [Measurement(m.stage + 3, m.kind, m.clock_mhz, m.time_s, m.energy_j) for m in profile.measurements]
    slower = [m for m in copies if m.stage == 4]
    others = [m for m in copies if m.stage != 4]
    slower = [Measurement(m.stage, m.kind, m.clock_mhz, 1.1 * m.time_s, m.energy_j) for m in slower]
    both = StageProfile([*profile.measurements, *others, *slower])
    assert stage_groups(both) == [(0, 3), (1,), (2, 5), (4,)]
    curves = profile_curves(both)
    assert [curve.label for curve in curves[::2]] == ["stages 0, 3", "stage 1", "stages 2, 5", "stage 4"]
    assert len({(curve.colour, curve.kind) for curve in curves}) == len(curves) == 8


def test_stages_are_named_in_ranges():
    assert stages_in_words([0]) == "stage 0"
    assert stages_in_words([0, 1, 2, 5, 7, 8]) == "stages 0\N{EN DASH}2, 5, 7\N{EN DASH}8"
