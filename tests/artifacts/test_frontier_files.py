"""Files of frontiers and plans: reading them back, and rejecting unsuitable or invalid ones."""

import csv
import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import one_f_one_b

from perseus_ds.artifacts.frontier import (
    NO_SLOWER,
    Alternative,
    AlternativePoint,
    Frontier,
    Provenance,
    drop_dominated,
    time_limit_s,
)
from perseus_ds.artifacts.plan import FrequencyPlan, PowerSwing, check_instructions
from perseus_ds.errors import DeadlineError, FrontierError, PlanError
from perseus_ds.pipeline.instruction import Instruction, Kind

INSTRUCTIONS = tuple(
    (Instruction(rank, Kind.FORWARD, 0), Instruction(rank, Kind.BACKWARD, 0), Instruction(rank, Kind.TAIL, 0))
    for rank in range(2)
)


def plan(time_s, energy_j, clock=1000, bound=None):
    return FrequencyPlan(INSTRUCTIONS, ((clock, clock + 100, clock),) * 2, time_s, energy_j, bound)


def frontier(simulated=True):
    slowest = dataclasses.replace(plan(1.3, 80.0, 1000), power=PowerSwing(70.0, 50.0, 20.0))
    return Frontier(
        plans=(plan(1.0, 100.0, 1400, 99.0), plan(1.1, 90.0, 1200, 90.0), slowest),
        alternatives=(Alternative("one clock", (AlternativePoint(1.0, 110.0, "1410 MHz"),)),),
        t_min_s=1.0,
        baseline=plan(1.0, 120.0, 1410),
        provenance=Provenance(
            schedule="m:C", micro_batches=1, stages=2, blocking_power_w=80.0, solver="exact", simulated=simulated
        ),
    )


def test_saving_and_loading_changes_nothing(tmp_path):
    path = frontier().save(tmp_path / "new" / "folder")
    assert Frontier.load(path) == Frontier.load(tmp_path / "new" / "folder") == frontier()


def test_a_number_that_could_not_be_read_again_is_not_written(tmp_path):
    changed = dataclasses.replace(frontier(), t_min_s=1e10)
    with pytest.raises(FrontierError, match=r"frontier\.json: t_min_s: expected a number .* got 10000000000\.0"):
        changed.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_csv_has_one_line_a_plan_and_says_what_is_simulated(tmp_path):
    for simulated, word in ((True, "yes"), (False, "no")):
        frontier(simulated).save(tmp_path)
        with (tmp_path / "frontier.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert {row["simulated"] for row in rows} == {word}
    assert [float(row["time_s"]) for row in rows] == [1.0, 1.1, 1.3]
    assert [row["lower_bound_j"] for row in rows] == ["99.0", "90.0", ""]
    powers_w = [[row[f"{name}_w"] for name in ("mean_power", "highest_power", "lowest_power")] for row in rows]
    assert powers_w == [["100.0", "", ""], ["81.8", "", ""], ["61.5", "70.0", "50.0"]]
    assert float(rows[0]["gap"]) == pytest.approx(100 / 99 - 1, abs=1e-6)


def test_the_allowed_time_is_relative_to_default_clocks_unless_these_are_said_to_be_faster_than_the_fastest_rows():
    for default_s, t_min_s in ((2.0, 1.9), (1.9, 2.0)):
        assert time_limit_s(default_s, t_min_s, 0.05) == pytest.approx(2.0 * (1 + 0.05 + NO_SLOWER))


def test_savings_are_of_the_slowest_plans_and_settings_in_time_relative_to_the_highest_clock():
    points = ((1.0, 114.0, "1410 MHz"), (1.04, 108.0, "1380 MHz"), (2.0, 60.0, "705 MHz"))
    alternatives = (Alternative("one clock", tuple(AlternativePoint(*point) for point in points)),)
    found = dataclasses.replace(frontier(), alternatives=alternatives)
    assert found.t_star_s == 1.3
    assert found.within(0.1).energy_j == 90.0
    assert dataclasses.replace(found, plans=found.plans[1:]).within(0.0).energy_j == 90.0, "the fastest, though slower"
    expected = {"Perseus": [1 / 6] * 4, "one clock": [0.05, 0.05, 0.05, 0.1]}
    assert found.savings() == {name: pytest.approx(saved) for name, saved in expected.items()}
    assert found.best_alternative_in_words().startswith("In 1 % more time, Perseus saves 11.7 percentage points more")


def test_lookup_takes_the_slowest_plan_in_time():
    found = {deadline_s: frontier().lookup(deadline_s).time_s for deadline_s in (1.0, 1.1 * (1 - 1e-12), 1.29, 9.0)}
    assert [*found.values()] == [1.0, 1.1, 1.1, 1.3]
    with pytest.raises(DeadlineError, match=r"No plan finishes an iteration in 0.9 s; the fastest takes 1 s"):
        frontier().lookup(0.9)
    for deadline_s in (0.0, float("nan")):
        with pytest.raises(DeadlineError, match="A deadline is a time above 0 s"):
            frontier().lookup(deadline_s)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw.update(schema_version=99), r"schema_version: expected 1, got 99"),
        (lambda raw: raw["plans"][1].update(time_s=float("nan")), r"plans\.1\.time_s"),
        (lambda raw: raw["plans"][1]["clocks_mhz"][0].pop(), r"one clock per instruction"),
        (lambda raw: raw["plans"].reverse(), r"plans 0 and 1 are not ordered"),
        (lambda raw: raw["plans"][2].update(energy_j=95.0), r"plans 1 and 2 are not ordered"),
    ],
)
def test_an_edited_frontier_names_file_and_key(tmp_path, edit, message):
    path = frontier().save(tmp_path)
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(FrontierError, match=rf"frontier\.json: .*{message}"):
        Frontier.load(path)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_dominated_plans_are_dropped_and_no_others(points):
    kept = [(p.time_s, p.energy_j) for p in drop_dominated([plan(t, e) for t, e in points])]
    best = {(t, e) for t, e in points if not any((a <= t and b < e) or (a < t and b <= e) for a, b in points)}
    assert set(kept) == best
    assert kept == sorted(best)


@pytest.mark.parametrize(
    ("planned", "expected", "message"),
    [
        (
            one_f_one_b(4, 8),
            one_f_one_b(4, 16),
            "rank 0, instruction 13: expected forward of micro-batch 8 on stage 0, the plan has backward of "
            'micro-batch 5 on stage 0. Run "perseus-ds optimize" again for 4 ranks and 16 micro-batches.',
        ),
        (one_f_one_b(2, 4), one_f_one_b(3, 4), "it is for 2 ranks, the schedule has 3"),
    ],
    ids=["other micro-batches", "other ranks"],
)
def test_a_plan_fits_only_the_schedule_it_was_made_for_with_or_without_tails(planned, expected, message):
    own = planned.instructions
    check_instructions(own, own)
    check_instructions([[i for i in stream if i.kind is not Kind.TAIL] for stream in own], own)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_instructions(own, expected.instructions)


def test_clock_changes_count_from_the_end_of_one_iteration_to_the_start_of_the_next():
    stream = tuple(Instruction(0, Kind.FORWARD, m) for m in range(4))
    for clocks, changes in (((900, 900, 900, 900), 0), ((900, 900, 1000, 1000), 2), ((900, 1000, 900, 1000), 4)):
        assert FrequencyPlan((stream, ()), (clocks, ()), 1.0, 1.0).clock_changes == changes
