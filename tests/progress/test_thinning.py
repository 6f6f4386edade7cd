"""Files of records whose first iterations are summed up: all figures stay the same, and files stay complete."""

import random

import pytest
from live_records import BEGIN, default_iteration, end_after, facts_at, planned_iteration, started, write

from perseus_ds.artifacts.run_events import Ended, LimitsChanged, OrderPlanned, PlanChosen, PlanJudged, ProfileWritten
from perseus_ds.artifacts.run_iterations import IterationRecord, SummedIterations
from perseus_ds.artifacts.run_records import RecordFollower, read_records
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.progress.sums import JobsOfFile, fold
from perseus_ds.progress.thinning import summed, thin

VERDICTS = ("unknown", "good", "good", "late")


@pytest.mark.parametrize("simulated", [False, True])
def test_sums_say_that_gpus_are_simulated_only_if_they_are(simulated):
    records = [started(simulated=simulated)]
    records += [default_iteration(number).model_copy(update={"simulated": simulated}) for number in range(1, 2000)]
    sums = [record for record in summed(records) if isinstance(record, SummedIterations)]
    assert {record.simulated for record in sums} == {simulated}


def long_job(seed=0, iterations=3000):
    """Return the records of a job with everything that sums depend on, at random."""
    draw = random.Random(seed)
    records, pairs, first = [started(job="other", ranks=2, pipelines=2), default_iteration(1)], 0, 2
    records += [started(ranks=4, pipelines=2, micro_batches=8), default_iteration(0, "calibrate", energy_j=1e6)]
    for number in range(first, first + iterations):
        fields = {
            "time_s": draw.uniform(5.0, 9.0),
            "energy_j": None if draw.random() < 0.02 else draw.uniform(60.0, 90.0),
            "energy_by_pipeline_j": (draw.uniform(30.0, 50.0), 40.0) if draw.random() < 0.3 else None,
            "energy_by_rank_j": tuple(draw.uniform(10.0, 20.0) for _ in range(4)) if draw.random() < 0.2 else None,
            "clock_changes": draw.randrange(5),
            "tokens": draw.choice([None, 1000, 2000]),
            "order": draw.choice([None, None, 1]),
            "default_time_s": draw.uniform(6.0, 8.0),
            "predicted_time_s": 7.0,
            "default_measured": draw.random() < 0.9,
        }
        pairs = 0 if draw.random() < 0.005 else pairs + (draw.random() < 0.05)
        trial = TrialState(pairs=pairs, verdict=draw.choice(VERDICTS), slowdown=draw.gauss(0, 0.01), saved=0.1)
        if draw.random() < 0.7:
            records.append(planned_iteration(number, draw.choice([3, 4]), trial=trial, **fields))
        else:
            records.append(default_iteration(number, draw.choice(["default", "profile", "observe"]), **fields))
        if draw.random() < 0.01:
            late = TrialState(pairs=pairs, verdict="late")
            records.append(
                draw.choice(
                    [
                        LimitsChanged(time=BEGIN + number),
                        PlanChosen(time=BEGIN + number, plan=3, plans=(3, 3)),
                        PlanJudged(time=BEGIN + number, trial=late),
                        ProfileWritten(time=BEGIN + number),
                        OrderPlanned(time=BEGIN + number, order=1, micro_batches=4),
                        Ended(time=BEGIN + number),
                        started(ranks=4, pipelines=2, order=1, micro_batches=4, time=BEGIN + number),
                    ]
                )
            )
    return records


