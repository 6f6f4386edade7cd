"""All outputs show the same saving, with the same named baseline."""

import importlib.util
import io
import re
from pathlib import Path

import pytest
from live_records import BEGIN, auto_job, default_iteration, planned_iteration, write
from rich.console import Console

from perseus_ds.artifacts.run_records import PlanJudged
from perseus_ds.cli.main import main
from perseus_ds.report.jobs import jobs_of, main_job
from perseus_ds.report.live import jobs_table
from perseus_ds.report.sources import find_sources
from perseus_ds.server.metrics import registry_of
from perseus_ds.server.progress import JobLog
from perseus_ds.units import plain

STALLED = planned_iteration(40, time_s=60.0, energy_j=80.0 * 60 / 1.02)


def judged():
    """Return a job that compared its plan with default clocks, on a host that stalled later."""
    blocks = [default_iteration(n, time_s=1.01 if n % 2 else 0.99) for n in range(30, 39)]
    verdict = PlanJudged(plan=3, kept=True, slowdown=0.021, saved=0.199, time=BEGIN)
    return [
        *auto_job(),
        *blocks,
        planned_iteration(39),
        verdict,
        STALLED,
        *(planned_iteration(n) for n in range(41, 60)),
    ]


def not_judged():
    """Return a job that measured default clocks in observe mode, without a comparison."""
    observed = [default_iteration(n, "observe", time_s=1.03, energy_j=101.0) for n in range(1, 9)]
    return [*auto_job()[:1], *observed, *auto_job()[1:], STALLED]


def by_the_profile():
    """Return a job that measured almost nothing at default clocks."""
    return [record for record in auto_job() if getattr(record, "phase", "") not in ("warm-up", "default")]


@pytest.mark.parametrize(
    ("records", "named", "undecided"),
    [
        (judged(), "default clocks, 8 iterations of this job measured for the comparison", False),
        (not_judged(), "default clocks, 7 iterations of this job in observe mode", False),
        (by_the_profile(), "default clocks, by the profile", True),
    ],
    ids=["judged", "not judged", "by the profile"],
)
def test_all_surfaces_say_the_same(tmp_path, capsys, records, named, undecided):
    write(tmp_path / "gpt3", records)
    job = main_job(jobs_of(find_sources(tmp_path / "gpt3")))
    (measured,) = job.plans
    assert str(measured.baseline) == named
    time, energy = (f"{100 * value:+.1f} %" for value in (measured.slowdown, -measured.saved))

    log = JobLog("gpt3")
    log.add(records)
    facts = log.facts(BEGIN + 60)
    assert (facts.plan.slowdown, facts.plan.saving) == (measured.slowdown, measured.saved)
    assert (facts.slowdown, facts.saved) == (pytest.approx(measured.slowdown), pytest.approx(measured.saved))

    # `control status` prints the same.
    assert main(["watch", str(tmp_path / "gpt3"), "--once"]) == 0
    watched = " ".join(capsys.readouterr().out.split())
    assert f"against {named}" in watched
    assert f"real {time} time, {energy} energy" in watched

    gauges = {s.name: s.value for family in registry_of(lambda: facts).collect() for s in family.samples}
    assert gauges["perseus_plan_slowdown_ratio"] == measured.slowdown
    assert gauges["perseus_plan_saving_ratio"] == measured.saved

    last = log.at_end().in_words()
    words = [f"{change.strip('+-')} {'less' if change[0] == '-' else 'more'}" for change in (energy, time)]
    assert f"{words[0]} energy and {words[1]} time than at {named}" in last

    assert main(["report", str(tmp_path / "gpt3")]) == 0
    reported = " ".join(plain(capsys.readouterr().out).split())
    assert f"Energy under plan 3 {energy}" in reported
    assert f"Iteration time under plan 3 {time}" in reported
    assert named in reported

    page = (tmp_path / "gpt3" / "report.html").read_text(encoding="utf-8")
    table = page[page.index('id="savings-1"') :].partition("</p>")[0]
    jobs = Console(file=io.StringIO(), width=80)
    jobs.print(jobs_table([facts]))
    for shown in (watched, last, reported, table, jobs.file.getvalue()):
        assert ("undecided" in shown) == undecided, shown

    assert main(["compare", str(tmp_path / "gpt3")]) == 0
    assert (tmp_path / "gpt3" / "comparison.html").is_file()
    out = capsys.readouterr().out
    row = next(plain(line) for line in out.splitlines() if line.startswith("gpt3: plan 3"))
    assert re.findall(r"[+-]\d+\.\d %", row) == [time, energy]


def test_the_table_of_the_demo_says_the_same(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "gpt3" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    write(tmp_path, judged())
    (measured,) = main_job(jobs_of(find_sources(tmp_path))).plans

    class Plan:
        time_s, energy_j = 1.0, 75.0

    class OnePlan:
        plans, baseline = [Plan], Plan

        @staticmethod
        def within(slowdown):
            return Plan

    text, _ = demo.table(OnePlan, measured)
    assert f"Energy saved: {measured.saved:.1%} (measured), at {measured.slowdown:+.1%} iteration time" in text
    assert f"compared with {measured.baseline}" in text
