"""Sums over a job's records, and the saving that follows from them."""

import random
import tracemalloc

import pytest
from live_records import AS_RECORDED, GOOD, auto_job, default_iteration, planned_iteration, started

from perseus_ds.artifacts.run_events import OrderPlanned, PlanJudged, ProfileWritten
from perseus_ds.artifacts.run_savings import TrialState
from perseus_ds.progress.sums import fold
from perseus_ds.progress.thinning import summed

UNKNOWN = TrialState(pairs=2)


def job_of(*records):
    return fold(records).current


def planned(count=6, first=100, **fields):
    return [planned_iteration(first + n, **fields) for n in range(count)]


def test_the_saving_is_the_sum_of_the_differences_from_what_default_clocks_take():
    job = job_of(*auto_job())
    assert (job.under_plans.iterations, job.under_plans.saved_j) == (20, pytest.approx(20 * 20))
    assert job.under_plans.gained_s == pytest.approx(-20 * 0.02)
    assert (job.under_plans.saved, job.under_plans.slowdown) == (pytest.approx(0.2), pytest.approx(0.02))
    assert (job.under_plans.saved_error, job.under_plans.slowdown_error) == (0.003, 0.002)


def test_the_plan_in_use_is_that_of_the_order_which_the_last_start_has_declared():
    """The frontier in the job's folder is that of this order, and those of others are in subfolders."""
    first = [*auto_job(micro_batches=4), *planned(order=1, plan=7)]
    assert job_of(*first).history.plan == 3
    again = [*first, started(order=1, micro_batches=3)]
    assert job_of(*again).history.plan is None, "its plans are made again"
    records = [*again, *planned(order=1, plan=5), *planned(plan=2)]
    job = job_of(*records)
    assert (job.history.order, job.history.plan) == (1, 5)
    assert job_of(*summed(records)).history.plan == 5
    assert [point.plan for point in job.history.points["run"].points] == [3] * 20 + [None] * 6 + [5] * 6 + [None] * 6


def test_profiling_counts_and_iterations_at_default_clocks_save_nothing():
    whole = job_of(*auto_job()).whole
    assert whole.iterations == 26
    assert whole.saved_j == pytest.approx(20 * 20 - 2 * 10)
    assert whole.gained_s == pytest.approx(-20 * 0.02 - 2 * 0.1)
    default_j = 4 * 100 + 2 * 110 + 20 * 80 + 380
    assert whole.saved == pytest.approx(380 / default_j)
    assert whole.saved_error == pytest.approx(0.003 * 2000 / default_j), "the error of its part under plans"
    assert whole.slowdown_error == pytest.approx(0.002 * 20 / 26)


def test_an_iteration_with_a_stall_is_counted_and_not_compared():
    before, after = auto_job(), planned_iteration(27, time_s=61.0, energy_j=900.0)
    job = job_of(*before, after)
    assert (job.whole.iterations, job.whole.stalls, job.under_plans.iterations) == (27, 1, 21)
    assert job.whole.saved_j == pytest.approx(job_of(*before).whole.saved_j)
    assert "1 with stalls not compared" in job.whole.in_words()


def test_an_iteration_at_a_low_clock_of_the_profile_contains_no_stall():
    slow = default_iteration(5, "profile", time_s=2.2, energy_j=130.0)
    job = job_of(*auto_job(), slow)
    assert job.whole.saved_j == pytest.approx(20 * 20 - 2 * 10 - 30)


def test_the_saving_of_a_trial_is_the_one_that_its_pairs_show():
    """Default clocks were measured under a limit of GPUs, so that they take longer than those of the neighbours."""
    slow = {"default_time_s": 1.5, "default_energy_j": 150.0, "predicted_time_s": 1.5}
    job = job_of(started(), *planned(8, trial=TrialState(pairs=2), **slow), *planned(4, first=200))
    assert (job.of_trial.saved, job.of_trial.slowdown) == (pytest.approx(0.2), pytest.approx(0.02))
    assert job.of_trial.saved_j == pytest.approx(12 * 20)
    job.add(planned_iteration(300, trial=TrialState(pairs=0), energy_j=90.0))
    assert job.under_plans.saved_j == pytest.approx(12 * 20 + 10), "also once another trial has begun"


