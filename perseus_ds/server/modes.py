"""The modes of a job. Each is the sequence of phases that a job goes through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.policy.plan_proof import IterationSample, Verdict
from perseus_ds.protocol.job_messages import SetProfiledLimit, WatchDefaultClocks
from perseus_ds.server.frontiers import (
    forget_for_later_runs,
    frontier_of_an_earlier_run,
    has_own_profile,
    load_frontier,
    optimise,
    own_frontier,
)
from perseus_ds.server.iterations import Mode
from perseus_ds.server.phases import (
    BackOff,
    DefaultIterations,
    ModeContext,
    back_off_for,
    calibrate,
    measure_default,
    observe,
)
from perseus_ds.server.profiling import profile_online, warm_up
from perseus_ds.server.under_plans import Outcome, PlanRunner

# Number of iterations after which a dropped plan is compared again for the first time.
_DROPPED_FOR = 200
# Maximum number of profiles, and number of iterations after which one more is allowed. Times that keep changing, as
# with sequences of different lengths, fit no profile, so measuring again does not help.
_MOST_PROFILES = 3
_PROFILED_AGAIN_EVERY = 1000
# A profile holds if it predicts default clocks within this fraction, and this number of standard errors.
_OFF = 0.02
_SURE = 3.0


def check(context: ModeContext) -> None:
    """Check what can be checked before training.

    Raises:
        PerseusError: The frontier of run mode cannot be used, or GPUs have too few clocks.
    """
    job = context.job
    if job.config.mode == "run":
        load_frontier(job, Path(str(job.config.frontier)))
    elif job.config.mode in ("profile", "auto"):
        job.clocks_mhz()


def mode_of(context: ModeContext, state: Mapping[str, Any] | None = None) -> Mode:
    """Return the job's mode for the first order of passes. Auto mode continues from an earlier state."""
    if context.job.config.mode == "auto":
        return _auto(context, state)
    return {"run": _run, "profile": _profile, "observe": _observe}[context.job.config.mode](context)


def mode_of_order(context: ModeContext, *, has_profile: bool) -> Mode:
    """Return the mode of another order."""
    return _profile_and_run(context, frontier_of_an_earlier_run(context), has_profile=has_profile)


async def _observe(context: ModeContext) -> None:
    context.send_all(WatchDefaultClocks())
    await calibrate(context)
    await observe()


async def _run(context: ModeContext) -> None:
    config, recorder = context.job.config, context.recorder
    frontier = load_frontier(context.job, Path(str(config.frontier)))
    made, now = frontier.provenance.settings, context.job.info.settings
    if made is not None and now is not None and made != now:
        recorder.say(
            f"the plans of {config.frontier} were made for other settings of the GPU ({made}) than today's ({now}): "
            'measure a profile again, with "mode": "profile", if they do not keep what they promise'
        )
    await calibrate(context)
    if made is not None:
        context.send_all(SetProfiledLimit(made.power_limit_w))
    runner = PlanRunner(context, frontier)
    await runner.try_out()
    back_off = BackOff(_DROPPED_FOR)
    while True:
        await _measure_again(context, runner)
        result = await runner.run_while_kept()
        if isinstance(result, Verdict) and not runner.speed_up(result):
            iterations = back_off.next(context.control.steps)
            runner.drop(result, f"training continues at default clocks, tried again in {iterations} iterations")
            await back_off_for(iterations, runner.selector.default_clocks_exceed_cap)


async def _profile(context: ModeContext) -> None:
    _note_highest_clock(context)
    await calibrate(context)
    await profile_online(context, await warm_up(context))
    await observe()


async def _auto(context: ModeContext, state: Mapping[str, Any] | None) -> None:
    _note_highest_clock(context)
    has_profile = state is not None and has_own_profile(context)
    frontier = own_frontier(context.job) if has_profile else frontier_of_an_earlier_run(context)
    if frontier is None and state is None:  # a mode that begins again, or a start in a folder without a state
        has_profile = has_own_profile(context)
    await calibrate(context)
    kept = (state or {}).get("progress", {}).get("kept") if frontier is not None else None
    await _profile_and_run(context, frontier, has_profile=has_profile, kept=kept)


