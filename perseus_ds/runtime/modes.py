"""The modes: each is the sequence of phases that a job goes through over its life."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.plan_proof import IterationSample, SwitchCost, Verdict
from perseus_ds.runtime.default_clocks import (
    BackOff,
    DefaultIterations,
    back_off_for,
    calibrate,
    measure_default,
    observe,
)
from perseus_ds.runtime.frontiers import (
    forget_for_later_runs,
    frontier_of_an_earlier_run,
    keep_for_later_runs,
    load_frontier,
    optimise,
)
from perseus_ds.runtime.iterations import Phase
from perseus_ds.runtime.job import Job, RankContext
from perseus_ds.runtime.prediction import Agreement, compare_prediction, is_predicted
from perseus_ds.runtime.profiling import profile_online
from perseus_ds.runtime.recorder import Recorder
from perseus_ds.runtime.shapes import Shape, run_by_shape
from perseus_ds.runtime.under_plans import Outcome, PlanRunner
from perseus_ds.runtime.warm_up import Baseline, counter_period_s, warm_up

# Times that keep changing, as with sequences of different lengths, fit no profile, so measuring again has no use; at
# most so many profiles, and one more for every so many iterations.
_MOST_PROFILES = 3
_PROFILED_AGAIN_EVERY = 1000
# When a dropped plan is tried again, the first time, and when one that is kept is compared again, in iterations; the
# latter not before so many seconds.
_TRIED_AGAIN_AFTER = 200
_COMPARED_AGAIN_AFTER = 500
_COMPARED_AGAIN_AFTER_S = 120.0
# So many plans at most have a turn one after the other.
_MOST_TURNS = 3


def mode_of(job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> Phase[None]:
    """Return the phases of the job's mode.

    What can be checked before training is checked before the first iteration.

    Raises:
        PerseusError: On all ranks, what is wrong on one.
    """
    if job.config.mode == "run":
        return _run(job, rank, recorder, control)
    if job.config.mode == "profile":
        return _profile(job, rank, recorder)
    if job.config.mode == "auto":
        return _auto(job, rank, recorder, control)
    return _observe(job, rank)


def _observe(job: Job, rank: RankContext) -> Phase[None]:
    yield from calibrate(job, rank)
    rank.clocks.watch_default_clocks()
    yield from observe()


def _run(job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> Phase[None]:
    frontier = load_frontier(job, rank, Path(str(job.config.frontier)))
    made, now = frontier.provenance.settings, job.info.settings
    if made is not None and now is not None and made != now:
        recorder.say(
            f"the plans of {job.config.frontier} were made for other settings of the GPU ({made}) than today's "
            f"({now}): "
            'measure a profile again, with "mode": "profile", if they do not keep what they promise'
        )
    yield from calibrate(job, rank)
    runner = PlanRunner(job, rank, recorder, control, frontier=frontier, comparisons=itertools.count())
    yield from runner.try_out()
    compared = False
    back_off = BackOff(_TRIED_AGAIN_AFTER)
    turns = 0
    while True:
        default = DefaultIterations(counter_period_s(rank))
        yield from _measure_again(recorder, runner, default)
        if not compared and default.sample.is_enough:
            compare_prediction(job, rank, recorder, frontier, default)
            compared = True
        result = yield from _while_kept(recorder, runner, profiles_again=False)
        if isinstance(result, Verdict):
            turns += 1
            if not _has_faster_plan(recorder, runner, result, turns):
                yield from _back_off(recorder, runner, result, back_off.next(control.steps))
                turns = 0


def _profile(job: Job, rank: RankContext, recorder: Recorder) -> Phase[None]:
    _check_clocks(job, rank, recorder)
    yield from calibrate(job, rank)
    baseline = yield from warm_up(job, rank)
    yield from profile_online(job, rank, recorder, baseline)
    yield from observe()


def _auto(job: Job, rank: RankContext, recorder: Recorder, control: JobControl) -> Phase[None]:
    _check_clocks(job, rank, recorder)
    frontier = frontier_of_an_earlier_run(job, rank, recorder)
    yield from calibrate(job, rank)
    first = yield from _profile_and_run(job, rank, recorder, control, frontier)

    def load() -> tuple[Frontier, StageProfile]:
        return Frontier.load(job.output_dir), StageProfile.load(job.profile_path)

    frontier, profile = rank.communicator.computed_on_rank_0(load)

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
    rank: RankContext,
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
    back_off = BackOff(_TRIED_AGAIN_AFTER)
    switch_cost = SwitchCost()
    comparisons = itertools.count()
    turns = 0
    while True:
        if frontier is None:
            baseline = (yield from warm_up(job, rank)).with_tails_of(tails_of)
            default = DefaultIterations(rank.communicator.all_max(baseline.counter_period_s))
            yield from profile_online(job, rank, recorder, baseline)
            frontier = yield from optimise(job, rank, default, switch_cost.time_s)
            profiles += 1
        else:
            default = DefaultIterations(counter_period_s(rank))
        measuring = _measure_again(recorder, runner, default) if runner else measure_default(default, recorder.say)
        yield from measuring
        if default.sample.mixes_shapes:
            return None
        if runner is None:
            agreement = compare_prediction(job, rank, recorder, frontier, default, before=baseline)
            if agreement is Agreement.CORRECTED:
                frontier = yield from optimise(job, rank, default, switch_cost.time_s)
            runner = PlanRunner(
                job, rank, recorder, control, frontier=frontier, comparisons=comparisons, default=default.sample
            )
        may_profile = profiles < _MOST_PROFILES + (control.own_steps - begun) // _PROFILED_AGAIN_EVERY
        result = yield from _while_kept(
            recorder,
            runner,
            profiles_again=may_profile,
            when_kept=lambda: keep_for_later_runs(job, rank, recorder),
        )
        if isinstance(result, Verdict):
            turns += 1
            if profiles and _has_other_switch_cost(recorder, rank, runner, result, switch_cost=switch_cost):
                frontier = yield from optimise(job, rank, default, switch_cost.time_s)
                runner = None
                continue
            if _has_faster_plan(recorder, runner, result, turns):
                continue
            measured = default.sample if default.sample.is_enough else runner.default
            is_stale = _is_stale(job, rank, frontier, measured)
            explains = is_stale and (not profiles or runner.has_drifted)  # another profile is worth its iterations
            iterations = 0 if explains and may_profile else back_off.next(control.steps)
            yield from _back_off(recorder, runner, result, iterations)
            turns = 0
            result = Outcome.PROFILE_OUTDATED if is_stale and may_profile else Outcome.DEFAULT_OUTDATED
        if result is Outcome.PROFILE_OUTDATED:
            control.progress = runner.progress_for_other_plans()
            if runner.drifts_by_shape:
                return next(iter(runner.default.shapes)) if len(runner.default.shapes) == 1 else None
            frontier = runner = None


def _measure_again(recorder: Recorder, runner: PlanRunner, default: DefaultIterations) -> Phase[None]:
    """Measure default clocks for the plans to be compared with, unless they would draw more than a power cap."""
    while not (default.sample.is_enough or runner.becomes_capped()):
        yield from measure_default(default, recorder.say, runner.would_be_capped)
    if default.sample.is_enough:
        runner.compare_with(default.sample)


def _is_stale(job: Job, rank: RankContext, frontier: Frontier, default: IterationSample) -> bool:
    """Return whether the profile of a dropped plan no longer holds; later runs do not begin with it then."""
    if is_predicted(rank, frontier, default):
        return False
    forget_for_later_runs(job, rank)
    return True


def _while_kept(
    recorder: Recorder, runner: PlanRunner, *, profiles_again: bool, when_kept: Callable[[], None] = lambda: None
) -> Phase[Verdict | Outcome]:
    """Train under the policy's plan for as long as it keeps its promise; default clocks have just been measured.

    Where they would draw more than a power cap, nothing is compared, until the cap has ended.

    Args:
        recorder: Of the job.
        runner: Of the plans.
        profiles_again: Whether to return where instructions take longer or shorter than profiled.
        when_kept: Called each time a comparison keeps the plan.

    Returns:
        The verdict that drops the plan; or why there is none, and something has to be measured again.
    """
    again_in = _COMPARED_AGAIN_AFTER
    while True:
        if runner.becomes_capped():
            when_kept()
            outcome = yield from runner.run_under_cap(profiles_again=profiles_again)
            return outcome or Outcome.DEFAULT_OUTDATED
        verdict = yield from runner.compare(profiles_again=profiles_again)
        if verdict is None:
            continue
        if isinstance(verdict, Outcome) or not verdict.kept:
            return verdict
        again_in = max(again_in, math.ceil(_COMPARED_AGAIN_AFTER_S / runner.default.time_s))
        recorder.plan_compared(runner.plan_number, verdict, f"compared again in {again_in} iterations")
        when_kept()
        outcome = yield from runner.run(again_in, profiles_again=profiles_again)
        if outcome is not None:
            return outcome
        again_in *= 2


def _has_other_switch_cost(
    recorder: Recorder, rank: RankContext, runner: PlanRunner, verdict: Verdict, *, switch_cost: SwitchCost
) -> bool:
    """Learn from a dropped plan how much a change of clock delays this job; return whether to plan for that."""
    plan, default_s = runner.plan, runner.default.time_s

    def learn() -> float | None:
        has_changed = plan is not None and switch_cost.learn(plan, verdict.comparison, default_s)
        return switch_cost.time_s if has_changed else None

    cost_s = rank.communicator.computed_on_rank_0(learn)
    if cost_s is None:
        return False
    delay = f"a clock change delays this job by {1e3 * cost_s:.2g} ms"
    recorder.plan_compared(runner.plan_number, verdict, f"{delay}: plans that allow for it are computed")
    return True


def _has_faster_plan(recorder: Recorder, runner: PlanRunner, verdict: Verdict, turns: int) -> bool:
    """Give a faster plan its turn after one that takes longer than promised; return whether there is one."""
    if not verdict.is_late or turns >= _MOST_TURNS or not runner.hurry(verdict):
        return False
    recorder.plan_compared(runner.plan_number, verdict, "a faster plan has its turn")
    return True


def _back_off(recorder: Recorder, runner: PlanRunner, verdict: Verdict, iterations: int) -> Phase[None]:
    """Train at default clocks for a while after a plan was dropped: it may save energy later, or another policy's."""
    then = f"tried again in {iterations} iterations" if iterations else "profiling again"
    recorder.plan_compared(runner.plan_number, verdict, f"training goes on at default clocks, {then}")
    runner.do_not_hurry()
    yield from back_off_for(iterations, "default", runner.would_be_capped)


def _check_clocks(job: Job, rank: RankContext, recorder: Recorder) -> None:
    """Check that there are clocks to choose from, and print a note if the config excludes the highest.

    Raises:
        ConfigError: On all ranks, if one has none.
    """

    def check() -> None:
        job.config.profile.clocks_of(rank.gpu)

    rank.communicator.raise_on_all_ranks(check)
    highest_mhz = job.config.profile.clocks_of(rank.gpu)[-1]
    gpu_mhz = rank.gpu.supported_clocks_mhz()[-1]
    if highest_mhz < gpu_mhz:
        recorder.say(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"relative to that clock, not to the GPU's own {gpu_mhz} MHz"
        )
