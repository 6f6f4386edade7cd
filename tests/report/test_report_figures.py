"""Figures of the report: savings by plan, sample, rank, cost and time."""

import itertools
import json
import re
import tracemalloc

import pytest
from live_records import iteration, started, write
from pipelines import synthetic_profile
from run_folders import write_auto_run

from perseus_ds import units
from perseus_ds.artifacts.run_events import OrderPlanned
from perseus_ds.cli.main import main
from perseus_ds.report.facts import Factors, facts, trend_of
from perseus_ds.report.inputs import read, read_run
from perseus_ds.units import plain

FACTORS = Factors(carbon_g_per_kwh=400, price_per_kwh=0.25, currency="EUR", pue=1.5, tokens_per_sample=1000)
START = started("ours", time=1000.0)


def tile_of(found, title):
    return next(tile for tile in facts(found, FACTORS).tiles if tile.title == title)


def three_plans(folder, job):
    """Write a job at default clocks and then under three plans with different savings."""
    job.profile.save(folder / "profile.csv")
    job.frontier.save(folder)
    default = [iteration(n, "optimizing", 1.0, 100.0) for n in range(1, 6)]
    ran = [(0, 1.0, 90.0)] * 2 + [(3, 1.1, 80.0)] * 4 + [(5, 1.2, 70.0)] * 3
    known = {"default_time_s": 1.0, "default_energy_j": 100.0}
    planned = [
        iteration(6 + n, "run", time_s, energy_j, plan=plan, predicted_time_s=time_s, **known)
        for n, (plan, time_s, energy_j) in enumerate(ran)
    ]
    write(folder, [START, *default, *planned])
    return facts(read(folder), FACTORS)


def test_figures_are_per_plan_or_say_that_they_are_of_all(tmp_path, job):
    report = three_plans(tmp_path, job)
    ran = report.main
    saved = {row.what: row.saved for row in ran.rows}
    assert saved["under plan 0"] == units.joules(2 * 10)
    assert saved["under plan 3"] == units.joules(4 * 20)
    assert saved["under all 3 plans"] == units.joules(2 * 10 + 4 * 20 + 3 * 30)
    assert plain(ran.rows[3].energy) == "-21.1 +/- 0.3 %"
    assert [row.what for row in ran.rows] == [
        "under plan 0", "under plan 3", "under plan 5", "under all 3 plans", "in all, profiling counted",
        "under all 3 plans, at that rate",
    ]  # fmt: skip
    shown = {tile.title: tile for tile in report.tiles}
    assert "Energy under all 3 plans" in shown
    assert "Iteration time under all 3 plans" in shown
    plan = shown["Plan in use"]
    assert plan.value.startswith("5 of ")
    assert plan.note.startswith(f"its 3 iterations alone: {units.joules(90)} saved")


def test_power_over_a_second_is_that_of_the_iterations_under_plans(tmp_path):
    records = [START, *(iteration(n, "observe", 2.0, 400.0) for n in (1, 2)), iteration(3, "observe", 2.0, 600.0)]
    write(tmp_path, records)
    tile = tile_of(read(tmp_path), "Power over a second")
    assert tile.value == "200.0 to 300.0 W"
    assert "100.0 W at most from one to the next" in tile.note
    assert "2.000 s" in tile.note


def test_powers_that_are_compared_have_one_unit(tmp_path):
    write(tmp_path, [START, *(iteration(n, "observe", 2.0, energy_j) for n, energy_j in ((1, 1722.0), (2, 2510.0)))])
    tile = tile_of(read(tmp_path), "Power over a second")
    assert tile.value == "0.861 to 1.255 kW"
    assert tile.note.startswith("1.058 kW on average, 0.394 kW at most from one to the next")


def test_the_bill_counts_every_iteration_and_the_data_centre(tmp_path):
    records = [START, *(iteration(n, "observe", 2.0, 100.0) for n in (1, 2)), iteration(3, "observe", 2.0, None)]
    write(tmp_path, records)
    found = read(tmp_path)
    found.profile = synthetic_profile(2, pipeline_ranks=2, data_parallel=4, tensor_parallel=3)
    bill = tile_of(found, "The whole run")
    assert bill.value == units.watt_hours(1.5 * 200.0)
    price = units.money(1.5 * 200.0 / 3.6e6 * 0.25, "EUR")
    for part in ("3 iterations in 6.000 s", "not counting 1 iterations", "2.400 GPU-min", plain(price)):
        assert part in plain(bill.note)
    assert FACTORS.carbon(3.6e6) == units.grams(1.5 * 400)


