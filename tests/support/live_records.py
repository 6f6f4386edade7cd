"""Records of a job in the form that it writes, for tests of the output and of what is read from it."""

from perseus_ds.artifacts.run_events import PlanChosen, ProfileWritten, Started
from perseus_ds.artifacts.run_iterations import IterationRecord
from perseus_ds.artifacts.run_records import to_line
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.progress.facts import end_of, facts_of
from perseus_ds.progress.sums import fold

BEGIN = 1_000_000.0
AS_RECORDED = TrialState(pairs=6, verdict="good", slowdown_error=0.002, saved_error=0.003)
"""A trial with pairs that do not say more than the records."""
GOOD = TrialState(pairs=6, verdict="good", slowdown=0.02, slowdown_error=0.002, saved=0.2, saved_error=0.003)


def default_iteration(number, phase="default", **fields):
    """Return an iteration of two pipelines at default clocks, with 1 s and 100 J."""
    values = {
        "time_s": 1.0,
        "energy_j": 100.0,
        "energy_by_pipeline_j": (60.0, 40.0),
        "default_time_s": 1.0,
        "default_energy_j": 100.0,
        "default_measured": True,
        **fields,
    }
    return IterationRecord(iteration=number, phase=phase, ended=BEGIN + number, simulated=True, **values)


def planned_iteration(number, plan=3, **fields):
    """Return an iteration that is 2 % slower and saves 20 J, where 10 % and 25 J were promised."""
    values = {
        "time_s": 1.02,
        "energy_j": 80.0,
        "energy_by_pipeline_j": (50.0, 30.0),
        "predicted_time_s": 1.0,
        "predicted_energy_j": 75.0,
        "default_time_s": 1.0,
        "default_energy_j": 100.0,
        "default_measured": True,
        "trial": GOOD,
        **fields,
    }
    return IterationRecord(iteration=number, phase="run", plan=plan, ended=BEGIN + number, simulated=True, **values)


def iteration(number, phase, time_s, energy_j, *, plan=None, saved=0.0, **fields):
    """Return an iteration that takes as long as at default clocks, and saves a part of their energy."""
    values = {
        "plan": plan,
        "default_time_s": time_s,
        "default_energy_j": None if energy_j is None else energy_j / (1 - saved),
        "trial": AS_RECORDED if phase == "run" else None,
        **fields,
    }
    return IterationRecord(iteration=number, phase=phase, time_s=time_s, energy_j=energy_j, simulated=True, **values)


def started(job="a", **fields):
    """Return the start of a job in auto mode."""
    values = {"mode": "auto", "gpu": "simulated A100-SXM", "simulated": True, "time": BEGIN, **fields}
    return Started(job=job, **values)


def auto_job(planned=20, **fields):
    """Return the records of a job that was profiled and runs under plan 3."""
    records = [started(**fields)]
    records += [default_iteration(number, "warm-up") for number in (1, 2, 3)]
    records += [default_iteration(number, "profile", energy_j=110.0, time_s=1.1) for number in (4, 5)]
    records += [
        ProfileWritten(time=BEGIN + 5, path="profile.csv", iterations=2, lost_s=0.2, lost_j=20.0, simulated=True)
    ]
    records += [default_iteration(6), PlanChosen(time=BEGIN + 6, plan=3, plans=(3, 3), simulated=True)]
    return records + [planned_iteration(number) for number in range(7, 7 + planned)]


def write(folder, records):
    """Write records to the folder's run.jsonl, replacing its contents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(map(to_line, records)), encoding="utf-8")


def facts_at(records, now):
    """Return the facts of the current job of records at a time [Unix seconds]."""
    return facts_of(fold(records).current, "gpt3", now)


def end_after(records):
    """Return the record of the end of the current job of records."""
    return end_of(fold(records).current)
