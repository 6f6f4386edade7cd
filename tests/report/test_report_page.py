"""The contents of the report, complete and with missing inputs."""

import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from live_records import iteration, started, write
from run_folders import RANKS, write_auto_run

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.run_events import Event, PlanChosen, ProfileWritten
from perseus_ds.artifacts.timeline import TimelineFile
from perseus_ds.cli.main import main
from perseus_ds.report.facts import Factors, facts, points_of_one_pipeline
from perseus_ds.report.inputs import Inputs, read, read_run
from perseus_ds.units import gpu_time, joules, percent


@pytest.fixture
def folder(tmp_path, job):
    write_auto_run(tmp_path / "run", job)
    return tmp_path / "run"


class Fetches(HTMLParser):
    """Collects the addresses fetched by a browser."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "action")]


def report(folder, *words):
    assert main(["report", str(folder), *map(str, words)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def text_of(page):
    """Return the text of the page, without scripts and tags."""
    return re.sub(r"\s+", " ", re.sub(r"<script.*?</script>|<[^>]+>", " ", page, flags=re.S))


def test_the_page_is_complete_in_itself_and_says_what_is_simulated(folder, job, capsys):
    page = report(folder, "--carbon-g-per-kwh", "100", "--price-per-kwh", "2.5", "--currency", "EUR")
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {folder / 'report.html'}"
    fetches = Fetches()
    fetches.feed(page)
    assert [found for found in fetches.found if not found.startswith("#")] == ["data:,"]
    assert "default-src 'none'" in page
    assert len(page) < 1.5e6
    words = text_of(page)
    assert "Simulated GPUs: no energy was really used or saved" in words
    assert "Not in this report" not in words
    assert "100 g CO" in words
    assert "2.50 EUR a kWh" in words
    data = embedded(page)
    assert len(data["plans"]) == len(data["pipeline"]["plans"]) == len(job.frontier.plans)
    assert data["in_use"] == 2
    assert [measured["plan"] for measured in data["measured"]] == [2, None]
    found = read(folder)
    of_one_pipeline_j = job.frontier.plans[2].energy_j / found.gpus_per_rank(found.runs[0])
    assert [measured["energy_j"] for measured in data["measured"]] == [pytest.approx(of_one_pipeline_j), None]
    assert set(data["figures"]) == {"frontier", "history", "profile-time", "profile-energy", "profile-power"}
    names = [trace.get("name") for trace in data["figures"]["frontier"]["data"]]
    assert "measured: plan 2 (3 iterations)" in names
    assert "measured: default clocks (3 iterations)" in names
    assert "one power cap for all GPUs" in names
    for measured in TimelineFile.load(folder / "timeline.json").iterations:
        slowest = max(range(len(measured.ranks)), key=lambda rank: measured.busy_s[rank])
        assert f"rank {slowest}, the slowest" in words
        for rank, waits in enumerate(measured.waits):
            assert re.search(rf"rank {rank}(, the slowest)?\s+{100 * waits:.1f} %", words)
    for table, (_, measured) in zip(facts(found, FACTORS).waits, found.measured, strict=True):
        mean_s = sum(measured.busy_s) / RANKS
        assert [row[3] for row in table.rows] == [percent(busy_s / mean_s - 1) for busy_s in measured.busy_s]


@pytest.mark.parametrize("shares_counters", [False, True])
@pytest.mark.parametrize("profiled_pipelines", [None, 1])
def test_points_of_data_parallel_jobs_have_the_energy_of_one_pipeline(
    tmp_path, job, profiled_pipelines, shares_counters
):
    """The profile may be missing, or be that of another job with fewer pipelines.

    GPUs that share a counter are one in the profile, and the second has no energy.
    """
    folder, pipelines, default = tmp_path / "run", 8, job.frontier.baseline
    of_counter_j = default.energy_j / RANKS
    of_gpus_j = [of_counter_j, 0.0] if shares_counters else [of_counter_j]
    by_gpu = {
        "energy_by_pipeline_j": [default.energy_j] * pipelines,
        "energy_by_rank_j": of_gpus_j * (RANKS * pipelines),
    }
    ran = [iteration(n, "observe", default.time_s, pipelines * default.energy_j, **by_gpu) for n in range(1, 8)]
    job.frontier.save(folder)
    if profiled_pipelines is not None:
        job.profile.save(folder / "profile.csv")
    write(folder, [start("ours", "observe"), *ran])
    found = read(folder)
    (point,) = points_of_one_pipeline(found)
    assert (point.time_s, point.energy_j) == pytest.approx((default.time_s, default.energy_j))
    assert found.gpus(found.runs[0]) == RANKS * pipelines * len(of_gpus_j)


def test_a_job_with_an_unknown_number_of_gpus_is_not_drawn_beside_plans(tmp_path, job):
    job.frontier.save(tmp_path)
    write(tmp_path, [start("ours", "observe"), *(iteration(n, "observe", 1.0, 5000.0) for n in range(1, 8))])
    assert points_of_one_pipeline(read(tmp_path)) == []


FACTORS = Factors(carbon_g_per_kwh=400, price_per_kwh=0.25, currency="EUR")


def test_a_report_counts_what_finding_the_plans_took(tmp_path, job):
    write_auto_run(tmp_path, job, is_compared=True)
    default, plan = job.frontier.baseline, job.frontier.plans[2]
    inputs = read(tmp_path)
    inputs.profile.info = inputs.profile.info.model_copy(update={"pipeline_ranks": RANKS, "data_parallel": 2})
    (found,) = facts(inputs, FACTORS).runs
    planned, everything, projected = found.rows
    assert (planned.iterations, everything.iterations) == ("3", "8")
    assert projected.what == "under plan 2, at that rate"
    saved_j = default.energy_j - plan.energy_j
    assert planned.saved == joules(3 * saved_j)
    assert everything.saved == joules(3 * saved_j)
    assert projected.saved == joules(100_000 * saved_j)
    assert found.saving.saved == pytest.approx(1 - plan.energy_j / default.energy_j)
    gained_s = 3 * (default.time_s - plan.time_s) - 2 * 0.1 * default.time_s
    assert found.run.job.whole.gained_s == pytest.approx(gained_s)
    gained_by_plan_s = default.time_s - plan.time_s
    for row, of_pipeline_s in (
        (planned, 3 * gained_by_plan_s),
        (everything, gained_s),
        (projected, 1e5 * gained_by_plan_s),
    ):
        assert row.gpu_time == gpu_time(2 * RANKS * of_pipeline_s)
    assert found.iterations == 8


def test_a_job_is_not_measured_against_another_one_in_the_same_folder(tmp_path, job):
    """As with the default folder: `output_dir` stays the same for successive jobs."""
    slow = [start("slow", "observe"), *(iteration(n, "observe", 2.0, 900.0) for n in (1, 2, 3))]
    slow += [start("slow", "run"), iteration(4, "run", 2.0, 700.0, plan=0, saved=0.1)]
    ours = [start("ours", "run"), *(iteration(n, "run", 1.0, 360.0, plan=0, saved=0.1) for n in (1, 2))]
    write(tmp_path, [*slow, *ours, start("crashed", "run")])
    write(tmp_path / "other", slow[:4])
    report = facts(read(tmp_path), FACTORS)
    ran = next(run for run in report.runs if run.run.folder == tmp_path)
    assert ran.run.left_out == 4
    assert any("4 iterations of other jobs" in sentence for sentence in report.inputs.missing)
    assert (ran.iterations, ran.saving.saved) == (2, pytest.approx(0.1))


def test_plans_of_an_earlier_frontier_are_not_taken_for_those_of_the_last(tmp_path):
    def plans_of(*records):
        write(tmp_path, list(records))
        return [(one.plan, one.iterations) for one in read_run(tmp_path).job.plans()]

    ran = [iteration(n, "run", 1.0, 100.0, plan=3, saved=0.1) for n in range(1, 4)]
    profiled_again = ProfileWritten()
    assert plans_of(start("ours", "auto"), ran[0], profiled_again, ran[1], start("ours", "auto"), ran[2]) == [(3, 2)]
    of_b = [start("ours", "run", "b"), ran[2], start("ours", "observe")]
    assert plans_of(start("ours", "run", "a"), *ran[:2], *of_b) == [(3, 1)]
    assert read_run(tmp_path).job.history.frontier == "b"


def start(job, mode, frontier=None, **fields):
    return started(job, mode=mode, frontier=frontier, **fields)


def test_a_run_whose_frontier_lies_elsewhere_finds_it_and_its_profile(tmp_path, folder, job):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("frontier.json", "profile.csv", "profile.json"):
        shutil.move(folder / name, elsewhere / name)
    provenance = job.frontier.provenance.model_copy(update={"profile": str(elsewhere / "profile.csv")})
    replace(job.frontier, provenance=provenance).save(elsewhere)
    assert read(folder).frontier is None
    lines = (folder / "run.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"frontier": str(elsewhere)})
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n")
    assert "pipeline" in embedded(report(folder))


def test_of_runs_that_have_plans_of_their_own_the_last_ones_are_shown_with_their_profile(tmp_path, job):
    for name, time, plan in (("a, first", 1.0, 0), ("b, last", 3.0, 2), ("c, between", 2.0, 1)):
        folder = tmp_path / name
        provenance = job.frontier.provenance.model_copy(update={"solver": name})
        replace(job.frontier, provenance=provenance).save(folder)
        StageProfile(job.profile.measurements, job.profile.info.model_copy(update={"gpu": name})).save(
            folder / "profile.csv"
        )
        ran = [iteration(n, "run", 1.0, 100.0, plan=plan) for n in range(1, 4)]
        write(folder, [start("ours", "auto", time=time), *ran])
    write(tmp_path / "d, without", [start("ours", "observe", time=4.0), iteration(1, "observe", 1.0, 100.0)])
    found = read(tmp_path)
    assert found.frontier.provenance.solver == found.profile.info.gpu == "b, last"
    assert found.plan_used == 2


@pytest.mark.parametrize("only", ["frontier", "profile"])
def test_a_report_with_plans_or_a_profile_of_a_simulated_gpu_is_simulated(tmp_path, job, only):
    assert Inputs(tmp_path, **{only: getattr(job, only)}).simulated
    assert not Inputs(tmp_path).simulated


@pytest.mark.parametrize(
    ("gone", "missing", "kept"),
    [
        (["frontier.json"], "The frontier of plans, and their savings: there is no frontier.json.", "profile-time"),
        (["profile.csv", "profile.json"], "The profile, and the timelines computed from it", "frontier"),
        (["run.jsonl", "timeline.json"], "The run itself: there is no run.jsonl.", "frontier"),
    ],
)
def test_missing_inputs_are_named_and_the_rest_is_shown(folder, capsys, gone, missing, kept):
    for name in gone:
        (folder / name).unlink()
    page = report(folder)
    assert missing in text_of(page)
    assert missing in capsys.readouterr().out
    assert kept in embedded(page)["figures"]


def test_a_profile_measured_again_does_not_fit_its_old_frontier(folder, job):
    rows = [m for m in job.profile.measurements if m.clock_mhz != job.frontier.baseline.clocks_mhz[0][0]]
    type(job.profile)(rows, job.profile.info).save(folder / "profile.csv")
    page = report(folder)
    assert "frontier and profile do not belong together" in text_of(page)
    assert "pipeline" not in embedded(page)


def test_a_folder_with_nothing_in_it_is_an_error_that_says_what_was_expected(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no run.jsonl, profile.csv or frontier.json" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no such folder; expected the output_dir" in capsys.readouterr().err
    (tmp_path / "run.jsonl").touch()
    for command in (["report"], ["watch", "--once"]):
        assert main([*command, str(tmp_path / "run.jsonl")]) == 2
        assert "this is a file; expected a folder" in capsys.readouterr().err


def test_names_from_files_cannot_become_html(tmp_path, job):
    hostile = tmp_path / "<img src=x onerror=alert(1)>"
    write_auto_run(hostile, job)
    page = report(hostile)
    assert "<img" not in page[: page.index("<script>")]
    assert "<img" not in page[page.index('id="data"') :]


def test_every_event_is_described_in_words(tmp_path):
    plan = PlanChosen(plan=3, plans=(3, 7), straggler=1, slowdown=1.2)
    events = [*(kind() for kind in Event.__subclasses__()), plan]
    write(tmp_path, [events[0], iteration(1, "run", 1.0, 1.0, plan=3), *events[1:]])
    after, occurred = zip(*read_run(tmp_path).job.history.events, strict=True)
    assert after == (0, *[1] * (len(events) - 1))
    texts = [event.in_words() for event in occurred]
    assert all(texts)
    assert texts[-1] == "plan 3, pipeline 1 is 1.2 times as slow, pipelines run 3, 7"


def test_a_long_run_makes_no_larger_page(tmp_path):
    records = [start(None, "run")]
    for n in range(1, 3001):
        records.append(iteration(n, "run", 1.0, 100.0, plan=n // 10 % 5, saved=0.1))
        if n % 10 == 0:
            records.append(PlanChosen(plan=n // 10 % 5))
    write(tmp_path, records)
    page = report(tmp_path)
    figures = embedded(page)["figures"]
    assert figures["history"]["data"][0]["name"] == "run, one in 2"
    assert len(figures["history"]["data"][0]["x"]) == 1500
    assert len(figures["history"]["layout"]["shapes"]) == 199  # and the start
    assert "and more, in <code>run.jsonl</code>" in page
    assert "trend" in figures


@pytest.mark.parametrize("command", ["report", "compare", "watch"])
def test_a_folder_whose_name_is_not_utf_8_is_shown(folder, monkeypatch, command):
    renamed = folder.rename(folder.with_name(os.fsdecode(b"run\xff")))
    monkeypatch.chdir(renamed)
    assert main([command, "."]) == 0
    page = {"report": "report.html", "compare": "comparison.html"}.get(command)
    assert page is None or r"run\udcff" in (renamed / page).read_text(encoding="utf-8")


def test_a_path_that_is_too_long_is_an_error(folder, capsys):
    assert main(["report", str(folder), "--out", "x" * 300]) == 2
    assert f"{'x' * 300}: cannot be written (File name too long)" in capsys.readouterr().err
