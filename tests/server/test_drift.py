"""Drift of instructions under plans, and the promise of plans of a profile that is a little off."""

import pytest
from live_records import facts_at
from virtual.job import SLOWER

from perseus_ds.artifacts.run_events import Drifted, Failed, PlanJudged, ProfileWritten
from perseus_ds.artifacts.run_records import read_records
from perseus_ds.artifacts.run_savings import changes
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.units import plain


def test_a_plan_promises_the_same_wherever_it_is_said_though_the_profile_is_a_little_off(start, frontier, capsys):
    job = start(mode="run", frontier=frontier, goal={"max_slowdown": None})  # one plan, not two in turns
    job.slowdowns[0] = 1.015
    (judged,) = job.train_until_compared()
    job.train(5)
    records = job.close()
    promised = changes(judged.promised_slowdown, judged.promised_saved)
    assert judged.trial.slowdown == pytest.approx(judged.promised_slowdown, abs=0.005)
    assert judged.trial.saved == pytest.approx(judged.promised_saved, abs=0.02)
    plan = facts_at(read_records(job.folder), 0.0).plan
    assert changes(plan.promised_slowdown, plan.promised_saving) == promised
    assert changes(records[0].promised_slowdown, records[0].promised_saving) == promised, (
        "also before default clocks were measured"
    )
    assert capsys.readouterr().out.count(f"promised {plain(promised)}") == 2, "at the start and with the verdict"


@pytest.fixture
def planned(start):
    """Return a job that runs under a plan that was kept."""
    job = start(mode="auto", **SLOWER)
    job.train_until_compared()
    job.train(12)
    return job


def lengthen(job, factors):
    """Make the passes of the next iterations longer."""
    for kind, factor in zip((Kind.FORWARD, Kind.BACKWARD, Kind.TAIL), factors, strict=True):
        job.work_s[0][kind] *= factor


def test_instructions_that_change_in_proportion_are_drift(planned):
    lengthen(planned, (1.0, 1.6, 1.0))
    planned.train(80)
    (drifted,) = planned.events(Drifted)
    assert drifted.drift > 0.05


def test_a_plan_that_is_rarely_compared_is_compared_soon_after_instructions_change(planned):
    planned.train(200)
    lengthen(planned, (1.0, 1.6, 1.0))
    planned.train(30)
    assert "default" in [phase for phase, _, _ in planned.taken[-30:]]


def test_a_plan_that_still_saves_energy_stays_when_all_instructions_take_longer(planned):
    lengthen(planned, (1.5, 1.5, 1.0))
    planned.train(200)
    planned.train_until("run")
    planned.train(3)
    last = [record for record in planned.close() if record.phase == "run"][-1]
    assert len(planned.events(PlanJudged)) == 1, "it is still kept"
    assert ["profiling" in event.then for event in planned.events(Drifted)] == [False]
    assert len(planned.events(ProfileWritten)) == 1
    assert last.predicted_time_s == pytest.approx(last.time_s, rel=0.03), "default clocks must be measured again"


def test_instructions_that_differ_from_the_start_are_noticed_while_the_plan_is_tried_out(start, frontier):
    job = start(mode="run", frontier=frontier, **SLOWER)
    job.slowdowns[0] = 0.3
    job.train(40)
    job.close()
    assert len(job.events(Drifted)) == 1
    assert job.events(Failed) == []
