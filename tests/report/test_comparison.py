"""Iterations that count as measured, and comparisons of runs with a chosen and named baseline."""

import pytest
from live_records import iteration, started, write
from pipelines import synthetic_profile

from perseus_ds.artifacts.profile import GpuSettings
from perseus_ds.artifacts.run_events import ClockNotReached, OrderPlanned
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.cli.main import main
from perseus_ds.errors import ConfigError
from perseus_ds.report.comparison import compare
from perseus_ds.report.facts import MeasuredPoint, measured_points
from perseus_ds.report.inputs import read, read_run
from perseus_ds.units import joules, plain


def start(mode, job="ours", **fields):
    return started(job, mode=mode, **fields)


def default(iterations, energy_j, phase="observe"):
    return [iteration(n, phase, 1.0, energy_j) for n in range(iterations)]


def write_run(folder, phase, time_s, energy_j, *, job="ours", plan=None, saved=0.0, iterations=6, events=(), **fields):
    ran = [iteration(n, phase, time_s, energy_j, plan=plan, saved=saved, **fields) for n in range(iterations)]
    write(folder, [start("run" if phase == "run" else "observe", job), *events, *ran])


@pytest.fixture
def runs(tmp_path):
    capped = ClockNotReached(rank=0, clock_mhz=None, reached_mhz=1200, reasons=["sw_power_cap"])
    write_run(tmp_path / "planned", "run", 1.01, 850.0, plan=4, saved=0.15, default_time_s=1.0)
    write_run(tmp_path / "capped", "observe", 1.1, 900.0, events=[capped])
    write_run(tmp_path / "default", "observe", 1.0, 1000.0)
    return tmp_path


def compared(folder, *names, baseline=None):
    return compare([read(folder / name) for name in names], baseline)


def test_without_plans_the_run_with_most_iterations_at_default_clocks_is_the_baseline(runs):
    write_run(runs / "default", "observe", 1.0, 1000.0, iterations=9)
    found = compared(runs, "capped", "default")
    assert (found.baseline.name, found.why) == ("default: default clocks", "the longest series at default clocks")
    (capped, _) = found.rows
    assert (plain(found.time(capped)), plain(found.energy(capped))) == ("+10.0 %", "-10.0 %")
    assert any(note.startswith("capped: ") and "power limit" in note for note in found.notes)


def test_what_default_clocks_take_for_the_iterations_under_plans_is_the_best_baseline(runs):
    found = compared(runs, "default", "planned")
    assert found.baseline.name == "planned: default clocks"
    assert found.why == "what default clocks take for the iterations under its plans"
    changes = {row.name: plain(found.energy(row)) for row in found.rows}
    assert changes["planned: plan 4"] == "-15.0 +/- 0.3 %"
    (row,) = (row for row in found.rows if row.saving is not None)
    assert (found.baseline.point.time_s, plain(found.time(row))) == (1.0, "+1.0 +/- 0.2 %")
    assert changes["default: default clocks"] == "0.0 %"
    assert "planned: the saving is certain." in found.notes


def test_a_run_with_undecided_plans_has_a_number_of_pairs_instead_of_per_cents(runs):
    ran = [iteration(n, "run", 1.0, 900.0, plan=4, saved=0.1, trial=TrialState(pairs=2)) for n in range(6)]
    write(runs / "undecided", [start("run"), *ran])
    found = compared(runs, "undecided", "default")
    (row,) = (row for row in found.rows if row.name == "undecided: plan 4")
    assert (found.time(row), found.energy(row)) == ("2 pairs", "2 pairs")
    assert "undecided: the saving is undecided after 2 pairs of blocks." in found.notes


def test_the_energy_of_a_sample_is_that_of_the_same_iterations(tmp_path):
    """Iterations at default clocks have 8 micro-batches of 2 samples, and those under plans have 4."""
    default = [iteration(n, "observe", 2.0, 160.0) for n in (1, 2)]
    planned = [iteration(n, "run", 1.0, 60.0, plan=4, order=1, default_energy_j=80.0) for n in (3, 4, 5)]
    schedules = [OrderPlanned(order=1, micro_batches=4)]
    write(tmp_path, [start("run", micro_batches=8, pipelines=1), *schedules, *default, *planned])
    found = read(tmp_path)
    found.profile = synthetic_profile(2, micro_batches=8, micro_batch_size=2)
    assert [row.energy_per_sample for row in compare([found]).rows] == [joules(80.0 / 8), joules(60.0 / 8)]


