"""Events of policies that know the hour, in words."""

from perseus_ds.artifacts.hour_records import CostsSoFar, Halted, TimetableMade
from perseus_ds.artifacts.run_file import from_line, to_line
from perseus_ds.artifacts.run_records import PlanChosen
from perseus_ds.report.words import event_in_words


def test_events_say_what_the_hours_are_worth():
    timetable = TimetableMade(cost=80.0, bound=79.0, fastest_cost=100.0)
    events = [timetable, CostsSoFar(iterations=50, cost=90.0, fastest_cost=100.0), Halted(time_s=7200.0)]
    minus = "\N{MINUS SIGN}"
    texts = [event_in_words(from_line(to_line(event))).replace(minus, "-") for event in events]
    assert texts[0].startswith("timetable: -20")
    assert "above the bound" in texts[0]
    assert texts[1].startswith("50 iterations by the hour, -10")
    assert texts[2].startswith("training stood still for 2")
    assert event_in_words(PlanChosen(plan=3, halts=True)) == "standing still, then plan 3"
    assert event_in_words(CostsSoFar(iterations=5)) == "5 iterations by the hour, at no cost"
