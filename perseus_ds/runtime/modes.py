"""The modes: each is the sequence of phases of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.policy.plan_proof import IterationSample, SwitchCost, Verdict
from perseus_ds.runtime.default_clocks import (
    DROPPED_FOR,
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
    has_own_profile,
    keep_for_later_runs,
    load_frontier,
    optimise,
    plan_by_length,
)
from perseus_ds.runtime.iterations import Phase
from perseus_ds.runtime.job import ModeContext
from perseus_ds.runtime.orders import OrderPhases
from perseus_ds.runtime.prediction import correct_profile, is_predicted
from perseus_ds.runtime.profiling import Baseline, counter_period_s, predict_profile, profile_online, warm_up
from perseus_ds.runtime.shapes import Shape, ShapePhases
from perseus_ds.runtime.under_plans import Outcome, PlanRunner

# Times that keep changing, for example with sequences of different lengths, fit no profile, so the number of profiles
# is limited, with one more for each of the following number of iterations.
_MOST_PROFILES = 3
_PROFILED_AGAIN_EVERY = 1000


def mode_of(context: ModeContext) -> Phase[None]:
    """Return the phases of the job's mode.

    All checks that are possible before training are made before the first iteration.

    Raises:
        PerseusError: On all ranks, if a check fails on one.
    """
    mode = context.job.config.mode
    if mode == "run":
        return OrderPhases(context, _run(context), None).run()
    if mode == "auto":
        return OrderPhases(context, _auto(context), _of_order).run()
    if mode == "profile":
        return OrderPhases(context, _profile(context), None, profiles_all=True).run()
    return _observe(context)


def _observe(context: ModeContext) -> Phase[None]:
    yield from calibrate(context)
    context.rank.clocks.watch_default_clocks()
    yield from observe()


def _run(context: ModeContext) -> Phase[None]:
    config, rank, recorder = context.job.config, context.rank, context.recorder
    frontier = load_frontier(context, Path(str(config.frontier)))
    made, now = frontier.provenance.settings, context.job.info.settings
    if made is not None and now is not None and made != now:
        recorder.say(
            f"the plans of {config.frontier} were made for other settings of the GPU ({made}) than the current ones "
            f'({now}). If they do not keep their promise, measure a profile with "mode": "profile"'
        )
    yield from calibrate(context)
    if made is not None:
        rank.clocks.set_profiled_limit(made.power_limit_w)
    runner = PlanRunner(context, frontier)
    yield from runner.try_out()
    period_s = counter_period_s(rank)
    compared = False
    back_off = BackOff(DROPPED_FOR)
    while True:
        default = DefaultIterations(period_s)
        yield from _measure_again(context, runner, default)
        if not compared and default.sample.is_enough:
            correct_profile(context, frontier, default)
            compared = True
        result = yield from runner.run_while_kept()
        if isinstance(result, Verdict) and not runner.hurry(result):
            iterations = back_off.next(context.control.steps)
            runner.drop(result, f"training continues at default clocks, tried again in {iterations} iterations")
            yield from back_off_for(iterations, runner.would_be_capped)


def _profile(context: ModeContext) -> Phase[None]:
    _check_clocks(context)
    yield from calibrate(context)
    baseline = yield from warm_up(context)
    yield from profile_online(context, baseline)
    yield from observe()


def _auto(context: ModeContext) -> Phase[None]:
    _check_clocks(context)
    frontier = frontier_of_an_earlier_run(context)
    has_profile = frontier is None and has_own_profile(context)
    yield from calibrate(context)
    yield from _by_shape(context, frontier, has_profile=has_profile)


def _of_order(context: ModeContext, has_profile: bool) -> Phase[None]:
    """Train iterations of another order than the first. Its profile may be known."""
    yield from _by_shape(context, frontier_of_an_earlier_run(context), has_profile=has_profile)


def _by_shape(context: ModeContext, frontier: Frontier | None, *, has_profile: bool = False) -> Phase[None]:
    """Train iterations of one order, with the same plans for all shapes if possible, otherwise by shape."""
    job = context.job
    try:
        first = yield from _profile_and_run(context, frontier, has_profile=has_profile)
    finally:
        context.look_ahead.stop_planner(context.order)

    def load() -> tuple[Frontier, StageProfile]:
        return Frontier.load(job.output_dir), StageProfile.load(job.profile_path)

    frontier, profile = context.rank.communicator.computed_on_rank_0(load)

    # Profiles that are or will be measured, by the lengths of inputs.
    measured: dict[float, Path] = {}

    def start(number: int, shape: Shape, length: float) -> tuple[Phase[float | None], float | None]:
        if number == 0:
            measured[length] = job.profile_path
            return _profile_and_run(context, frontier, tails_of=profile), None
        own = replace(context, job=job.of_shape(number, repr(shape)), shape=number)
        known = frontier_of_an_earlier_run(own)
        error = predict_profile(own, length, measured) if known is None else None
        if error is None:
            measured[length] = own.job.profile_path
        return _profile_and_run(own, known, has_profile=error is not None, tails_of=profile), error

    yield from ShapePhases(context, start, first).run()


def _profile_and_run(
    context: ModeContext,
    frontier: Frontier | None,
    *,
    has_profile: bool = False,
    tails_of: StageProfile | None = None,
) -> Phase[float | None]:
    """Train with plans of an earlier run, or of a profile that is measured first.

    Args:
        context: Context of the mode.
        frontier: Plans of an earlier run, if any.
        has_profile: Whether the job has a profile already.
        tails_of: Profile with the tails to use, because those of iterations of one shape cannot be measured.

    Returns:
        If shapes of inputs need their own plans: the number of the profiled shape, None for several.
    """
    rank, recorder, control = context.rank, context.recorder, context.control
    runner: PlanRunner | None = None
    baseline: Baseline | None = None
    period_s, profiles = 0.0, 0
    by_length = False
    begun = control.own_steps
    back_off = BackOff(DROPPED_FOR)
    switch_cost = SwitchCost()
    while True:
        if frontier is None and not has_profile:
            baseline = yield from warm_up(context, tails_of=tails_of)
            yield from profile_online(context, baseline)
            period_s = baseline.counter_period_s
        has_profile = False
        default = DefaultIterations(period_s := period_s or counter_period_s(rank))
        if frontier is None:
            frontier = yield from optimise(context, default, switch_cost.time_s)
            profiles += 1
        if runner is None:
            by_length = plan_by_length(context, frontier)
            default = DefaultIterations(period_s) if by_length else default  # those before were of any lengths
        yield from _measure_again(context, runner, default) if runner else measure_default(default, recorder.say)
        if default.sample.mixes_shapes and not by_length:
            return None
        if runner is None:
            if not by_length and correct_profile(context, frontier, default, before=baseline):
                frontier = yield from optimise(context, default, switch_cost.time_s)
            runner = PlanRunner(context, frontier, default=default, by_length=by_length)
        may_profile = profiles < _MOST_PROFILES + (control.own_steps - begun) // _PROFILED_AGAIN_EVERY
        runner.profiles_again = may_profile
        result = yield from runner.run_while_kept(lambda: keep_for_later_runs(context))
        if isinstance(result, Verdict):
            if profiles and _has_other_switch_cost(context, runner, result, switch_cost):
                frontier = yield from optimise(context, default, switch_cost.time_s)
                runner = None
                continue
            if runner.hurry(result):
                continue
            measured = default.sample if default.sample.is_enough else runner.default
            is_stale = _is_stale(context, frontier, measured)
            explains = is_stale and (not profiles or runner.has_drifted)  # another profile is worth its iterations
            iterations = 0 if explains and may_profile else back_off.next(control.steps)
            then = f"tried again in {iterations} iterations" if iterations else "profiling again"
            runner.drop(result, f"training continues at default clocks, {then}")
            yield from back_off_for(iterations, runner.would_be_capped)
            result = Outcome.PROFILE_OUTDATED if is_stale and may_profile else Outcome.DEFAULT_OUTDATED
        if result is Outcome.PROFILE_OUTDATED:
            control.plans_are_dropped(runner.selector.state_for_other_plans())
            if runner.drifts_by_shape:
                return next(iter(runner.default.shapes)) if len(runner.default.shapes) == 1 else None
            frontier = runner = None


def _measure_again(context: ModeContext, runner: PlanRunner, default: DefaultIterations) -> Phase[None]:
    """Measure default clocks for comparisons with plans, unless they would exceed a power cap."""
    while not (default.sample.is_enough or runner.becomes_capped()):
        yield from measure_default(default, context.recorder.say, runner.would_be_capped)
    if default.sample.is_enough:
        runner.compare_with(default)


def _is_stale(context: ModeContext, frontier: Frontier, default: IterationSample) -> bool:
    """Return True if the profile of a dropped plan is outdated. Later runs then do not use it."""
    if is_predicted(context.rank, frontier, default):
        return False
    forget_for_later_runs(context)
    return True


def _has_other_switch_cost(context: ModeContext, runner: PlanRunner, verdict: Verdict, switch_cost: SwitchCost) -> bool:
    """Learn the delay of a clock change from a dropped plan.

    Return True if plans should be computed with it.
    """
    plan, default_s = runner.plan, runner.default.time_s

    def learn() -> float | None:
        has_changed = plan is not None and switch_cost.learn(plan, verdict.comparison, default_s)
        return switch_cost.time_s if has_changed else None

    cost_s = context.rank.communicator.computed_on_rank_0(learn)
    if cost_s is None:
        return False
    delay = f"a clock change delays this job by {1e3 * cost_s:.2g} ms"
    runner.say_compared(verdict, f"{delay}: plans that allow for it are computed")
    return True


def _check_clocks(context: ModeContext) -> None:
    """Check that there are clocks to choose from, and print a note if the config excludes the highest.

    Raises:
        ConfigError: On all ranks, if one has no clocks.
    """
    gpu, settings = context.rank.gpu, context.job.config.profile
    clocks_mhz = context.rank.communicator.raise_on_all_ranks(lambda: settings.clocks_of(gpu))
    highest_mhz, gpu_mhz = clocks_mhz[-1], gpu.supported_clocks_mhz()[-1]
    if highest_mhz < gpu_mhz:
        context.recorder.say(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"relative to that clock, not to the GPU's {gpu_mhz} MHz"
        )