def test_runs_under_different_power_limits_name_them(runs):
    for name, limit_w in (("free", 400), ("limited", 300)):
        settings = GpuSettings(power_limit_w=limit_w)
        write(runs / name, [start("observe", settings=settings), *default(6, 900.0)])
    notes = " ".join(compared(runs, "free", "limited").notes)
    assert "free: GPUs with power limit 400 W" in notes
    assert "limited: GPUs with power limit 300 W" in notes


def test_the_baseline_can_be_chosen_by_its_run(runs):
    found = compared(runs, "planned", "capped", baseline="capped")
    assert (found.baseline.name, found.why) == ("capped: default clocks", "as requested")
    assert plain(found.energy(found.rows[1])).startswith("-5.6")
    with pytest.raises(
        ConfigError,
        match="--baseline nobody: expected one of planned: default clocks, planned: plan 4",
    ):
        compared(runs, "planned", "capped", baseline="nobody")


def test_another_job_is_compared_with_a_warning(runs):
    write_run(runs / "larger", "run", 2.0, 2000.0, plan=0, job="theirs")
    notes = compared(runs, "default", "larger").notes
    assert any(note.startswith("default: not the same job as larger") for note in notes)
    assert compared(runs, "default", "planned").notes == ("planned: the saving is certain.",)


def test_runs_of_the_same_name_are_distinguished_by_their_folders(tmp_path):
    for day in ("monday", "tuesday"):
        write_run(tmp_path / day / "perseus", "run", 1.0, 100.0, plan=0)
    found = compared(tmp_path, "monday/perseus", "tuesday/perseus")
    assert {row.run.name for row in found.rows} == {"monday/perseus", "tuesday/perseus"}


def test_a_run_without_energies_is_named(runs):
    write(runs / "blind", [start("observe", None), iteration(1, "observe", 1.0, None)])
    assert any(note.startswith("blind: no iterations") for note in compared(runs, "default", "blind").notes)
    with pytest.raises(ConfigError, match=r"Nothing to compare\. blind: no iterations"):
        compared(runs, "blind")


def test_the_command_prints_a_table_and_writes_the_page(runs, capsys):
    folders = [str(runs / name) for name in ("default", "planned", "capped")]
    assert main(["compare", *folders, "--out", f"{runs}"]) == 0
    lines = [plain(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].split()[:3] == ["default:", "default", "clocks"]
    assert "baseline" in lines[2]
    assert "-15.0 +/- 0.3 %" in lines[3]
    assert any(line.startswith("SIMULATED: capped, default, planned.") for line in lines)
    page = (runs / "comparison.html").read_text(encoding="utf-8")
    assert "planned: default clocks (baseline)" in page
    assert "Simulated GPUs: no energy was really used or saved" in page


def test_points_are_means_of_iterations_at_default_clocks_and_of_each_plan(tmp_path):
    default = {"default_time_s": 2.0, "default_energy_j": 200.0}
    observed = [iteration(n, "observe", t, 100 * t, **default) for n, t in enumerate((1.0, 2.0, 2.7, 9.0), start=1)]
    ran = [iteration(n, "run", 3.0, 300.0, plan=7) for n in (1, 2)]
    write(tmp_path, [start("observe"), *observed, start("run"), iteration(1, "calibrate", 50.0, 50.0), *ran])
    assert measured_points(read_run(tmp_path)) == [
        MeasuredPoint("default clocks", None, pytest.approx(1.9), pytest.approx(190.0), 3),  # without the stall
        MeasuredPoint("plan 7", 7, 3.0, 300.0, 2),
    ]


def test_points_of_plans_are_those_of_the_order_which_the_last_start_has_declared(tmp_path):
    """The frontier with which they are drawn is that of this order."""
    default = {"default_time_s": 4.0, "default_energy_j": 400.0}
    ran = [
        iteration(1, "run", 4.0, 400.0, plan=7, **default),
        iteration(2, "run", 3.0, 300.0, plan=7, order=1, **default),
    ]
    write(tmp_path, [start("run"), start("run", order=1), *ran])
    assert measured_points(read_run(tmp_path)) == [MeasuredPoint("plan 7", 7, 3.0, 300.0, 1)]
