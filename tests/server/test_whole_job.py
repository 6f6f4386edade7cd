"""The saving of the whole job, as reported by the job and as recomputed by the documentation's code."""

import re
from pathlib import Path

import pytest
from live_records import auto_job, default_iteration, planned_iteration
from virtual.job import SLOWER

from perseus_ds.artifacts.run_records import Ended, IterationRecord
from perseus_ds.measures import WholeJob

PAGE = Path(__file__).parents[2] / "docs" / "reading-the-report.md"


def recomputed(folder, monkeypatch):
    """Run the code of the page in the output folder of a job, and return its variables and output."""
    section = PAGE.read_text(encoding="utf-8").split("## The saving of the whole job")[1]
    lines = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert len([line for line in lines.splitlines() if line]) <= 12
    printed = []
    found = {"print": printed.append}
    with monkeypatch.context() as context:
        context.chdir(folder)
        exec(compile(lines, PAGE, "exec"), found)
    return found, printed


def test_the_last_line_states_what_the_lines_of_the_page_compute(start, monkeypatch, capsys, tmp_path):
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(40)
    job.close()
    found, printed = recomputed(tmp_path, monkeypatch)
    (ended,) = job.events(Ended)
    whole = ended.whole
    assert (whole.saved_j, whole.gained_s) == pytest.approx((found["saved_j"], found["gained_s"]), abs=1e-3)
    assert whole.steps == len(found["steps"])
    assert whole.saved > 0.01, "there must be a saving to report"
    lines = [line for line in capsys.readouterr().out.splitlines() if "iterations," in line and "clock changes" in line]
    stated = re.search(rf"all {whole.steps} steps, profiling and comparisons included: .* a step", lines[-1])[0]
    assert f"less energy (-{100 * whole.saved:.1f} %)" in stated
    assert f"{whole.saved:.2%} less" in printed[0]


def summed(records):
    job = WholeJob()
    for record in records:
        if isinstance(record, IterationRecord):
            job.add(record)
    return job.saving


def test_profiling_counts_and_iterations_at_default_clocks_save_nothing():
    whole = summed(auto_job())
    assert whole.steps == 26
    assert whole.saved_j == pytest.approx(20 * 20 - 2 * 10)
    assert whole.gained_s == pytest.approx(-20 * 0.02 - 2 * 0.1)
    assert whole.saved == pytest.approx(380 / (4 * 100 + 2 * 110 + 20 * 80 + 380))


def test_an_iteration_with_a_stall_is_counted_and_not_compared():
    before, after = auto_job(), planned_iteration(27, time_s=61.0, energy_j=900.0)
    whole = summed([*before, after])
    assert (whole.steps, whole.stalls) == (27, 1)
    assert whole.saved_j == pytest.approx(summed(before).saved_j)
    assert "(without 1 with stalls)" in whole.in_words()


def test_iterations_before_the_first_measurement_are_compared_with_it():
    by_profile = [
        planned_iteration(n, default_measured=False, default_time_s=1.5, default_energy_j=120.0) for n in (2, 3)
    ]
    before = [default_iteration(1, "profile"), *by_profile]
    predicted = summed(before)
    assert predicted.saved_j == pytest.approx(20.0 + 2 * 40.0)
    whole = summed([*before, planned_iteration(4)])
    assert whole.saved_j == pytest.approx(3 * 20.0)
    assert whole.gained_s == pytest.approx(3 * -0.02)


def test_before_a_plan_has_run_there_is_no_saving_to_state():
    assert summed([default_iteration(1), default_iteration(2, "profile")]) is None


def test_each_kind_of_iterations_is_compared_with_its_own_default_clocks():
    other = {"order": 1, "time_s": 0.5, "energy_j": 40.0}
    profiled = default_iteration(27, "profile", **other)
    planned = planned_iteration(28, **other, default_time_s=0.45, default_energy_j=50.0)
    whole, before = summed([*auto_job(), profiled, planned]), summed(auto_job())
    assert whole.saved_j - before.saved_j == pytest.approx(2 * 10)
    assert whole.gained_s - before.gained_s == pytest.approx(2 * -0.05)