def test_iterations_of_skewed_times_save_nothing_against_their_mean():
    generator = random.Random(1)
    times_s = [1.0 + generator.expovariate(1 / 0.1) for _ in range(400)]
    times_s = [time_s for time_s in times_s if time_s < 1.4]
    mean_s = sum(times_s) / len(times_s)
    fields = {
        "default_time_s": mean_s,
        "default_energy_j": 100 * mean_s,
        "predicted_time_s": mean_s,
        "trial": AS_RECORDED,
    }
    job = job_of(*(planned_iteration(n, time_s=s, energy_j=100 * s, **fields) for n, s in enumerate(times_s)))
    assert (job.under_plans.saved, job.under_plans.slowdown) == (pytest.approx(0, abs=1e-9),) * 2


def test_iterations_without_known_default_clocks_or_energy_are_not_compared():
    unknown = {"default_time_s": None, "default_energy_j": None, "predicted_time_s": None}
    job = job_of(*auto_job(), *planned(3, **unknown), *planned(2, energy_j=None))
    assert job.under_plans.iterations == 25
    assert job.under_plans.saved_j == pytest.approx(20 * 20)
    assert job.under_plans.gained_s == pytest.approx(-22 * 0.02), "its time is known"
    assert job.planned.mean().energy_j == pytest.approx(80)


def test_before_a_plan_has_run_there_is_no_saving_to_state():
    job = job_of(default_iteration(1), default_iteration(2, "profile"))
    assert (job.under_plans, job.whole, job.of_trial) == (None, None, None)


def test_an_undecided_saving_is_a_number_of_pairs_and_no_per_cent():
    job = job_of(*auto_job()[:8], *planned(4, trial=UNKNOWN))
    for saving in (job.under_plans, job.whole, job.of_trial):
        assert (saving.saved, saving.slowdown) == (None, None)
        assert (saving.energy, saving.time, saving.pairs) == ("2 pairs", "2 pairs", 2)
        assert "undecided after 2 pairs of blocks" in saving.in_words()
        assert "%" not in saving.in_words()


def test_wherever_a_per_cent_is_shown_its_error_and_the_certainty_are_too():
    words = job_of(*auto_job()).under_plans.in_words()
    assert words == "-20.0 +/- 0.3 % energy, +2.0 +/- 0.2 % time: certain"


def dropped(verdict):
    trial = TrialState(pairs=7, verdict=verdict, saved_error=0.01, slowdown_error=0.02)
    return PlanJudged(plan=3, kept=False, trial=trial)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("late", "harmful (late)"), ("costs energy", "harmful (costs energy)"), ("saves nothing", "useless")],
)
def test_a_dropped_plan_is_said_to_be_harmful(verdict, words):
    job = job_of(*auto_job()[:8], *planned(9, trial=UNKNOWN), dropped(verdict), default_iteration(200, "observe"))
    assert words in job.under_plans.in_words()
    assert (job.under_plans.saved, job.under_plans.saved_error) == (pytest.approx(0.2), 0.01)


def test_the_trial_of_another_plan_begins_anew_and_what_was_certain_of_the_job_remains():
    job = job_of(*auto_job(), *planned(5, plan=4, energy_j=90.0, trial=TrialState(pairs=0)))
    assert (job.of_trial.iterations, job.of_trial.saved_j) == (5, pytest.approx(50))
    assert job.of_trial.certainty == "undecided after 0 pairs of blocks"
    assert (job.under_plans.iterations, job.under_plans.certainty) == (25, "certain")
    job = job_of(*auto_job(), started(), *planned(5, trial=GOOD))
    assert job.of_trial.iterations == 25, "a resumed job continues its trial"