async def _profile_and_run(
    context: ModeContext,
    frontier: Frontier | None,
    *,
    has_profile: bool = False,
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Train under plans of an earlier run, or of a profile that is measured first.

    Args:
        context: Context of the mode.
        frontier: Plans of an earlier run, if there are any.
        has_profile: Whether the job's profile need not be measured.
        kept: Comparison with default clocks of a plan that an earlier start of the job has kept.
    """
    control = context.control
    begun, profiles = control.own_steps, 0
    back_off = BackOff(_DROPPED_FOR)
    runner: PlanRunner | None = None
    while True:
        if runner is None:
            if frontier is None and not has_profile:
                await profile_online(context, await warm_up(context))
            profiles += frontier is None
            has_profile = False
            runner = await _with_plans(context, frontier, kept)
            kept = None
        else:
            await _measure_again(context, runner)
        may_profile = profiles < _MOST_PROFILES + (control.own_steps - begun) // _PROFILED_AGAIN_EVERY
        result = await runner.run_while_kept(profiles_again=may_profile)
        if isinstance(result, Verdict):
            if runner.speed_up(result):
                continue
            is_stale = _is_stale(context, runner.frontier, runner.default)
            explains = is_stale and (not profiles or runner.has_drifted)  # another profile is worth its iterations
            iterations = 0 if explains and may_profile else back_off.next(control.steps)
            then = f"tried again in {iterations} iterations" if iterations else "profiling again"
            runner.drop(result, f"training continues at default clocks, {then}")
            await back_off_for(iterations, runner.selector.default_clocks_exceed_cap)
            result = Outcome.PROFILE_OUTDATED if is_stale and may_profile else Outcome.DEFAULT_OUTDATED
        if result is Outcome.PROFILE_OUTDATED:
            control.plans_are_dropped(runner.selector.state_for_other_plans())
            frontier = runner = None


async def _with_plans(
    context: ModeContext,
    frontier: Frontier | None,
    kept: Mapping[str, Any] | None,
) -> PlanRunner:
    """Compute plans if there are none, measure default clocks, and return a runner of the plans."""
    default = DefaultIterations(context.job)
    if frontier is None:
        frontier = await optimise(context, default)
    if kept is not None:
        default.restore(kept)
    await measure_default(default, context.recorder.say)
    runner = PlanRunner(context, frontier, default=default)
    if kept is not None:
        runner.keep(kept)
    return runner


async def _measure_again(context: ModeContext, runner: PlanRunner) -> None:
    """Measure default clocks to compare plans with, unless they would exceed a power cap."""
    default = DefaultIterations(context.job)
    while not (default.sample.is_enough or runner.apply_cap()):
        await measure_default(default, context.recorder.say, runner.selector.default_clocks_exceed_cap)
    if default.sample.is_enough:
        runner.compare_with(default)


def _is_stale(context: ModeContext, frontier: Frontier, default: IterationSample) -> bool:
    """Return whether the profile of a dropped plan no longer holds. Later runs then do not use it."""
    predicted_j = context.job.gpus_per_rank * frontier.baseline.energy_j
    is_stale = _is_off(default.time_s, frontier.baseline.time_s, default.typical.time_error) or _is_off(
        default.energy_j, predicted_j, default.typical.energy_error
    )
    if is_stale:
        forget_for_later_runs(context)
    return is_stale


def _is_off(measured: float, predicted: float, error: float) -> bool:
    return abs(measured / predicted - 1) > _OFF + _SURE * error


def _note_highest_clock(context: ModeContext) -> None:
    highest_mhz, gpu_mhz = context.job.clocks_mhz()[-1], context.job.facts[0].clocks_mhz[-1]
    if highest_mhz < gpu_mhz:
        context.recorder.say(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"relative to that clock, not to the GPU's own {gpu_mhz} MHz"
        )
