"""Rank 0's decisions under plans: by the policy, its signals and the time; what they cost is added up."""

from __future__ import annotations

import logging
import math

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.hour_records import CostsSoFar, Halted, TimetableMade
from perseus_ds.artifacts.rank_report import JobReport
from perseus_ds.artifacts.run_records import Failed, PolicyChanged
from perseus_ds.policy.assignment import PlanChoice
from perseus_ds.policy.cost_account import CostAccount
from perseus_ds.policy.job_control import JobControl
from perseus_ds.policy.plan_follower import PlanFollower
from perseus_ds.policy.policies import CheapestPolicy, PolicyConfig, SchedulePolicy, SimplePolicy, in_force
from perseus_ds.policy.signal_values import Signal
from perseus_ds.policy.signal_watch import SignalWatch
from perseus_ds.policy.situation import Decision
from perseus_ds.policy.timetable import Timetable
from perseus_ds.runtime.halting import Waited
from perseus_ds.runtime.job import Rank
from perseus_ds.runtime.recorder import Recorder

logger = logging.getLogger("perseus_ds")
# A timetable is recorded at each value of the signal, and later ones replace what is far ahead.
_MOST_ENTRIES = 200


def follow_signals(rank: Rank, recorder: Recorder, control: JobControl) -> None:
    """Read the signals of the policy, on rank 0, and follow their files until the job ends; every rank must call it.

    Raises:
        SignalError: On all ranks: a file cannot be used.
    """

    def tell(problem: str) -> None:
        logger.warning("perseus: %s", problem)
        recorder.event(Failed(event="signal", error=problem))

    def begin() -> None:
        control.costs = CostAccount(rank.timebase)
        control.signals = SignalWatch(rank.timebase, tell)
        rank.beside_training.callback(control.signals.close)
        control.signals.follow(control.policy)
        rank.beside_training.callback(lambda: _tell_costs(control, recorder))

    rank.communicator.from_first(begin)


