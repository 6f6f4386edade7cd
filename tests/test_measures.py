"""Typical iterations and their baselines, computed from records."""

import random
from statistics import fmean, median, pstdev

import pytest
from live_records import auto_job, default_iteration, planned_iteration, started

from perseus_ds.artifacts.run_records import IterationRecord, PlanJudged, ProfileWritten
from perseus_ds.measures import IterationKind, JobMeasures, PowerBySecond, Typical, WholeJob


def measures(*records):
    found = JobMeasures()
    for record in records:
        found.add(record)
    return found


def at_default(phase, times_s, first=1, **fields):
    """Return iterations at default clocks, of which the first does not count."""
    return [default_iteration(first + n, phase, time_s=time_s, **fields) for n, time_s in enumerate([9.0, *times_s])]


def planned(count=6, first=100, **fields):
    return [planned_iteration(first + n, **fields) for n in range(count)]


def test_the_time_is_a_median_and_the_energy_the_mean_power_times_that():
    """Counters are refreshed rarely, and single iterations are delayed."""
    typical = Typical.of([1.0] * 8 + [9.0], [0.0, 200.0] * 4 + [90.0])  # the last one has waited
    assert (typical.iterations, typical.time_s, typical.power_w, typical.energy_j) == (9, 1.0, 100.0, 100.0)
    assert Typical.of([1.0], [None]).energy_j is None
    assert Typical.of([], []) is None


def skewed(iterations=400):
    """Return times with a mean 4 % above their median, and energies. Each 80th iteration contains a stall."""
    generator = random.Random(1)
    times_s = [1.0 + generator.expovariate(1 / 0.15) for _ in range(iterations)]
    times_s[::80] = [9.0] * len(times_s[::80])
    return times_s, [100.0 + 200.0 * time_s for time_s in times_s]


def test_the_mean_iteration_is_that_of_iterations_without_stalls():
    times_s, energies_j = skewed()
    mean, typical = Typical.mean_of(times_s, energies_j), Typical.of(times_s, energies_j)
    kept_s = [time_s for time_s in times_s if time_s <= 1.5 * median(times_s)]
    assert mean.time_s == pytest.approx(fmean(kept_s))
    assert mean.time_s > 1.02 * typical.time_s
    assert mean.energy_j == pytest.approx(100.0 + 200.0 * mean.time_s)
    assert mean.time_error == pytest.approx(pstdev(kept_s) / len(kept_s) ** 0.5 / mean.time_s)
    assert Typical.mean_of([], []) is None


def test_errors_follow_from_the_spread_of_iterations_and_the_refreshes_of_the_counter():
    steady = Typical.of([1.0] * 80, [100.0] * 80, counter_period_s=0.1)
    assert (steady.time_error, steady.power_error) == (0.0, pytest.approx(0.41 * 0.1 / 80, rel=0.01))
    noisy = Typical.of([1.0, 1.02] * 40, [100.0, 103.0] * 40)
    assert noisy.time_error == pytest.approx(0.01 * 1.25 * 1.4826 / 80**0.5 / 1.01)
    assert Typical.of([1.0, 1.02] * 160, [100.0, 103.0] * 160).time_error == pytest.approx(noisy.time_error / 2)


def by_second(*iterations, most=None, pause_after=None):
    """Return figures of consecutive iterations of given seconds and watts, with an optional pause."""
    seconds, ended = PowerBySecond(most), 1e9
    for number, (time_s, power_w) in enumerate(iterations):
        ended += time_s
        seconds.add(time_s, None if power_w is None else time_s * power_w, ended)
        ended += 10.0 * (number == pause_after)
    return seconds.figures


def test_power_over_a_second_is_that_of_whole_iterations():
    figures = by_second(*[(0.25, 100.0), (0.25, 300.0)] * 2, *[(0.25, 300.0)] * 4, (0.5, 1000.0))
    assert (figures.lowest_w, figures.highest_w, figures.change_w) == pytest.approx((200.0, 300.0, 100.0))
    assert (figures.mean_w, figures.window_s) == pytest.approx((250.0, 1.0))
    assert by_second((30.0, 200.0), (30.0, 210.0)).window_s == 30.0


def test_a_change_of_power_is_between_seconds_without_a_gap():
    levels = [(1.0, 100.0), (1.0, 150.0), (1.0, 400.0)]
    assert by_second(*levels).change_w == 250.0
    assert by_second(*levels, pause_after=1).change_w == 50.0
    assert by_second((1.0, 100.0), (1.0, 150.0), (1.0, None), (1.0, 400.0)).change_w == 50.0
    assert by_second((1.0, 900.0), (1.0, 100.0), (1.0, 110.0), most=2).highest_w == 110.0
    assert by_second((1.0, 900.0)) is None


