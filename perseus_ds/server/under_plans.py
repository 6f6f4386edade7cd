"""Training under plans, and their trial: blocks under plans alternate with blocks at default clocks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from perseus_ds.artifacts.run_events import Drifted, PlanJudged
from perseus_ds.artifacts.run_savings import changes
from perseus_ds.policy.reports import JobDrift, rank_drift
from perseus_ds.policy.trial import Block, BlockIteration, Limits, Verdict, compare
from perseus_ds.protocol.job_messages import Times
from perseus_ds.savings import DefaultClocks
from perseus_ds.server.frontiers import Planner
from perseus_ds.server.iterations import NextPhase, Run, Seen, iteration
from perseus_ds.server.job import Job
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.selector import PlanSelector
from perseus_ds.server.state import FIRST_REST
from perseus_ds.units import plain

_DRIFT_EVERY = 10
# Number of the last measured iterations over which deviations from the profile are averaged, because the lengths of
# inputs may vary, and number after which their mean counts.
_DRIFTS, _FEWEST_DRIFTS = 8, 2
# The first iterations of a process are slower than later ones.
_SLOW_ITERATIONS = 3
# Maximum number of faster plans that are tried one after the other.
_MOST_FASTER_PLANS = 2

_REASONS = {
    Verdict.GOOD: "it is in time and saves energy",
    Verdict.LATE: "it takes longer than promised",
    Verdict.COSTS_ENERGY: "it uses more energy",
    Verdict.SAVES_NOTHING: "it saves no energy that could be measured",
}


class _Clocks(Enum):
    """The clocks at which an iteration really ran."""

    DEFAULT = "default"
    PLANNED = "planned"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, seen: Seen) -> _Clocks:
        if seen.run is None or seen.run.clock_mhz is not None:
            return cls.UNKNOWN
        return cls.PLANNED if seen.run.is_planned else cls.DEFAULT


def drift_of(job: Job, seen: Seen, default: DefaultClocks) -> JobDrift | None:
    """Compare the instructions of an iteration under plans with the profile. None if they were not measured."""
    plans = seen.plans
    if plans is None or not plans.frontier.instruction_times_s:
        return None
    pipelines, drifts = [], []
    for rank in job.profiled:
        place, has_failed = job.places[rank], seen.messages[rank].has_failed
        plan = plans.of_pipeline(place.pipeline)
        instructions, clocks_mhz = plan.instructions[place.pipeline_rank], plan.clocks_mhz[place.pipeline_rank]
        if has_failed or rank in job.fixed_ranks:
            drift = 0.0
        elif spans := seen.spans(rank):
            clocks = dict(zip(instructions, clocks_mhz, strict=True))
            drift = rank_drift(spans, clocks, plans.frontier.instruction_times_s)
            drift = (1 + drift) / default.time_factor(seen.tokens[place.pipeline]) - 1
        else:
            continue
        pipelines.append(place.pipeline)
        drifts.append(drift)
    return JobDrift.of(pipelines, drifts) if drifts else None


class _Interrupted(Exception):  # noqa: N818  # it is no error
    """The goal has changed, or the job has been paused, resumed, capped or freed: what runs now is no longer valid."""


class PlanRunner:
    """Trains under the plans of the goal for as long as they keep their promise.

    Attributes:
        selector: Selects the plans.
        needs_profile: Whether another profile is to be measured.
    """

    def __init__(self, context: ModeContext, planner: Planner, may_profile: Callable[[], bool] = lambda: False) -> None:
        """Select the first plans.

        Args:
            context: Context of the mode, in which an order has plans.
            planner: Computes the plans of other orders.
            may_profile: Returns whether the job may measure another profile.
        """
        self._state = context.state
        self._job = context.job
        self._recorder = context.recorder
        self._planner = planner
        self._may_profile = may_profile
        self._drifts: deque[float] = deque(maxlen=_DRIFTS)
        self._has_drifted = self._is_outdated = self.needs_profile = False
        self._latest_clocks = _Clocks.UNKNOWN
        self._iteration_s: float | None = None
        self.selector = PlanSelector(context)
        self._say_beginning()

    def _say_beginning(self) -> None:
        plans = next(iter(self.selector.plans().values()))
        beginning = f"plan {plans.plan} of {len(plans.frontier.plans)}"
        if (forecast := plans.forecast) is not None:
            beginning += f": promised {changes(forecast.slowdown, forecast.saved)}"
        if self._state.announced is Verdict.UNKNOWN and not self.selector.is_capped:
            beginning += "; now compared with default clocks"
        self._recorder.say(plain(beginning))

    async def run_until_outdated(self) -> None:
        """Train under plans and try them, until others are to be computed from the same or from another profile."""
        before: Block | None = None
        while not self._is_outdated:
            try:
                if self.selector.is_paused:
                    await self._train(self._default("pause"))
                elif self.selector.is_capped:
                    await self._train(self._planned())
                elif self._state.resting:
                    await self._rest()
                else:
                    before = await self._compare(before)
                    continue
            except _Interrupted:
                pass
            before = None

    async def _compare(self, before: Block | None) -> Block | None:
        """Train under plans and then at default clocks, compare both, and return the last block.

        Args:
            before: The block at default clocks before it; None if there is none.
        """
        trial = self._state.trial
        first = last = None
        while trial.left:
            last = await self._block(is_planned=True)
            first = first or last
            trial.left -= 1
        after = await self._block(is_planned=False)
        self._decide_on(trial.add(compare([(before, first), (after, last)])))
        return after

    async def _block(self, *, is_planned: bool) -> Block | None:
        """Run the iterations of a block. None if it was given up."""
        block = Block(
            self._state.default,
            is_planned=is_planned,
            counter_period_s=self._job.counter_period_s(),
            # The first iteration after a change is left out in any case. Blocks under plans that follow each other are
            # all treated like the first of them.
            counter_settle_s=self._job.counter_settle_s(unknown_s=0.0),
        )
        while not block.is_complete:
            if block.is_given_up:
                return None
            before = self._latest_clocks
            seen = await self._train(self._planned() if is_planned else self._default("default"))
            self._add(block, seen, before)
        return block

    def _add(self, block: Block, seen: Seen, before: _Clocks) -> None:
        """Add an iteration to a block if it can be compared. ``before`` has the clocks of the previous iteration."""
        wanted = _Clocks.PLANNED if block.is_planned else _Clocks.DEFAULT
        begins_at_other_clocks = before is not wanted
        is_first = seen.iteration <= _SLOW_ITERATIONS
        plans, order = seen.plans, seen.order
        has_plans = order is not None and order.frontier is not None and (plans is not None) == block.is_planned
        if (
            self._latest_clocks is not wanted
            or begins_at_other_clocks
            or is_first
            or not has_plans
            or seen.job_report.failed
        ):
            block.pass_over(seen.time_s, is_at_its_clocks=self._latest_clocks is wanted)
            return
        assert order is not None, "it has plans"
        # Plans that promise to be faster than default clocks need not be.
        promised = 0.0 if plans is None else max(0.0, plans.promised_slowdown)
        block.add(BlockIteration(order.number, seen.time_s, seen.ranks.energy_j, promised, seen.size), _limits(seen))

    async def _rest(self) -> None:
        """Train at default clocks until plans are tried again."""
        while self._state.resting:
            await self._train(self._default("observe"))
            self._state.resting -= 1
        self._recorder.say("plans are tried again after their rest")

    async def _train(self, run: Run) -> Seen:
        """Wait for the next iteration, learn from it, and decide on the following ones.

        Raises:
            _Interrupted: What runs now is no longer valid.
        """
        condition = self.selector.is_paused, self.selector.is_capped
        seen = await iteration(run)
        self._iteration_s = seen.time_s
        self._latest_clocks = _Clocks.of(seen)
        self.selector.learn(seen)
        self._planner.advance()
        self._note_drift(seen)
        if self.selector.decide():
            self._state.begin_trial()
            self._state.resting = 0
            raise _Interrupted
        if (self.selector.is_paused, self.selector.is_capped) != condition:
            raise _Interrupted
        return seen

    def _note_drift(self, seen: Seen) -> None:
        """Note that instructions deviate from the profile, and print it once. Plans are then compared soon.

        If plans cannot be compared with default clocks, because these would exceed a power cap, another profile is
        measured immediately. Otherwise plans that still save energy and are in time are kept.
        """
        if seen.drift is None:
            return
        self._drifts.append(seen.drift.typical)
        was_refuted = self.selector.is_refuted
        self.selector.is_refuted = abs(statistics.fmean(self._drifts)) > self._job.config.max_drift
        has_begun = self.selector.is_refuted and not was_refuted
        if has_begun and not seen.ranks.limits:  # under limits that come and go, plans would be compared all the time
            self._state.trial.compare_soon()
        if not self.selector.is_refuted or len(self._drifts) < _FEWEST_DRIFTS:
            return
        if self.selector.is_capped and self._may_profile():
            self._is_outdated = self.needs_profile = True
        if self._is_outdated:
            then = "profiling again"
        elif self.selector.is_capped:
            then = "the plans no longer fit: profile the job as it is now"
        else:
            then = "the plan is kept unless a comparison with default clocks drops it"
        if self._is_outdated or not self._has_drifted:
            self._recorder.announce(Drifted(drift=round(seen.drift.most, 4), then=then))
        self._has_drifted = True

    def _decide_on(self, verdict: Verdict) -> None:
        """Keep plans or drop them."""
        state = self._state
        if verdict is Verdict.GOOD:
            if state.announced is not Verdict.GOOD:
                self._announce(verdict, "compared again, ever more rarely")
                self._planner.keep()
            if state.trial.is_confirmed:
                state.next_rest = FIRST_REST
            self._renew_profile_if_plans_are_early()
        elif verdict.is_dropped:
            self._drop(verdict)

    def _renew_profile_if_plans_are_early(self) -> None:
        """Measure another profile if plans take much less time than promised, so that slower ones would save more.

        For example, a limit of GPUs that was in force during profiling has gone.
        """
        late, _ = self._state.trial.estimates()
        if late.is_below(-self._job.config.max_drift) and self._may_profile():
            self._recorder.say("plans take much less time than promised: profiling again")
            self._is_outdated = self.needs_profile = True

    def _drop(self, verdict: Verdict) -> None:
        """Try a faster plan after a late one, another profile or larger margins, or return to default clocks."""
        state = self._state
        late = state.trial.lateness
        may_be_faster = verdict is Verdict.LATE and state.faster_plans < _MOST_FASTER_PLANS
        if may_be_faster and self.selector.speed_up(late):
            self._announce(verdict, "a faster plan is tried next")
            state.faster_plans += 1
            state.trial.restart()
            self.selector.decide()
            return
        if self._profile_is_wrong(late) and self._may_profile():
            self._is_outdated = self.needs_profile = True
            self._announce(verdict, "training continues at default clocks, profiling again")
            return
        if verdict is Verdict.LATE and self._planner.can_use_larger_margins:
            self._is_outdated = True
            self._announce(verdict, "plans with fewer clock changes and more reserve are tried next")
            state.use_larger_margins()
            return
        iterations = state.next_rest
        self._announce(verdict, f"training continues at default clocks, tried again in {iterations} iterations")
        state.begin_rest()
        self.selector.decide()

    def _profile_is_wrong(self, late: float) -> bool:
        """Return whether instructions, plans or default clocks take other times than the profile says."""
        is_off = abs(late) > self._job.config.max_drift
        default_is_off = any(self._state.default.refutes_prediction(number) for number in self.selector.plans())
        return self._has_drifted or is_off or default_is_off

    def _announce(self, verdict: Verdict, then: str) -> None:
        """Print and record how plans compare with default clocks, and what follows."""
        self._state.announced = verdict
        trial = self._state.trial
        plans = next(iter(self.selector.plans().values()))
        promised = None if plans.forecast is None else plans.forecast.saved
        self._recorder.announce(
            PlanJudged(
                plan=plans.shown_plan,
                kept=not verdict.is_dropped,
                reason=_REASONS[verdict],
                then=then,
                trial=trial.recorded(),
                promised_slowdown=round(trial.figures.promised_slowdown, 5),
                promised_saved=round(promised or 0.0, 5),
            )
        )

    def _default(self, phase: str) -> Run:
        """Return a run at default clocks."""
        status = {} if phase == "observe" else self._status()
        return Run(phase, times=self._usual_times, next_phase=self._next_phase(phase), status=status)

    def _planned(self) -> Run:
        """Return a run under plans."""
        return Run(
            "run",
            plans=self.selector.plans(),
            times="passes",
            every=_DRIFT_EVERY,
            otherwise=self._usual_times,
            next_phase=self._next_phase("run"),
            status=self._status(),
        )

    def _next_phase(self, phase: str) -> NextPhase | None:
        """Return what follows: the first verdict on plans while it is not known, or plans after a rest."""
        if phase == "observe":
            return NextPhase("run", self._state.resting * (self._iteration_s or 0.0) or None)
        if phase == "pause" or self.selector.is_capped or self._state.announced is not Verdict.UNKNOWN:
            return None
        return NextPhase("verdict")

    @property
    def _usual_times(self) -> Times:
        """Times that ranks measure in all iterations, to detect stragglers."""
        return "ends" if (self._job.info.data_parallel or 1) > 1 else "none"

    def _status(self) -> dict[str, Any]:
        frontier = next(iter(self.selector.plans().values())).frontier
        return {**self.selector.status(), "t_min_s": frontier.t_min_s, "t_star_s": frontier.t_star_s}


def _limits(seen: Seen) -> Limits:
    """Return the limits of GPUs in an iteration."""
    found = set()
    for limit in seen.ranks.limits:
        found.add((limit.rank, limit.power_w if math.isfinite(limit.power_w) else 0.0))
    return frozenset(found)