def test_energy_of_a_sample_and_of_a_token_need_the_size_of_the_job(tmp_path, job):
    write_auto_run(tmp_path, job, is_compared=True)
    found = read(tmp_path)
    assert "Energy of a sample" not in [tile.title for tile in facts(found, FACTORS).tiles]
    sizes = {"micro_batch_size": 2, "pipeline_ranks": 3, "data_parallel": 2}
    found.profile.info = found.profile.info.model_copy(update=sizes)
    (run,) = found.runs
    assert (found.gpus(run), found.samples(run).each) == (6, 16)
    tile = tile_of(found, "Energy of a sample")
    per_sample_j = run.job.total().energy_j / (run.job.total().iterations * 16)
    assert tile.value == f"{per_sample_j:.2f} J"
    assert f"{per_sample_j / 1000:.5f} J a token of 1000" in tile.note
    gained_s = run.job.whole.gained_s
    gpu_time = tile_of(found, f"GPU time {'gained' if gained_s >= 0 else 'lost'}")
    assert gpu_time.value == units.gpu_time(abs(6 * gained_s))


def test_the_energy_of_a_sample_counts_the_micro_batches_of_each_iteration(tmp_path):
    """Two orders of 8 and 4 micro-batches of 2 samples. Iterations of other orders, or without energy, do not count."""
    lines = [iteration(n, "observe", 2.0, 160.0) for n in (1, 2)]
    lines += [iteration(n, "observe", 1.0, 100.0, order=1) for n in (3, 4, 5, 6)]
    lines += [iteration(7, "observe", 1.0, 900.0, order=255), iteration(8, "observe", 2.0, None)]
    start = started("ours", time=1000.0, micro_batches=8, pipelines=1)
    schedules = [OrderPlanned(order=1, micro_batches=4)]
    write(tmp_path, [start, *schedules, *lines])
    found = read(tmp_path)
    found.profile = synthetic_profile(2, micro_batches=8, micro_batch_size=2)
    samples = found.samples(found.runs[0])
    assert samples.energy_j == pytest.approx((2 * 160 + 4 * 100) / (2 * 16 + 4 * 8))
    assert samples.each == pytest.approx((2 * 16 + 4 * 8) / 6)


def test_the_report_as_json_has_the_figures_of_its_inputs_and_factors(tmp_path, job, capsys):
    write_auto_run(tmp_path, job, is_compared=True)
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json", "--price-per-kwh", "0.2", "--pue", "1.5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "report.html").exists()
    (run,) = printed["runs"]
    found = read(tmp_path)
    assert (run["energy_j"], run["folder"]) == (found.runs[0].job.total().energy_j, str(tmp_path))
    assert run["cost"] == pytest.approx(run["energy_j"] / 3.6e6 * 1.5 * 0.2)
    assert run["saved_cost"] == pytest.approx(run["whole"]["saved_j"] / 3.6e6 * 1.5 * 0.2)
    assert run["carbon_g"] == pytest.approx(run["energy_j"] / 3.6e6 * 1.5 * 436)
    assert run["saved_carbon_g"] == pytest.approx(run["whole"]["saved_j"] / 3.6e6 * 1.5 * 436)
    assert printed["plans"][0]["time_s"] == found.frontier.plans[0].time_s
    assert (printed["plan_in_use"], printed["factors"]["pue"]) == (found.plan_used, 1.5)


def test_energy_is_shown_by_rank_if_it_is_recorded(tmp_path):
    lines = [iteration(n, "observe", 2.0, 100.0, energy_by_rank_j=(40.0, 60.0)) for n in (1, 2)]
    write(tmp_path, [START, *lines])
    assert read_run(tmp_path).job.history.by_rank == [(80.0, 20.0), (120.0, 30.0)]
    without_ranks = [iteration(n, "observe", 2.0, 100.0) for n in (1, 2)]
    without_energy = iteration(1, "observe", 2.0, None, energy_by_rank_j=(1.0, 2.0))
    for records in (without_ranks, [without_energy]):
        write(tmp_path, [START, *records])
        assert read_run(tmp_path).job.history.by_rank == []


def test_a_long_job_with_large_records_takes_little_memory(tmp_path):
    by_rank = {"energy_by_rank_j": [25.0 + n for n in range(64)], "clocks_reached_mhz": [1410 + n for n in range(64)]}
    write(tmp_path, [START, *(iteration(n, "observe", 2.0, 100.0, **by_rank) for n in range(1, 2001))])
    event = {"event": "eclipse", "by": ["the moon"] * 1000}
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write(50 * f"{json.dumps(event)}\n")
    tracemalloc.start()
    try:
        history = read_run(tmp_path).job.history
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.by_rank) == 64
    assert kept / history.iterations < 500


