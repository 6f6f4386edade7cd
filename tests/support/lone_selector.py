"""A frontier of thirty plans, and the plan selector of a job of one rank."""

from types import SimpleNamespace

from pipelines import one_f_one_b
from seen import seen
from virtual.time import VirtualTime

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.commands import parse_command
from perseus_ds.policy.goal import Goal
from perseus_ds.server.frontiers import Planner
from perseus_ds.server.iterations import Run
from perseus_ds.server.job import Place
from perseus_ds.server.job_control import JobControl
from perseus_ds.server.orders import Orders
from perseus_ds.server.phases import ModeContext
from perseus_ds.server.selector import PlanSelector
from perseus_ds.server.state import PlanState

INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),),)
PLANS = tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - 10 * i,),), 1.0 + 0.01 * i, 100.0 - i) for i in range(30))
PROVENANCE = Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=1, solver="none")
FRONTIER = Frontier(PLANS, 1.0, PLANS[0], PROVENANCE)
DAG = Dag.build(one_f_one_b(ranks=1, micro_batches=1))


class Job:
    """Plan selector of a job of one rank."""

    def __init__(self, goal=Goal(max_slowdown=0.05), state=None):  # noqa: B008 - it is frozen
        self.time = VirtualTime()
        self.control = JobControl(goal, 1, timebase=self.time)
        self.events, self.said = [], []
        self.control.record = self.events.append
        self.state = PlanState()
        self.state.load(state or {})
        recorder = SimpleNamespace(event=self.events.append, say=self.said.append)
        job = SimpleNamespace(gpus_per_rank=1, places=(Place(pipeline=0, pipeline_rank=0),))
        orders = Orders(job, send_all=None, recorder=recorder, reads=False)
        self.order = orders.first
        context = ModeContext(job, orders, self.state, recorder, self.control, send=None, timebase=self.time)
        Planner(context).use(self.order, FRONTIER)
        self.order.dag = DAG
        self.selector = PlanSelector(context)

    @property
    def in_force(self):
        """Plans of the following iterations."""
        return self.selector.plans()[0]

    def give(self, command, **keys):
        """Give the job a command, and return the answer."""
        return self.control.carry_out(parse_command({"command": command, **keys}))["done"]

    def iterate(self, time_ratio=1.0, power_ratio=1.0):
        """Run an iteration and return its plan, or None for default clocks."""
        ran = self.in_force
        plan = FRONTIER.plans[ran.plan]
        time_s = plan.time_s * time_ratio
        power_w = power_ratio * plan.energy_j / plan.time_s
        self.control.count_step(self.control.steps + 1)
        is_paused = self.selector.is_paused
        plans = {} if is_paused else {0: ran}
        fields = {"time_s": time_s, "energy_j": power_w * time_s}
        self.selector.learn(seen(fields, number=self.control.steps, run=Run("run", plans=plans), order=self.order))
        self.selector.decide()
        return None if is_paused else ran.plan
