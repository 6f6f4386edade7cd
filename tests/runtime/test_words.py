"""Events of policies that know the hour, in words."""

from perseus_ds.artifacts.run_records import CostsSoFar, Halted, PlanChosen, TimetableMade, from_line, to_line
from perseus_ds.report.page import by_the_hour
from perseus_ds.runtime.words import event_in_words


def test_events_say_what_the_hours_are_worth():
    timetable = TimetableMade(cost=80.0, bound=79.0, fastest_cost=100.0)
    events = [timetable, CostsSoFar(iterations=50, cost=90.0, fastest_cost=100.0, done=True), Halted(time_s=7200.0)]
    minus = "\N{MINUS SIGN}"
    texts = [event_in_words(from_line(to_line(event))).replace(minus, "-") for event in events]
    assert texts[0].startswith("timetable: -20")
    assert "above the bound" in texts[0]
    assert texts[1].startswith("50 iterations by the hour, -10")
    assert texts[2].startswith("training stood still for 2")
    assert event_in_words(PlanChosen(plan=3, halts=True)) == "standing still, then plan 3"
    assert event_in_words(CostsSoFar(iterations=5)) == "5 iterations by the hour, not done yet"


def test_the_report_says_what_a_job_that_is_done_cost_by_its_signal():
    costs = CostsSoFar(iterations=50, cost=90.0, fastest_cost=100.0, halted_s=3600.0, done=True)
    (tile,) = by_the_hour([costs])
    assert tile.value.startswith("\N{MINUS SIGN}10")
    assert "50 iterations" in tile.note
    assert "1" in tile.note.partition("stood still for")[2]
    assert list(by_the_hour([costs.model_copy(update={"done": False})])) == list(by_the_hour([])) == []
