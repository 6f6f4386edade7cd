"""The facts of a running job, computed from its records, and their description."""

import io
import json
import re
from pathlib import Path

import pytest
from live_records import (
    AS_RECORDED,
    BEGIN,
    auto_job,
    default_iteration,
    end_after,
    facts_at,
    planned_iteration,
    started,
    write,
)
from rich.console import Console
from virtual.job import SLOWER, VirtualJob

from perseus_ds.artifacts.run_events import CommandGiven, Ended, GoalChanged, OrderPlanned, PlanChosen, PowerCapChanged
from perseus_ds.progress.facts import JobFacts
from perseus_ds.report.live import JobFollower, JobScreen


def facts_of(records, after_s=1.0):
    last = max((getattr(record, "ended", None) or getattr(record, "time", 0.0) for record in records), default=0.0)
    return facts_at(records, last + after_s)


def told(facts):
    """Return the output of `watch` and `control status`, without the spaces between columns."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=10_000).print(JobScreen(facts))
    file.flush()
    return " ".join(file.buffer.getvalue().decode().split())


def test_totals_are_of_all_iterations_and_savings_of_those_under_plans():
    facts = facts_of(auto_job())
    assert (facts.iterations, facts.under_plans.iterations) == (26, 20)
    assert facts.energy_j == pytest.approx(4 * 100 + 2 * 110 + 20 * 80)
    assert facts.under_plans.saved_j == pytest.approx(20 * 20)
    assert facts.under_plans.gained_s == pytest.approx(-20 * 0.02)
    assert (facts.profiling_s, facts.profiling_j) == (pytest.approx(0.2), pytest.approx(20.0))
    assert facts.simulated


def test_the_hottest_gpu_is_that_of_the_last_iteration_and_unknown_in_older_records():
    records = [*auto_job(), planned_iteration(27, highest_temperature_c=71.4)]
    assert "hottest 71 C" in told(facts_of(records))
    assert facts_of(auto_job()).highest_temperature_c is None
    assert "hottest" not in told(facts_of(auto_job()))


def alternating_job():
    """Return records of a job with 8, 4 and a rare number of micro-batches."""
    other = {
        "trial": AS_RECORDED,
        "order": 1,
        "time_s": 0.5,
        "energy_j": 30.0,
        "default_time_s": 0.5,
        "default_energy_j": 50.0,
    }
    records = [*auto_job(micro_batches=8), OrderPlanned(time=BEGIN + 27, order=1, micro_batches=4)]
    records += [planned_iteration(number, plan=0, **other) for number in range(27, 37)]
    return [*records, default_iteration(37, "observe", order=255, energy_j=70.0)]


def test_each_kind_of_iterations_says_how_many_ran_under_plans_and_what_they_saved():
    facts = facts_of(alternating_job())
    assert [(kind.name, kind.planned, kind.iterations) for kind in facts.orders] == [
        ("8 micro-batches", 20, 26),
        ("4 micro-batches", 10, 10),
        ("other orders", 0, 1),
    ]
    assert [kind.saved_j for kind in facts.orders] == [pytest.approx(400), pytest.approx(200), 0.0]
    assert facts.under_plans.saved_j == pytest.approx(20 * 20 + 10 * 20), "one sum, weighted by the iterations that ran"
    assert facts.under_plans.saved == pytest.approx((20 * 20 + 10 * 20) / (20 * 100 + 10 * 50))
    assert "of these 4 micro-batches: 10 of 10 iterations under plans, 0 ms more and 200.0 J less" in told(facts)
    assert [order.name for order in end_after(alternating_job()).orders] == [kind.name for kind in facts.orders]


def test_a_resumed_job_goes_on_counting_and_another_job_does_not():
    first = facts_of(auto_job())
    resumed = facts_of([*auto_job(), Ended(time=BEGIN + 30), started(), planned_iteration(27)])
    assert (resumed.iterations, resumed.starts, resumed.under_plans.iterations) == (27, 2, 21)
    assert resumed.energy_j == pytest.approx(first.energy_j + 80)
    other = facts_of([*auto_job(), started(job="b"), default_iteration(1)])
    assert (other.iterations, other.starts, other.energy_j) == (1, 1, 100.0)
    again = facts_of([*auto_job(), started(job="b"), default_iteration(1), started(), planned_iteration(27)])
    assert again.iterations == 27


def test_what_comes_next_counts_down():
    record = default_iteration(6, "profile", next_phase="optimizing", next_in_s=12.0)
    facts = facts_of([started(), record], after_s=5.0)
    assert (facts.phase, facts.next_phase, facts.next_in_s) == ("profile", "optimizing", 7.0)
    assert facts_of([started(), record], after_s=500.0).next_in_s == 0.0


def test_the_end_is_known_where_the_goal_names_the_steps():
    goal = {"total_steps": 126}
    facts = facts_of(auto_job(goal=goal), after_s=0.0)
    assert (facts.step, facts.total_steps) == (26, 126)
    assert facts.remaining_s == pytest.approx(100.0)  # one second between the ends of iterations
    assert facts_of(auto_job()).remaining_s is None
    changed = [*auto_job(), GoalChanged(time=BEGIN + 26, goal=goal)]
    assert facts_of(changed).total_steps == 126


def test_a_job_that_has_said_nothing_for_long_is_silent_and_one_that_ended_is_not():
    assert not facts_of(auto_job(), after_s=59.0).is_silent
    assert facts_of(auto_job(), after_s=61.0).is_silent
    ended = facts_of([*auto_job(), Ended(time=BEGIN + 30)], after_s=1000.0)
    assert (ended.ended, ended.is_silent, ended.phase) == (True, False, None)


def test_clocks_and_stragglers_are_those_of_now():
    late = planned_iteration(40, clocks_asked_mhz=(1410, 1200, None), clocks_reached_mhz=(1410, 900, None))
    facts = facts_of([*auto_job(), PlanChosen(time=BEGIN, plan=3, plans=(3, 9), straggler=1, slowdown=1.2), late])
    assert facts.ranks_below_their_clock == [1]
    assert (facts.straggler, facts.straggler_slowdown, facts.plan.plans) == (1, 1.2, (3, 9))
    text = told(facts)
    assert "1200 to 1410 MHz, by rank" in text
    assert "not reached: rank 1 at 900 of 1200 MHz" in text
    assert "pipeline 1 takes 1.20 times as long" in text


def test_energy_that_cannot_be_read_is_said_and_saves_nothing():
    blind = [planned_iteration(n, energy_j=None, energy_by_pipeline_j=None) for n in range(1, 6)]
    facts = facts_of([started(), *blind])
    assert (facts.without_energy, facts.under_plans.iterations, facts.power_w) == (5, 5, None)
    assert facts.plan.real.slowdown == pytest.approx(0.02)
    assert (facts.plan.real.saved_j, facts.plan.real.saved) == (0.0, None)
    assert "energy of 5 could not be read" in told(facts)


@pytest.mark.parametrize("records", [[], [started()], auto_job(), [*auto_job(), Ended(time=BEGIN + 99)]])
def test_facts_are_json_and_words_at_any_time(records):
    facts = facts_of(records)
    assert JobFacts.model_validate(json.loads(facts.model_dump_json())) == facts
    assert told(facts).startswith("job gpt3")


def test_a_follower_takes_up_a_file_that_was_replaced(tmp_path):
    write(tmp_path, auto_job())
    follower = JobFollower(tmp_path)
    assert follower.facts(0.0).iterations == 26
    (tmp_path / "run.jsonl").unlink()
    assert follower.facts(0.0).iterations == 26
    assert "No such file" in follower.problem
    write(tmp_path, [started(job="b"), default_iteration(1)])
    assert follower.facts(0.0).iterations == 1
    assert follower.problem == ""


def test_a_command_is_pending_until_iterations_run_by_it():
    goal = {"watts": 90.0}
    records = [*auto_job(), CommandGiven(time=BEGIN + 26, goal=goal), CommandGiven(time=BEGIN + 26, paused=True)]
    assert facts_of(records).pending == "no slower than default clocks, watts 90.0; pause"
    assert "pending no slower than default clocks, watts 90.0; pause" in told(facts_of(records))
    records += [GoalChanged(time=BEGIN + 27, goal=goal), default_iteration(27, "pause")]
    assert facts_of(records).pending is None
    records += [CommandGiven(time=BEGIN + 28, paused=False)]
    assert facts_of(records).pending == "resume"
    assert facts_of([*records, planned_iteration(28)]).pending is None


def test_a_goal_that_was_in_force_is_pending_no_more_when_another_takes_its_place():
    limited = {"power_fraction": 0.8, "until": "2030-01-01T00:00:00Z"}
    records = [*auto_job(), CommandGiven(time=BEGIN + 26, goal=limited), GoalChanged(time=BEGIN + 27, goal=limited)]
    records += [GoalChanged(time=BEGIN + 90, goal={}), planned_iteration(91)]
    assert facts_of(records).pending is None


def test_present_power_stands_beside_the_mean_and_the_cap():
    cap = PowerCapChanged(time=BEGIN, watts=90.0)
    records = [*auto_job(), cap, planned_iteration(27, energy_j=91.8)]
    facts = facts_of(records)
    assert (facts.present_power_w, facts.cap_w) == (pytest.approx(90.0), 90.0)
    assert "now 90.00 W, cap 90.00 W" in told(facts)
    assert facts_of([*records, PowerCapChanged(time=BEGIN)]).cap_w is None


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


def test_the_last_line_states_what_the_lines_of_the_page_compute(monkeypatch, capsys, tmp_path):
    job = VirtualJob(tmp_path / "perseus", mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(20)
    job.close()
    found, printed = recomputed(tmp_path, monkeypatch)
    (ended,) = job.events(Ended)
    whole = ended.whole
    assert (whole.saved_j, whole.gained_s) == pytest.approx((found["saved_j"], found["gained_s"]), abs=1e-3)
    assert whole.iterations == len(found["steps"])
    assert whole.saved > 0.01, "there must be a saving to report"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "profiling counted" in line]
    assert f"Whole job ({whole.iterations}), profiling counted: {whole.in_words()}" in line
    assert whole.energy.startswith(f"\N{MINUS SIGN}{100 * whole.saved:.1f}")
    assert f"{whole.saved:.2%} less" in printed[0]