def ran_for(hours):
    """Return the records of 101 iterations under a plan, which end over some hours and save less and less."""
    default = {"default_time_s": 1.0, "default_energy_j": 100.0}
    return [
        iteration(n, "run", 1.0, 80.0 + n / 10, plan=0, ended=1000.0 + 36 * hours * n, **default) for n in range(101)
    ]


@pytest.mark.parametrize(
    ("hours", "last", "title"),
    [(0.01, 36.0, "seconds"), (1.0, 60.0, "minutes"), (30.0, 30.0, "hours"), (240.0, 10.0, "days")],
)
def test_the_time_of_a_trend_has_a_unit_that_fits_the_length_of_the_job(tmp_path, hours, last, title):
    write(tmp_path, [START, *ran_for(hours)])
    trend = trend_of(read_run(tmp_path).job)
    assert trend.x_title == f"{title} since the start"
    assert trend.x[-1] == pytest.approx(last, rel=0.01)


def test_the_trend_shows_a_saving_that_fades(tmp_path):
    ran = ran_for(hours=1.0)
    write(tmp_path, [START, *ran])
    trend = trend_of(read_run(tmp_path).job)
    assert len(trend.x) == len(trend.energy) == 17
    assert trend.energy[0] == pytest.approx(-0.197, abs=0.001)
    assert trend.energy[-1] == pytest.approx(-0.102, abs=0.001)
    assert trend.time == pytest.approx([0.0] * 17)
    write(tmp_path, [START, *ran[:19]])
    assert trend_of(read_run(tmp_path).job) is None


def test_other_plans_are_compared_with_the_one_in_use(tmp_path, job):
    write_auto_run(tmp_path, job, is_compared=True)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    table = page[page.index('aria-label="Other plans"') :].partition("</table>")[0]
    rows = {
        number: re.findall(r"<td[^>]*>(.*?)</td>", row)[:3]
        for number, row in re.findall(r">plan (\d+)(.*?)</tr>", table, re.S)
    }
    plans, used, baseline = job.frontier.plans, job.frontier.plans[2], job.frontier.baseline
    in_words = {str(other.number): other for other in facts(read(tmp_path), FACTORS).others}
    assert {"0", "2", str(len(plans) - 1)} <= rows.keys()
    for number, cells in rows.items():
        plan = plans[int(number)]
        relative = (plan.time_s / used.time_s - 1, plan.energy_j / used.energy_j - 1)
        saved = units.percent(1 - plan.energy_j / baseline.energy_j)
        assert cells == [*(units.percent(value, 2) for value in relative), saved]
        change_j = 3 * (plan.energy_j - used.energy_j)
        sign = "+" if change_j > 0 else ""
        assert in_words[number].change == sign + units.joules(change_j), "of the three iterations under the plan"
        assert in_words[number].price == sign + FACTORS.price(change_j)


@pytest.mark.parametrize("needs_hardly_more", [True, False])
def test_a_plan_that_needs_hardly_more_time_than_the_one_in_use_is_named(tmp_path, job, needs_hardly_more):
    steps = [after.time_s / before.time_s - 1 for before, after in itertools.pairwise(job.frontier.plans)]
    number = next(number for number, step in enumerate(steps) if number and (step <= 0.01) is needs_hardly_more)
    write_auto_run(tmp_path, job, number=number)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    named = re.findall(rf"1 % more time than plan {number} allows plan (\d+): (.*?) energy at (.*?) time", page)
    assert bool(named) is needs_hardly_more
    used = job.frontier.plans[number]
    for other, energy, time in named:
        plan = job.frontier.plans[int(other)]
        assert energy == units.percent(plan.energy_j / used.energy_j - 1, 2)
        assert time == units.percent(plan.time_s / used.time_s - 1, 2)


def test_the_terminal_shows_the_tiles_of_the_page(tmp_path, job, capsys):
    write_auto_run(tmp_path, job)
    assert main(["report", str(tmp_path)]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    found = read(tmp_path)
    default = Factors(carbon_g_per_kwh=436, price_per_kwh=0.1, currency="USD")
    page = re.sub(r"\s+", " ", (tmp_path / "report.html").read_text(encoding="utf-8"))
    for tile in facts(found, default).tiles:
        for text in (tile.title, tile.value):
            assert re.sub(r"\s", " ", text) in shown
            assert re.sub(r"\s", " ", text) in page
    assert "SIMULATED" in shown