def approximately(value):
    """Return a value with its numbers, which are sums in another order, as approximations."""
    if isinstance(value, dict):
        return {key: approximately(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(approximately(part) for part in value)
    return pytest.approx(value, rel=1e-6, abs=1e-2) if isinstance(value, float) else value


def sums_of_job(records):
    """Return everything that sums and the history say of the current job of records, without its present state."""
    job = fold(records).current
    power = job.history.power
    savings = job.under_plans, job.whole, job.of_trial
    return {
        "savings": [saving and saving.model_dump() for saving in savings],
        "end": end_after(records).model_dump(mode="json"),
        "conditions": {str(key): vars(sums) for key, sums in job.by_conditions().items()},
        "pipelines": [list(pair) for pair in job.pipelines_j()],
        "by rank": [list(pair) for pair in job.history.by_rank],
        "samples": list(job.micro_batches()),
        "plan": (job.history.plan, job.history.iterations, job.history.starts, job.history.event_count),
        "events": [(after, event.in_words()) for after, event in job.history.events],
        "power": [power.mean_w, power.highest_w, power.lowest_w, power.window_s],
        "left out": fold(records).left_out,
    }


def figures_of(records):
    """Return these, and the facts."""
    return {"facts": facts_at(records, BEGIN + 1e6).model_dump(mode="json")} | sums_of_job(records)


@pytest.mark.parametrize("seed", range(4))
def test_all_figures_are_the_same_if_first_iterations_are_summed_once_or_repeatedly(tmp_path, seed):
    records = long_job(seed, iterations=1200)
    expected = approximately(figures_of(records))
    write(tmp_path, records)
    for iterations in (300, 1, 400, 400):
        thin(tmp_path / "run.jsonl", iterations)
        found = [*read_records(tmp_path)]
        assert figures_of(found) == expected
    rows = sum(isinstance(record, IterationRecord) for record in found)
    assert rows == sum(isinstance(record, IterationRecord) for record in records) - 1101
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("seed", range(4))
def test_sums_and_history_are_the_same_if_all_iterations_are_summed(seed):
    """No later iteration replaces what the sums say of the last one."""
    records = long_job(seed, iterations=1000 + seed)
    # The last record with energies by rank is followed by others.
    records += [planned_iteration(2000, 3, energy_by_rank_j=None, default_measured=False)]
    records += [
        planned_iteration(2001, 4, energy_by_rank_j=None, default_measured=False, trial=TrialState(pairs=10**4))
    ]
    assert sums_of_job([*summed(records)]) == approximately(sums_of_job(records))


def test_the_first_list_after_summed_iterations_covers_those_since_the_last_one():
    records = [
        default_iteration(n, "observe", energy_by_rank_j=(60.0, 40.0) if n % 7 == 0 else None) for n in range(71)
    ]
    expected = [pytest.approx(pair) for pair in fold(records[:64]).current.history.by_rank]
    assert fold([*summed(records[:60]), *records[60:64]]).current.history.by_rank == expected


def test_iterations_are_summed_by_the_hour_and_lists_by_the_start():
    """An iteration takes 1 s."""
    records = [default_iteration(n, "observe", energy_by_rank_j=(60.0, 40.0)) for n in range(1, 9001)]
    first, *others = summed([started(), *records[:5000], started(), *records[5000:]])
    sums = [record for record in others if isinstance(record, SummedIterations)]
    assert [(each.first, each.last) for each in sums] == [(1, 3600), (3601, 5000), (5001, 8600), (8601, 9000)]
    assert [each.energy_by_rank_j for each in sums] == [(), (300_000.0, 200_000.0), (), (240_000.0, 160_000.0)]
    assert first == started()


def test_the_history_of_summed_iterations_is_a_chart_of_the_whole_job():
    """Points have equal distances, whether they stand for an hour or for an iteration, which takes 10 s."""
    records = [default_iteration(n, "observe", time_s=10.0, energy_j=100.0) for n in range(1, 15_001)]
    records += [default_iteration(n, "observe", time_s=10.0, energy_j=200.0) for n in range(15_001, 20_001)]
    history = fold([*summed(records[:15_000]), *records[15_000:]]).current.history
    (points,) = history.points.values()
    places = [point.place for point in points.points]
    assert sum(place <= 15_000 for place in places) >= 40, "one for each hour"
    assert 1500 >= len(places) > 250
    assert (history.power.mean_w, history.power.lowest_w) == (pytest.approx(12.5), pytest.approx(10.0))


def test_a_file_that_cannot_be_written_again_stays_as_it_is(tmp_path, disk_with):
    write(tmp_path, long_job(iterations=300))
    before = (tmp_path / "run.jsonl").read_bytes()
    with disk_with(1000), pytest.raises(OSError, match="File too large"):
        thin(tmp_path / "run.jsonl", 100)
    assert (tmp_path / "run.jsonl").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_reader_that_follows_the_file_begins_again(tmp_path):
    records = long_job(iterations=300)
    write(tmp_path, records)
    follower, jobs = RecordFollower(tmp_path), JobsOfFile()
    for _ in range(2):
        for is_another_file, found in follower.read():
            jobs = JobsOfFile() if is_another_file else jobs
            jobs.add(found)
        thin(tmp_path / "run.jsonl", 100)
    assert jobs.current.total().iterations == fold(records).current.total().iterations
