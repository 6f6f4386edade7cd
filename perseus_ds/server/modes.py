"""The modes of a job. Each is the sequence of phases that a job goes through."""

from __future__ import annotations

from pathlib import Path

from perseus_ds.protocol.job_messages import SetProfiledLimit, WatchDefaultClocks
from perseus_ds.server.frontiers import Planner, load_frontier
from perseus_ds.server.iterations import Mode, NextPhase, Run, iteration
from perseus_ds.server.phases import ModeContext, calibrate, observe
from perseus_ds.server.profiling import profile_online, warm_up
from perseus_ds.server.under_plans import PlanRunner

# Maximum number of profiles, and number of iterations after which one more is allowed. Times that keep changing fit no
# profile, so measuring again does not help.
_MOST_PROFILES = 3
_PROFILED_AGAIN_EVERY = 1000


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


def mode_of(context: ModeContext) -> Mode:
    """Return the job's mode. It continues from the state of the context."""
    return {"run": _run, "profile": _profile, "observe": _observe, "auto": _auto}[context.job.config.mode](context)


async def after_fault(context: ModeContext, iterations: int) -> None:
    """Train at default clocks for some iterations and as long as a rank fails, then run the job's mode again."""
    await observe(iterations)
    await mode_of(context)


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
    planner = Planner(context)
    planner.use(context.orders.first, frontier)
    await PlanRunner(context, planner).run_until_outdated()


async def _profile(context: ModeContext) -> None:
    _note_highest_clock(context)
    await calibrate(context)
    await profile_online(context, await warm_up(context))
    await observe()


async def _auto(context: ModeContext) -> None:
    """Train under plans of an earlier start or run of the job, or of a profile that is measured first."""
    _note_highest_clock(context)
    await calibrate(context)
    planner = Planner(context)
    has_profile = await planner.use_earlier()
    profiles, begun = 0, context.control.own_steps

    def may_profile() -> bool:
        return profiles < _MOST_PROFILES + (context.control.own_steps - begun) // _PROFILED_AGAIN_EVERY

    try:
        while True:
            if not has_profile:
                await profile_online(context, await warm_up(context))
                profiles += 1
                planner.begin()
            await _until_planned(context, planner)
            runner = PlanRunner(context, planner, may_profile)
            await runner.run_until_outdated()
            has_profile = not runner.needs_profile
            if has_profile:
                planner.replan()
            else:
                planner.forget()
                context.state.forget_plans()
    finally:
        planner.close()


async def _until_planned(context: ModeContext, planner: Planner) -> None:
    """Train at default clocks until an order has plans."""
    while not context.orders.planned:
        planner.advance()
        await iteration(Run("optimizing", next_phase=NextPhase("run", planner.remaining_s())))
        planner.advance()


def _note_highest_clock(context: ModeContext) -> None:
    job = context.job
    highest_mhz, gpu_mhz = job.clocks_mhz()[-1], max(clock for facts in job.facts for clock in facts.clocks_mhz)
    if highest_mhz < gpu_mhz:
        context.recorder.say(
            f"perseus.profile.max_clock_mhz keeps all plans at or below {highest_mhz} MHz: savings and slowdowns are "
            f"relative to that clock, not to the GPU's own {gpu_mhz} MHz"
        )