def test_plans_are_told_apart_by_frontier_and_order():
    other = {
        "trial": AS_RECORDED,
        "plan": 0,
        "order": 1,
        "time_s": 0.5,
        "energy_j": 30.0,
        "default_time_s": 0.5,
        "default_energy_j": 50.0,
    }
    records = [
        *auto_job(micro_batches=8),
        ProfileWritten(path="profile.csv"),
        *planned(4, energy_j=90.0, trial=AS_RECORDED),
    ]
    records += [OrderPlanned(order=1, micro_batches=4), *planned(3, **other, predicted_time_s=0.5)]
    job = job_of(*records)
    plans = {(one.plan, one.order): (one.iterations, one.saved_j) for one in job.plans()}
    assert plans == {(3, 0): (4, pytest.approx(40)), (0, 1): (3, pytest.approx(60))}
    orders = {one.name: (one.planned, one.iterations, one.saved_j) for one in job.orders()}
    assert orders == {
        "8 micro-batches": (24, 30, pytest.approx(20 * 20 + 4 * 10)),
        "4 micro-batches": (3, 3, pytest.approx(60)),
    }
    assert job.under_plans.saved_j == pytest.approx(20 * 20 + 4 * 10 + 60), "one sum"


def test_default_clocks_by_the_profile_are_named_as_such():
    assert "profile" not in job_of(*planned()).under_plans.in_words()
    words = job_of(*planned(default_measured=False)).under_plans.in_words()
    assert "compared with default clocks by the profile" in words


def test_the_current_job_is_the_one_that_trained_last():
    records = [*auto_job(), started(job="b"), default_iteration(1), started(job="crashed")]
    jobs = fold(records)
    assert (jobs.current.total().iterations, jobs.left_out) == (1, 26)
    again = fold([*records, started(), planned_iteration(27)])
    assert (again.current.total().iterations, again.left_out) == (27, 1)
    assert fold([started(job="a"), started(job="b", mode="observe")]).current.history.last_start.mode == "observe"


def test_the_saving_of_a_pipeline_is_by_its_share_at_default_clocks():
    (_, first_j), (_, second_j) = job_of(*auto_job()).pipelines_j()
    assert first_j == pytest.approx(20 * (60 - 50))
    assert second_j == pytest.approx(20 * (40 - 30))


def test_joules_and_tokens_per_second_are_those_of_the_same_iterations():
    job = job_of(*auto_job()[:8], *planned(6, tokens=1000))
    tokens = job.tokens
    assert (tokens.energy_j, tokens.per_s) == (pytest.approx(0.08), pytest.approx(1000 / 1.02))
    assert (tokens.default_energy_j, tokens.default_per_s) == (pytest.approx(0.1), pytest.approx(1000))
    assert tokens.in_words() == (
        "0.08000 J a token, 980.4 tokens/s under plans; 0.1000 J a token, 1 000 tokens/s at default clocks"
    )
    observed = job_of(default_iteration(1, "observe", tokens=500), default_iteration(2, "observe", tokens=1500))
    assert observed.tokens.in_words() == "0.1000 J a token, 1 000 tokens/s at default clocks"
    assert job_of(*auto_job()).tokens is None


def kept_bytes(iterations):
    """Return the memory of the sums over a job of a number of iterations, in which events occur."""

    def records():
        yield started()
        for number in range(iterations):
            phase = ("run", "default", "observe")[number % 3]
            yield planned_iteration(number) if phase == "run" else default_iteration(number, phase)
            if number % 10 == 0:
                yield OrderPlanned(order=1, micro_batches=4)

    tracemalloc.start()
    try:
        job = fold(records()).current
        assert job.total().iterations == iterations
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_length_of_a_job():
    assert kept_bytes(20_000) < 1.2 * kept_bytes(10_000)


def test_the_start_names_the_size_of_a_job():
    history = job_of(started(ranks=16, pipelines=4), default_iteration(1, energy_by_pipeline_j=None)).history
    assert (history.gpus, history.pipelines) == (16, 4)


def test_figures_by_token_are_of_iterations_with_known_energy_and_number_of_tokens():
    """The counter fails in every other iteration, and an earlier version recorded no tokens."""
    known = planned(4, tokens=1000, trial=AS_RECORDED)
    without_energy = planned(4, first=110, tokens=1000, energy_j=None, trial=AS_RECORDED)
    without_tokens = planned(4, first=120, trial=AS_RECORDED)
    tokens = job_of(*known, *without_energy, *without_tokens).tokens
    assert (tokens.per_s, tokens.energy_j) == (pytest.approx(1000 / 1.02), pytest.approx(0.08))
    assert (tokens.default_per_s, tokens.default_energy_j) == (pytest.approx(1000.0), pytest.approx(0.1))
