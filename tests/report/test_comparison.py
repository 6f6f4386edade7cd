"""Iterations that count as measured, and comparisons of runs with a chosen and named baseline."""

import pytest
from run_folders import record, write_log

from perseus_ds.cli.main import main
from perseus_ds.errors import ConfigError
from perseus_ds.report.comparison import compare
from perseus_ds.report.jobs import MeasuredPoint, measured_points
from perseus_ds.report.sources import find_sources, read_history
from perseus_ds.units import plain


def start(mode, job="ours"):
    return {"event": "start", "mode": mode, "job": job}


def default(iterations, energy_j, phase="observe"):
    return [record(n, phase, 1.0, energy_j) for n in range(iterations)]


def write_run(folder, phase, time_s, energy_j, *, job="ours", plan=None, saved=None, iterations=6, events=()):
    ran = [record(n, phase, time_s, energy_j, plan=plan, saved=saved) for n in range(iterations)]
    write_log(folder, [start("run" if phase == "run" else "observe", job), *events, *ran])


@pytest.fixture
def runs(tmp_path):
    capped = {"event": "refused", "rank": 0, "clock_mhz": None, "reached_mhz": 1200, "reasons": ["sw_power_cap"]}
    write_run(tmp_path / "planned", "run", 1.01, 850.0, plan=4)
    write_run(tmp_path / "capped", "observe", 1.1, 900.0, events=[capped])
    write_run(tmp_path / "default", "observe", 1.0, 1000.0)
    return tmp_path


def compared(folder, *names, baseline=None):
    return compare([find_sources(folder / name) for name in names], baseline)


def test_the_run_with_most_iterations_at_default_clocks_is_the_baseline(runs):
    write_run(runs / "default", "observe", 1.0, 1000.0, iterations=9)
    found = compared(runs, "planned", "capped", "default")
    assert (found.baseline.name, found.why) == ("default: default clocks", "the longest series at default clocks")
    changes = {row.name: (found.time(row), found.energy(row)) for row in found.rows}
    assert changes["planned: plan 4"] == pytest.approx((0.01, -0.15))
    assert changes["capped: default clocks"] == pytest.approx((0.1, -0.1))
    assert any(note.startswith("capped: ") and "power limit" in note for note in found.notes)


def test_runs_under_different_power_limits_name_them(runs):
    for name, limit_w in (("free", 400), ("limited", 300)):
        write_log(runs / name, [start("observe") | {"settings": {"power_limit_w": limit_w}}, *default(6, 900.0)])
    notes = " ".join(compared(runs, "free", "limited").notes)
    assert "free: GPUs with power limit 400 W" in notes
    assert "limited: GPUs with power limit 300 W" in notes


def test_iterations_with_which_a_job_compared_its_plans_are_the_best_baseline(runs):
    plan = [record(n, "run", 1.0, 900.0, plan=4, saved=0.2) for n in range(20, 30)]
    judged = {"event": "proof", "plan": 4, "kept": True}
    write_log(runs / "auto", [start("auto"), *default(6, 950.0, "default"), *plan, judged])
    found = compared(runs, "default", "auto")
    assert (found.baseline.name, found.why) == ("auto: default clocks", "with which its job compared its plans")


def test_a_run_without_enough_iterations_at_default_clocks_is_compared_with_the_profile(runs):
    write_run(runs / "alone", "run", 1.0, 900.0, plan=4, saved=0.2)
    found = compared(runs, "alone")
    assert found.baseline.name == "alone: default clocks, by the profile"
    assert found.energy(found.rows[0]) == pytest.approx(-0.2)


def test_the_baseline_can_be_chosen_by_its_run(runs):
    found = compared(runs, "planned", "capped", baseline="capped")
    assert (found.baseline.name, found.why) == ("capped: default clocks", "as requested")
    assert found.energy(found.rows[0]) == pytest.approx(850 / 900 - 1)
    with pytest.raises(ConfigError, match="--baseline nobody: expected one of planned: plan 4, capped: default"):
        compared(runs, "planned", "capped", baseline="nobody")


def test_another_job_is_compared_with_a_warning(runs):
    write_run(runs / "larger", "run", 2.0, 2000.0, plan=0, job="theirs")
    notes = compared(runs, "default", "larger").notes
    assert any(note.startswith("larger: not the same job as default") for note in notes)
    assert compared(runs, "default", "planned").notes == ()


def test_runs_of_the_same_name_are_distinguished_by_their_folders(tmp_path):
    for day in ("monday", "tuesday"):
        write_run(tmp_path / day / "perseus", "run", 1.0, 100.0, plan=0)
    found = compared(tmp_path, "monday/perseus", "tuesday/perseus")
    assert [row.history.name for row in found.rows] == ["monday/perseus", "tuesday/perseus"]
    assert found.why == "the first one; none is at default clocks"


def test_a_run_without_energies_is_named(runs):
    write_log(runs / "blind", [{"event": "start", "mode": "observe"}, record(1, "observe", 1.0, None)])
    assert any(note.startswith("blind: no iterations") for note in compared(runs, "default", "blind").notes)
    with pytest.raises(ConfigError, match=r"Nothing to compare\. blind: no iterations"):
        compared(runs, "blind")


def test_the_command_prints_a_table_and_writes_the_page(runs, capsys):
    folders = [str(runs / name) for name in ("default", "planned", "capped")]
    assert main(["compare", *folders, "--out", f"{runs}"]) == 0
    lines = [plain(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].split()[:3] == ["default:", "default", "clocks"]
    assert "baseline" in lines[1]
    assert "+1.0 %" in lines[2]
    assert "-15.0 %" in lines[2]
    assert any(line.startswith("SIMULATED: capped, default, planned.") for line in lines)
    page = (runs / "comparison.html").read_text(encoding="utf-8")
    assert "default: default clocks (baseline)" in page
    assert "Simulated GPUs: no energy was really used or saved" in page


def test_points_are_typical_iterations_at_default_clocks_and_of_each_plan(tmp_path):
    observed = [record(n, "observe", t, 100 * t) for n, t in enumerate((99.0, 1.0, 2.0, 2.5, 9.0), start=1)]
    ran = [record(n, "run", 3.0, 300.0, plan=7) for n in (1, 2)]
    write_log(tmp_path, [start("observe"), *observed, start("run"), record(1, "calibrate", 50.0, 50.0), *ran])
    assert measured_points(read_history(tmp_path)) == [
        MeasuredPoint("default clocks", None, 2.0, 200.0, 4),  # one with a stall
        MeasuredPoint("plan 7", 7, 3.0, 300.0, 1),
    ]
