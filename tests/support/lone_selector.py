"""A frontier of thirty plans, and a selector of plans on the only rank of a job."""

from dataclasses import replace

from perseus_ds.server.selector import PlanSelector
from virtual.job import LoneCommunicator, job_report
from virtual.time import VirtualTime

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.policies import SlowdownPolicy
from perseus_ds.server.job_control import JobControl

INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),),)
PLANS = tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - 10 * i,),), 1.0 + 0.01 * i, 100.0 - i) for i in range(30))
PROVENANCE = Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=1, solver="none")
FRONTIER = Frontier(PLANS, 1.0, PLANS[0], PROVENANCE)


class Job:
    """A selector on the only rank of a job."""

    def __init__(self, policy=SlowdownPolicy(max_slowdown=0.05), progress=None):  # noqa: B008 - it is frozen
        self.time = VirtualTime()
        self.control = JobControl(policy, 1, timebase=self.time)
        self.control.progress = progress or {}
        self.events, self.said = [], []
        self.selector = PlanSelector(
            LoneCommunicator(),
            FRONTIER,
            self.control,
            timebase=self.time,
            record=self.events.append,
            say=self.said.append,
        )
        self._sent = self._ran = None

    def iterate(self, time_ratio=1.0, power_ratio=1.0):
        """Run an iteration; return the plan that it ran, None for default clocks."""
        ran = self.selector.in_force
        plan = FRONTIER.plans[ran.plan]
        time_s = plan.time_s * time_ratio
        power_w = power_ratio * plan.energy_j / plan.time_s
        before, self._ran = self._ran, ran
        self.control.count_step()
        self.selector.advance(self._sent, None, before)
        report = job_report({"time_s": time_s, "energy_j": power_w * time_s})
        self._sent = replace(report, decided=self.selector.decided)
        return None if ran.paused else ran.plan