def test_the_first_iteration_after_a_change_and_those_with_failed_ranks_do_not_count():
    records = [*at_default("observe", [1.0] * 5), *planned(3), default_iteration(200, "observe", time_s=5.0)]
    records += [default_iteration(201, "observe", time_s=7.0, failed_ranks=(1,))]
    records += [
        started(),
        default_iteration(202, "observe", time_s=8.0),
        default_iteration(203, "calibrate", time_s=8.0),
    ]
    found = measures(*records)
    assert (found.baseline().typical.iterations, found.baseline().typical.time_s) == (5, 1.0)
    (plan,) = found.plans()
    assert (plan.ran, plan.typical.iterations) == (3, 2)


@pytest.mark.parametrize(
    ("records", "phase", "iterations"),
    [
        ([*at_default("optimizing", [1.0] * 20), *at_default("default", [1.0] * 6)], "default", 6),
        ([*at_default("warm-up", [1.0] * 20), *at_default("optimizing", [1.0] * 6)], "optimizing", 6),
        ([*at_default("warm-up", [1.0] * 20), *at_default("default", [1.0] * 2)], "warm-up", 20),
        ([*at_default("default", [1.0] * 6), *at_default("observe", [1.0] * 7)], "observe", 7),
        ([*at_default("observe", [1.0] * 2)], "observe", 2),
    ],
)
def test_the_baseline_is_the_longest_series_of_the_best_kind(records, phase, iterations):
    baseline = measures(*records).baseline()
    assert (baseline.phase, baseline.typical.iterations) == (phase, iterations)


def test_the_baseline_of_a_plan_is_that_of_its_verdict():
    before = at_default("observe", [1.0] * 40)
    first = [*at_default("default", [2.0] * 8), *planned(first=60), *at_default("default", [2.0] * 8, first=70)]
    found = measures(*before, *first, *planned(), PlanJudged(plan=3, kept=True), *planned())
    assert (found.baseline(3).phase, found.baseline(3).typical.iterations) == ("default", 16)
    assert found.plan(3).slowdown == pytest.approx(1.02 / 2.0 - 1)
    assert "16 iterations of this job measured for the comparison" in str(found.baseline(3))
    for record in (*at_default("default", [4.0] * 9, first=300), *planned(plan=7), PlanJudged(plan=7)):
        found.add(record)
    assert [found.baseline(plan).typical.time_s for plan in (3, 7)] == [2.0, 4.0]
    found.add(PlanJudged(plan=8))  # compared with the same iterations
    assert found.baseline(8).typical.time_s == 4.0


def test_a_run_of_the_job_that_has_more_iterations_at_default_clocks_is_the_baseline():
    own = measures(*at_default("default", [3.0] * 2), *planned())
    other = measures(*at_default("observe", [1.0] * 14))
    assert not own.baseline(3).is_measured  # rather than two iterations
    baseline = own.baseline(3, {"default": other})
    assert str(baseline) == "default clocks, 14 iterations of run default in observe mode"
    assert own.plan(3, {"default": other}).slowdown == pytest.approx(0.02)
    judged = measures(*at_default("default", [3.0] * 8), *planned(), PlanJudged(plan=3))
    assert judged.baseline(3, {"default": other}).run is None


def test_without_measurement_the_baseline_is_the_prediction_of_the_profile():
    found = measures(started(), *planned())
    assert str(found.baseline(3)) == "default clocks, by the profile"
    assert found.plan(3).saved == pytest.approx(0.2)
    assert measures(*planned(default_time_s=None, default_energy_j=None)).plans() == []


def test_the_saving_is_that_of_typical_iterations_including_earlier_frontiers():
    stalled = planned_iteration(50, time_s=60.0, energy_j=80.0 * 60 / 1.02)
    found = measures(*at_default("observe", [1.0] * 8), *planned(10), stalled)
    saving = found.saving()
    assert (saving.iterations, saving.saved_j) == (11, pytest.approx(11 * 20.0))
    assert saving.slowdown == pytest.approx(0.02)
    for record in (ProfileWritten(), *planned(5, energy_j=90.0)):
        found.add(record)
    assert [one.ran for one in found.plans()] == [5]
    assert found.saving().saved_j == pytest.approx(11 * 20.0 + 5 * 10.0)
    assert found.planned == 16
    assert measures().saving() is None


def test_plans_of_an_earlier_frontier_are_forgotten_with_the_first_iteration_under_another():
    found = measures(started(frontier="a"), *at_default("observe", [1.0] * 8), *planned(4), started(frontier=None))
    assert [one.plan for one in found.plans()] == [3]
    for record in (started(frontier="b"), *planned(4, plan=5)):
        found.add(record)
    assert [one.plan for one in found.plans()] == [5]


