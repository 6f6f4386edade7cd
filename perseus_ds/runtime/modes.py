"""The modes: each is the sequence of phases that a job goes through over its life."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.plan_proof import Comparison, is_kept
from perseus_ds.policy.switch_price import SwitchPrice
from perseus_ds.profiler.offline import RepeatableInstructions
from perseus_ds.profiler.search import clocks_to_choose_from
from perseus_ds.runtime.default_clocks import DefaultIterations, measure_default
from perseus_ds.runtime.earlier_run import forget_for_later_runs, frontier_of_an_earlier_run, keep_for_later_runs
from perseus_ds.runtime.job import Job, Rank
from perseus_ds.runtime.offline_profiling import profile_offline
from perseus_ds.runtime.online_profiling import profile_online
from perseus_ds.runtime.optimising import optimise
from perseus_ds.runtime.phases import Phase, calibrate, observe
from perseus_ds.runtime.plan_runner import PlanRunner
from perseus_ds.runtime.prediction import Verdict, compare_prediction, is_predicted
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.resting import Rests, rest
from perseus_ds.runtime.running import Outcome, load_frontier, prove, run, try_out
from perseus_ds.runtime.shapes import Shape, run_by_shape
from perseus_ds.runtime.warm_up import Baseline, counter_period_s, warm_up

# Times that keep changing, as with sequences of different lengths, fit no profile, so measuring again has no use; at
# most so many profiles, and one more for every so many iterations. A plan that has lost is tried again after a rest.
_MOST_PROFILES = 3
_PROFILED_AGAIN_EVERY = 1000
_REST = 200


def mode_of(
    job: Job, rank: Rank, recorder: Recorder, control: JobControl, passes: RepeatableInstructions | None
) -> Phase[None]:
    """Return the phases of the job's mode.

    What can be checked before training is checked before the first iteration.

    Args:
        job: The job.
        rank: This rank.
        recorder: Of the job.
        control: The user's policy, reported stragglers and pause.
        passes: This rank's passes, to be repeated; None where they cannot be.

    Raises:
        PerseusError: On all ranks, what is wrong on one.
    """
    if job.config.mode == "run":
        return _run(job, rank, recorder, control)
    if job.config.mode == "profile":
        return _profile(job, rank, recorder, passes)
    if job.config.mode == "auto":
        return _auto(job, rank, recorder, control)
    return _observe(job, rank)


def _observe(job: Job, rank: Rank) -> Phase[None]:
    yield from calibrate(job, rank)
    rank.clocks.watch_default_clocks()
    yield from observe()


def _run(job: Job, rank: Rank, recorder: Recorder, control: JobControl) -> Phase[None]:
    frontier = load_frontier(job, rank, Path(str(job.config.frontier)))
    yield from calibrate(job, rank)
    runner = PlanRunner(job, rank, recorder, control, frontier=frontier)
    yield from try_out(runner)
    compared = False
    rests = Rests(_REST)
    while True:
        default = DefaultIterations(counter_period_s(rank))
        yield from measure_default(default)
        if not compared:
            compare_prediction(job, rank, recorder, frontier, default)
            compared = True
        runner.compare_with(default.sample)
        outcome = yield from _under_plan(recorder, runner, profiles_again=False)
        if outcome is Outcome.LOST:
            yield from rest(rests.next(control.steps), "default")


def _profile(job: Job, rank: Rank, recorder: Recorder, passes: RepeatableInstructions | None) -> Phase[None]:
    _check_clocks(job, rank, recorder)
    yield from calibrate(job, rank)
    baseline = yield from warm_up(job, rank, keeps_passes=passes is not None)
    obstacle: str | None = "perseus-ds cannot do so for stages of torch"
    if passes is not None:
        obstacle = passes.obstacle(rank.communicator.first_of)
    if passes is not None and obstacle is None:
        yield from profile_offline(job, rank, recorder, baseline, passes)
    else:
        recorder.say(f"passes cannot be repeated outside of training: {obstacle}. Measuring while training goes on")
        yield from profile_online(job, rank, recorder, baseline)
    yield from observe()


def _auto(job: Job, rank: Rank, recorder: Recorder, control: JobControl) -> Phase[None]:
    _check_clocks(job, rank, recorder)
    frontier = frontier_of_an_earlier_run(job, rank, recorder)
    yield from calibrate(job, rank)
    first = yield from _profile_and_run(job, rank, recorder, control, frontier)

    def load() -> tuple[Frontier, StageProfile]:
        return Frontier.load(job.output_dir), StageProfile.load(job.profile_path)

    frontier, profile = rank.communicator.from_first(load)

    def start(number: int, shape: Shape) -> Phase[None]:
        if number == 0:
            return _only(_profile_and_run(job, rank, recorder, control, frontier, tails_of=profile))
        own = job.of_shape(number, repr(shape))
        known = frontier_of_an_earlier_run(own, rank, recorder)
        return _only(_profile_and_run(own, rank, recorder, control, known, tails_of=profile))

    yield from run_by_shape(rank, recorder, start, first=first)


def _only(phases: Phase[Any]) -> Phase[None]:
    """Go through the phases of one shape, which meet no other."""
    yield from phases


def _profile_and_run(
    job: Job,
    rank: Rank,
    recorder: Recorder,
    control: JobControl,
    frontier: Frontier | None,
    *,
    tails_of: StageProfile | None = None,
) -> Phase[float | None]:
    """Train under plans, and measure a profile for them where there is none.

    Args:
        job: The job, or one shape of it.
        rank: This rank.
        recorder: Of the job.
        control: The user's policy, reported stragglers and pause.
        frontier: Of an earlier run; None to measure a profile first.
        tails_of: The profile whose tails are used, where these cannot be measured.

    Returns:
        Where shapes of inputs need plans of their own: what tells the shape that was profiled, None for several.
    """
    runner: PlanRunner | None = None
    baseline: Baseline | None = None
    profiles = 0
    begun = control.own_steps
    rests = Rests(_REST)
    price = SwitchPrice()
    while True:
        if frontier is None:
            warm = yield from warm_up(job, rank)
            baseline = warm.with_tails_of(tails_of)
            default = DefaultIterations(rank.communicator.all_max(baseline.counter_period_s))
            yield from profile_online(job, rank, recorder, baseline)
            frontier = yield from optimise(job, rank, default, price.time_s)
            profiles += 1
        else:
            default = DefaultIterations(counter_period_s(rank))
        yield from measure_default(default)
        if default.sample.mixes_shapes:
            return None
        if runner is None:
            verdict = compare_prediction(job, rank, recorder, frontier, default, before=baseline)
            if verdict is Verdict.CORRECTED:
                frontier = yield from optimise(job, rank, default, price.time_s)
            runner = PlanRunner(job, rank, recorder, control, frontier=frontier, default=default.sample)
        else:
            runner.compare_with(default.sample)
        may_profile = profiles < _MOST_PROFILES + (control.own_steps - begun) // _PROFILED_AGAIN_EVERY
        outcome = yield from _under_plan(
            recorder,
            runner,
            profiles_again=may_profile,
            on_kept=lambda: keep_for_later_runs(job, rank, recorder),
            learn=partial(_learn_price, price, rank, runner, default) if profiles else _nothing_learnt,
        )
        if outcome is Outcome.REPRICED:
            recorder.say(f"a clock change delays this job by {price.time_s * 1e3:.2g} ms; planning again with that")
            frontier = yield from optimise(job, rank, default, price.time_s)
            runner = None
            continue
        if outcome is Outcome.LOST:
            is_stale = _is_stale(job, rank, frontier, default)
            # It may win later, or a plan of another policy.
            yield from rest(rests.next(control.steps) if profiles or not is_stale else 0, "default")
            if not (is_stale and may_profile):
                continue
        if outcome is not Outcome.IN_DOUBT:  # where a plan lost, an earlier run's profile is out of date
            control.progress = runner.progress_for_other_plans()
            if runner.drifts_by_shape:
                return next(iter(default.sample.shapes)) if len(default.sample.shapes) == 1 else None
            frontier = runner = None


def _is_stale(job: Job, rank: Rank, frontier: Frontier, default: DefaultIterations) -> bool:
    """Return whether the profile of a plan that has lost no longer holds; later runs do not begin with it then."""
    if is_predicted(rank, frontier, default.sample):
        return False
    forget_for_later_runs(job, rank)
    return True


def _learn_price(
    price: SwitchPrice, rank: Rank, runner: PlanRunner, default: DefaultIterations, comparison: Comparison
) -> bool:
    """Take in what a comparison tells of the price of a clock change; return whether to plan again with it."""
    plan = runner.wanted.clocks.plan
    return rank.communicator.from_first(
        lambda: plan is not None and price.learn(plan, comparison, default.sample.time_s)
    )


def _nothing_learnt(comparison: Comparison) -> bool:
    return False


def _under_plan(
    recorder: Recorder,
    runner: PlanRunner,
    *,
    profiles_again: bool,
    on_kept: Callable[[], None] = lambda: None,
    learn: Callable[[Comparison], bool] = _nothing_learnt,
) -> Phase[Outcome]:
    """Train under the policy's plan for as long as it wins against default clocks, which have just been measured."""
    outcome = yield from prove(runner, profiles_again=profiles_again)
    if isinstance(outcome, Outcome):
        return outcome
    kept = is_kept(outcome, caps_power=runner.caps_power)
    recorder.plan_judged(runner.wanted.plan, outcome, kept=kept)
    if learn(outcome):
        return Outcome.REPRICED
    if not kept:
        return Outcome.LOST
    on_kept()
    return (yield from run(runner, profiles_again=profiles_again))


def _check_clocks(job: Job, rank: Rank, recorder: Recorder) -> None:
    """Check that there are clocks to choose from, and print a note if the config excludes the highest.

    Raises:
        ConfigError: On all ranks, if one has none.
    """

    def check() -> None:
        clocks_to_choose_from(rank.gpu, job.config.profile)

    rank.communicator.together(check)
    highest_mhz = clocks_to_choose_from(rank.gpu, job.config.profile)[-1]
    gpu_mhz = rank.gpu.supported_clocks_mhz()[-1]
    if highest_mhz < gpu_mhz:
        recorder.say(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"relative to that clock, not to the GPU's own {gpu_mhz} MHz"
        )
