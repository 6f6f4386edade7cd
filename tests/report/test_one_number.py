"""All outputs show one saving: that of the job, with its error and certainty, or the number of pairs."""

import importlib.util
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from live_records import BEGIN, auto_job, end_after, facts_at, planned_iteration, write
from rich.console import Console
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.run_events import PlanJudged
from perseus_ds.artifacts.run_records import read_records
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.cli.main import main
from perseus_ds.progress.sums import fold
from perseus_ds.progress.thinning import thin
from perseus_ds.report.live import jobs_table
from perseus_ds.server.metrics import registry_of
from perseus_ds.units import plain

DEMO = Path(__file__).parents[2] / "examples" / "gpt3" / "demo.py"
ITERATIONS = 60


def demo_table(job):
    """Return the table of the demo for a job under a plan."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)

    class Plan:
        time_s, energy_j = 1.0, 75.0

    class OnePlan:
        plans, baseline = [Plan], Plan

        @staticmethod
        def within(slowdown):
            return Plan

    return demo.table(OnePlan, job)[0]


def surfaces_of(folder, capsys):
    """Return what all outputs print about the job in a folder, by name."""
    capsys.readouterr()
    records = list(read_records(folder))
    facts = facts_at(records, BEGIN)
    shown = {"last line": end_after(records).in_words(), "demo": demo_table(fold(records).current)}
    assert main(["watch", str(folder), "--once"]) == 0
    shown["watch"] = capsys.readouterr().out
    table = Console(file=io.StringIO(), width=200)
    table.print(jobs_table([facts]))
    shown["watch, several jobs"] = table.file.getvalue()
    assert main(["report", str(folder)]) == 0
    shown["report"] = capsys.readouterr().out
    page = (folder / "report.html").read_text(encoding="utf-8")
    table = page[page.index('id="savings-1"') :].partition("</table>")[0]
    shown["report.html"] = re.sub(r"<[^>]+>", " ", table)
    assert main(["compare", str(folder)]) == 0
    shown["compare"] = capsys.readouterr().out
    return {name: " ".join(plain(text).split()) for name, text in shown.items()}, facts


def report_as_json(folder, capsys):
    """Return the figures that ``report --json`` prints."""
    capsys.readouterr()
    assert main(["report", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return a job that has compared its plan, and what default clocks really take for an iteration."""
    default = VirtualJob(tmp_path_factory.mktemp("observe"), mode="observe", **SLOWER)
    default.train(6)
    default.close()
    job = VirtualJob(tmp_path_factory.mktemp("auto"), mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(ITERATIONS)
    job.close()
    _, time_s, energy_j = default.taken[-1]
    return job, time_s, energy_j


def test_the_saving_is_the_true_one(compared):
    job, default_s, default_j = compared
    planned = [(time_s, energy_j) for phase, time_s, energy_j in job.taken if phase == "run"]
    saving = fold(read_records(job.folder)).current.under_plans
    assert saving.iterations == len(planned)
    true_j = sum(default_j - energy_j for _, energy_j in planned)
    assert saving.saved_j == pytest.approx(true_j, rel=0.05)
    assert saving.saved == pytest.approx(true_j / (default_j * len(planned)), abs=0.01)
    slowdown = sum(time_s for time_s, _ in planned) / (default_s * len(planned)) - 1
    assert saving.slowdown == pytest.approx(slowdown, abs=0.01)


def test_the_saving_of_the_whole_job_is_the_true_one(compared):
    job, default_s, default_j = compared
    taken = job.taken
    whole = fold(read_records(job.folder)).current.whole
    assert whole.iterations == len(taken)
    energy_j, time_s = sum(energy_j for *_, energy_j in taken), sum(time_s for _, time_s, _ in taken)
    assert whole.saved_j == pytest.approx(default_j * len(taken) - energy_j, abs=0.02 * energy_j)
    assert whole.gained_s == pytest.approx(default_s * len(taken) - time_s, abs=0.01 * time_s)


@pytest.mark.parametrize("is_thinned", [False, True], ids=["each iteration", "first iterations summed"])
def test_all_outputs_show_the_same_saving(compared, capsys, tmp_path, is_thinned):
    job, *_ = compared
    folder, before = job.folder, facts_at([*read_records(job.folder)], BEGIN)
    if is_thinned:
        folder = tmp_path / "thinned"
        shutil.copytree(job.folder, folder)
        thin(folder / "run.jsonl", len(job.taken) - ITERATIONS // 2)
    shown, facts = surfaces_of(folder, capsys)
    for saving in ("under_plans", "whole"):
        assert getattr(facts, saving).in_words() == getattr(before, saving).in_words()
    saving = facts.under_plans
    assert facts.plan is None or facts.plan.real == saving.model_copy(update={"iterations": facts.plan.real.iterations})
    energy, time = plain(saving.energy), plain(saving.time)
    assert re.fullmatch(r"-\d+\.\d \+/- \d\.\d %", energy)
    for name, text in shown.items():
        assert energy in text, name
        assert "certain" in text, name
        if name != "watch, several jobs":  # which has no room for the time
            assert time in text, name
    (run,) = report_as_json(folder, capsys)["runs"]
    assert run["under_plans"] == facts.under_plans.model_dump(mode="json")
    assert run["whole"] == facts.whole.model_dump(mode="json")
    saving = facts.under_plans
    gauges = {s.name: s.value for family in registry_of(lambda: facts).collect() for s in family.samples}
    assert gauges["perseus_saving_ratio"] == saving.saved
    assert gauges["perseus_saving_error_ratio"] == saving.saved_error
    assert gauges["perseus_slowdown_ratio"] == saving.slowdown
    assert gauges["perseus_pairs"] == saving.pairs
    assert gauges["perseus_undecided"] == 0.0


def test_joules_per_token_are_the_same_wherever_they_are_shown(tmp_path, capsys):
    write(tmp_path, [*auto_job()[:8], *(planned_iteration(n, tokens=1000) for n in range(7, 20))])
    shown, facts = surfaces_of(tmp_path, capsys)
    for name in ("last line", "watch", "report"):
        assert facts.tokens.in_words() in shown[name], name


def test_the_verdict_in_the_log_has_the_saving_of_all_outputs(compared, capsys):
    job, *_ = compared
    records = list(read_records(job.folder))
    place = next(place for place, record in enumerate(records) if isinstance(record, PlanJudged))
    verdict, then = records[place], fold(records[: place + 1]).current.under_plans
    words = plain(verdict.in_words())
    for part in (plain(then.energy), plain(then.time), then.certainty):
        assert part in words


def test_every_per_cent_of_a_saving_has_an_error(compared, capsys):
    job, *_ = compared
    shown, _ = surfaces_of(job.folder, capsys)
    for name in ("last line", "watch, several jobs", "report.html"):
        for value in re.findall(r"[-+]?\d+\.\d (?:\+/- \d+\.\d )?%", shown[name]):
            assert "+/-" in value, (name, value)


def test_an_undecided_saving_is_a_number_of_pairs_on_all_outputs(tmp_path, capsys):
    records = [*auto_job()[:8], *(planned_iteration(n, trial=TrialState(pairs=2)) for n in range(7, 20))]
    write(tmp_path, records)
    shown, facts = surfaces_of(tmp_path, capsys)
    for name, text in shown.items():
        assert "2 pairs" in text, name
        assert "undecided" in text, name
        assert "20.0 %" not in text, name
    gauges = {s.name: s.value for family in registry_of(lambda: facts).collect() for s in family.samples}
    assert "perseus_saving_ratio" not in gauges
    assert (gauges["perseus_pairs"], gauges["perseus_undecided"]) == (2.0, 1.0)


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_demo_does_not_show_a_prediction_as_measured(is_measured):
    iterations = [planned_iteration(n, default_measured=is_measured, trial=TrialState()) for n in range(7, 20)]
    lines = demo_table(fold([*auto_job()[:1], *iterations]).current).splitlines()
    (default,) = (line for line in lines if line.startswith("  default clocks"))
    assert ("not measured" in default) == (not is_measured)
    (plan,) = (line for line in lines if line.startswith("  plan 0 of 1"))
    assert "80.0" in plan