def test_iterations_under_limits_are_compared_with_default_clocks_under_them_and_judge_no_other_plan():
    limited = {"limited": True, "plan": 0}
    slow = {"time_s": 2.0, "energy_j": 160.0, "default_time_s": 2.0, "default_energy_j": 200.0}
    records = [*at_default("default", [1.0] * 6), PlanJudged(plan=0, kept=True), *planned(8, plan=0)]
    before = measures(*records)
    records += [*at_default("default", [2.0] * 9, limited=True), PlanJudged(plan=0, kept=False)]
    after = measures(*records, *planned(4, **limited, **slow))
    assert after.plan(0) == before.plan(0)
    assert after.plan(IterationKind()).saved == pytest.approx(0.2)
    assert after.planned == 12


def test_orders_that_alternate_are_compared_separately_and_the_saving_is_their_sum():
    first = {"plan": 3, "time_s": 1.0, "energy_j": 90.0, "default_time_s": 1.0, "default_energy_j": 100.0}
    other = {"plan": 0, "order": 1, "time_s": 0.5, "energy_j": 30.0, "default_time_s": 0.5, "default_energy_j": 50.0}
    records = [planned_iteration(n, **(other if n % 3 == 0 else first)) for n in range(100, 130)]
    found = measures(*at_default("default", [1.0] * 6), *records)
    assert [(one.plan, one.kind.order, one.ran) for one in found.plans()] == [(3, 0, 20), (None, 1, 10)]
    assert [one.saved for one in found.plans()] == [pytest.approx(0.1), pytest.approx(0.4)]
    assert found.saving().saved_j == pytest.approx(20 * 10.0 + 10 * 20.0)
    judged = PlanJudged(plan=0, order=1, kept=True)
    assert measures(*at_default("default", [1.0] * 6), judged).verdict is None, "the verdict is for another order"


def test_only_the_last_iterations_of_a_long_series_count():
    found = measures(*at_default("observe", [1.0] * 3000), *at_default("observe", [2.0] * 2000, first=4000))
    assert found.baseline().typical.time_s == 2.0


def summed(records):
    job = WholeJob()
    for record in records:
        if isinstance(record, IterationRecord):
            job.add(record)
    return job.saving


def test_profiling_counts_and_iterations_at_default_clocks_save_nothing():
    whole = summed(auto_job())
    assert whole.steps == 26
    assert whole.saved_j == pytest.approx(20 * 20 - 2 * 10)
    assert whole.gained_s == pytest.approx(-20 * 0.02 - 2 * 0.1)
    assert whole.saved == pytest.approx(380 / (4 * 100 + 2 * 110 + 20 * 80 + 380))


def test_an_iteration_with_a_stall_is_counted_and_not_compared():
    before, after = auto_job(), planned_iteration(27, time_s=61.0, energy_j=900.0)
    whole = summed([*before, after])
    assert (whole.steps, whole.stalls) == (27, 1)
    assert whole.saved_j == pytest.approx(summed(before).saved_j)
    assert "(without 1 with stalls)" in whole.in_words()


def test_iterations_of_skewed_times_save_nothing_against_themselves():
    times_s, energies_j = skewed()
    mean = Typical.mean_of(times_s, energies_j)
    default = {"default_time_s": mean.time_s, "default_energy_j": mean.energy_j, "stall_s": 1.5 * median(times_s)}
    records = [
        planned_iteration(100 + number, time_s=time_s, energy_j=energy_j, **default)
        for number, (time_s, energy_j) in enumerate(zip(times_s, energies_j, strict=True))
    ]
    whole = summed(records)
    assert (whole.gained, whole.saved) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    for fields in ({}, {"order": 1}):  # the first iteration does not count
        (found,) = measures(*(record.model_copy(update=fields) for record in (records[0], *records))).plans()
        assert (found.slowdown, found.saved) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))


def test_iterations_before_the_first_measurement_are_compared_with_it():
    by_profile = [
        planned_iteration(n, default_measured=False, default_time_s=1.5, default_energy_j=120.0) for n in (2, 3)
    ]
    before = [default_iteration(1, "profile"), *by_profile]
    predicted = summed(before)
    assert predicted.saved_j == pytest.approx(20.0 + 2 * 40.0)
    whole = summed([*before, planned_iteration(4)])
    assert whole.saved_j == pytest.approx(3 * 20.0)
    assert whole.gained_s == pytest.approx(3 * -0.02)


def test_before_a_plan_has_run_there_is_no_saving_to_state():
    assert summed([default_iteration(1), default_iteration(2, "profile")]) is None


def test_each_kind_of_iterations_is_compared_with_its_own_default_clocks():
    other = {"order": 1, "time_s": 0.5, "energy_j": 40.0}
    profiled = default_iteration(27, "profile", **other)
    planned = planned_iteration(28, **other, default_time_s=0.45, default_energy_j=50.0)
    whole, before = summed([*auto_job(), profiled, planned]), summed(auto_job())
    assert whole.saved_j - before.saved_j == pytest.approx(2 * 10)
    assert whole.gained_s - before.gained_s == pytest.approx(2 * -0.05)