class PlanChooser:
    """Decides on rank 0; its decisions count for all.

    Attributes:
        in_force: The policy that has decided last: that of the window, if the user's is a schedule.

    Args:
        rank: This rank.
        recorder: Of the job.
        control: What the user asks for.
        frontier: The plans.
        follower: Evaluates the iterations.
    """

    def __init__(
        self, rank: Rank, recorder: Recorder, control: JobControl, frontier: Frontier, follower: PlanFollower
    ) -> None:
        self._rank = rank
        self._recorder = recorder
        self._control = control
        self._frontier = frontier
        self._follower = follower
        self._policy: PolicyConfig = control.policy
        self._window: SimplePolicy | CheapestPolicy | None = None
        self.in_force: SimplePolicy | CheapestPolicy = in_force(control.policy, rank.timebase.date())
        self._timetable: Timetable | None = None
        self._complaint = ""
        self._ended_s = math.nan

    def lets_go_on(self) -> bool:
        """Whether training that stands still goes on."""
        return not self.choose(iterations_ahead=0).halts

    def choose(self, iterations_ahead: int = 1) -> PlanChoice:
        """Decide on an iteration.

        Args:
            iterations_ahead: Iterations that will have run before it.
        """
        control = self._control
        decides = in_force(control.policy, self._rank.timebase.date())
        if control.policy != self._policy:
            self._policy, self._window, self._complaint = control.policy, None, ""
            self._recorder.event(PolicyChanged(policy=control.policy.model_dump(mode="json")))
        if isinstance(control.policy, SchedulePolicy) and decides != self._window:
            self._window, self._complaint = decides, ""
            self._recorder.event(PolicyChanged(policy=decides.model_dump(mode="json"), by_schedule=True))
        self.in_force = decides
        decision = self._decide(decides, iterations_ahead)
        # Before the first colon a problem has no figures that change at every iteration.
        if decision.problem and decision.problem.partition(":")[0] != self._complaint.partition(":")[0]:
            self._complaint = decision.problem
            self._recorder.event(PolicyChanged(problem=decision.problem))
            self._recorder.say(decision.problem)
        if decision.timetable is not self._timetable:
            self._take_up(decision.timetable)
        halts = decision.halts and not control.paused
        return PlanChoice(decision.plan, control.paused or decision.failed, control.straggler(), halts)

    def problem_of(self, policy: PolicyConfig) -> str:
        """Return the condition of a policy that no plan meets now, empty if there is none; from any thread."""
        return self._decide(policy).problem

    def _decide(self, policy: PolicyConfig, iterations_ahead: int = 1) -> Decision:
        control = self._control
        return self._follower.decide(
            policy,
            control.steps,
            self._rank.timebase.date(),
            signals=control.signals.signals if control.signals is not None else {},
            iterations_ahead=iterations_ahead,
            timetable=self._timetable,
        )

    def learn(self, reports: JobReport | None, plan: int | None) -> None:
        """Add the cost of the iteration before the one that has just ended; None where what it ran is not known."""
        ended_s, self._ended_s = self._ended_s, self._rank.timebase.date().timestamp()
        signal = self._signal()
        if reports is None or plan is None or signal is None or math.isnan(ended_s):
            return
        fastest_time_s, fastest_energy_j = self._follower.expected(0)
        self._control.costs.add_iteration(
            signal,
            ended_s=ended_s,
            time_s=reports.time_s,
            energy_j=reports.energy_j if math.isfinite(reports.energy_j) else self._follower.expected(plan)[1],
            fastest_time_s=fastest_time_s + self._follower.statistics.stopped_s,
            fastest_energy_j=fastest_energy_j,
        )

    def _signal(self) -> Signal | None:
        """Return the prices that count now, if a cheapest policy is in force."""
        if not isinstance(self.in_force, CheapestPolicy) or self._control.signals is None:
            return None
        return self._control.signals.signals.get(self.in_force.signal)

    def _take_up(self, timetable: Timetable | None) -> None:
        self._timetable = timetable
        if timetable is None:
            return
        costs = self._control.costs
        costs.bound = timetable.bound if costs.bound is None else costs.bound
        begins_s = timetable.edges_s[:-1][:_MOST_ENTRIES]
        self._recorder.event(
            TimetableMade(
                cost=timetable.cost,
                bound=timetable.bound,
                fastest_cost=timetable.fastest_cost,
                unit=timetable.signal.unit,
                entries=tuple(zip(begins_s.round(1).tolist(), timetable.plans.tolist(), strict=False)),
                ends=round(float(timetable.edges_s[-1]), 1),
                mean_from=timetable.mean_from_s,
            )
        )
        self._recorder.event(_costs_so_far(costs))

    def add_halt(self, waited: Waited) -> None:
        """Record and add the cost of a time in which training stood still."""
        end_s, energy_j = self._rank.timebase.date().timestamp(), waited.energy_j
        self._recorder.event(Halted(time_s=round(waited.time_s, 3), energy_j=round(energy_j, 3)))
        if not math.isfinite(energy_j):
            energy_j = self._follower.idle_power_w * waited.time_s
        signal = self._signal()
        if signal is not None:
            self._control.costs.add_halt(signal, begin_s=end_s - waited.time_s, end_s=end_s, energy_j=energy_j)


def _costs_so_far(costs: CostAccount, *, done: bool = False) -> CostsSoFar:
    return CostsSoFar(
        iterations=costs.iterations,
        cost=costs.cost,
        fastest_cost=costs.fastest_cost,
        bound=costs.bound,
        halted_s=round(costs.halted_s, 3),
        done=done,
    )


def _tell_costs(control: JobControl, recorder: Recorder) -> None:
    """Record what the job has cost, at its end, and print what that saved."""
    costs, policy = control.costs, control.policy
    if not costs.iterations:
        return
    is_done = isinstance(policy, CheapestPolicy) and control.steps >= policy.total_steps
    recorder.event(_costs_so_far(costs, done=is_done))
    if is_done and costs.saved is not None:
        compared = f"{abs(costs.saved):.1%} {'more' if costs.saved < 0 else 'less'}"
        recorder.say(f"by the signal, energy cost {compared} than under the plan of slowdown 0 throughout")
