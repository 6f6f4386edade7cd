"""A job in virtual time under random faults, with simulated GPUs: hours take minutes.

After each fault the job must return to a plan, and each fault may cause at most one warning per rank. The last fault is
permanent: clocks must then be the default ones.
"""

import random

from fault_outcomes import Outcome
from virtual.gpu import DRIVER_FAULTS, FaultyGpu
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_events import Failed

STAGES_S = (0.036, 0.034, 0.034, 0.05)
GPU_FAULTS = (*DRIVER_FAULTS, "counter stands still")
JOB_FAULTS = ("slow rank", "drift", "orders", "restart")
_SHORT, _LONG = (0.2, 20.0), (60.0, 400.0)
_AT_ONCE = 4
_BACK_WITHIN_S = 3600.0
_GOALS = ({"max_slowdown": None}, {"max_slowdown": 0.1})


class HostileDay:
    """A job under random faults."""

    def __init__(self, folder, *, seed):
        self.outcomes = {cause: Outcome() for cause in GPU_FAULTS + JOB_FAULTS}
        self._random = random.Random(seed)
        self.job = VirtualJob(folder, stages_s=STAGES_S, micro_batches=8, gpu_class=FaultyGpu, mode="auto")
        self._warnings = 0

    def run(self, minutes):
        """Train this long under faults, of which each happens at least once, then under a permanent one.

        Returns:
            Broken guarantees.
        """
        end_s = self.job.time.now_s() + 60.0 * minutes
        is_back = True
        while is_back and (self.job.time.now_s() < end_s or not all(each.times for each in self.outcomes.values())):
            fewest = min(outcome.times for outcome in self.outcomes.values())
            rarest = [cause for cause, outcome in self.outcomes.items() if outcome.times == fewest]
            is_back = self._let_happen(self._random.choice(rarest))
        self._end_with_a_fault_that_stays()
        return [f"{cause}: {broken}" for cause, outcome in self.outcomes.items() for broken in outcome.broken]

    def _let_happen(self, cause):
        outcome = self.outcomes[cause]
        self.job.train(self._random.randrange(12))  # often before the job has found its plan again
        self._cause(cause, self._random.uniform(*self._random.choice((_SHORT, _LONG))))
        ended_s = self.job.time.now_s()
        while not self.job.is_under_a_plan:
            if self.job.time.now_s() > ended_s + _BACK_WITHIN_S:
                outcome.broken.append(f"not back after {_BACK_WITHIN_S:.0f} s")
                return False
            self.job.train(_AT_ONCE)
        outcome.add(self.job.time.now_s() - ended_s, [event.rank for event in self._warned()])
        return True

    def _warned(self):
        """Return the failures of ranks since the last call, each of which is a warning."""
        failed = [record for record in self.job.events(Failed) if record.event == "failure"]
        known, self._warnings = self._warnings, len(failed)
        return failed[known:]

    def _cause(self, cause, for_s):
        """Cause a fault for some time [s]."""
        job, rank = self.job, self._random.randrange(len(STAGES_S))
        if cause in GPU_FAULTS:
            affected = job.gpus if self._random.random() < 0.2 else [job.gpus[rank]]
            for gpu in affected:
                self._later(lambda gpu=gpu: gpu.begin(cause))
            self._train_for(for_s)
            for gpu in affected:
                self._later(gpu.end)
            job.train(1)
        elif cause == "slow rank":
            job.slowdowns[rank] = self._random.uniform(1.2, 2.0)
            self._train_for(for_s)
            job.slowdowns[rank] = 1.0
        elif cause == "drift":
            factor = self._random.uniform(0.7, 1.4)
            job.slowdowns = [factor] * len(STAGES_S)
            self._train_for(for_s)
            job.slowdowns = [1.0] * len(STAGES_S)
        elif cause == "orders":
            self._give_orders(for_s)
        else:
            job.restart()

    def _give_orders(self, for_s):
        for _ in range(self._random.randrange(1, 6)):
            command = self._random.choice(("pause", "resume", "status", "set"))
            if command == "set":
                self.job.control(command="set", goal=self._random.choice(_GOALS))
            else:
                self.job.control(command=command)
            self._train_for(for_s / 5)
        self.job.control(command="resume")

    def _later(self, function):
        """Call a function within the next iteration."""

        def call():
            self.job.time.sleep(self._random.uniform(0.0, 0.5))
            function()

        self.job.time.thread(call, "fault").start()

    def _train_for(self, seconds):
        end_s = self.job.time.now_s() + seconds
        while self.job.time.now_s() < end_s:
            self.job.train(1)

    def _end_with_a_fault_that_stays(self):
        job, cause = self.job, "driver error"
        rank = self._random.randrange(len(STAGES_S))
        job.gpus[rank].begin(cause)
        self._train_for(120.0)
        if not (job.has_fallen_back(rank) and job.gpus[rank].is_at_default_clock):
            self.outcomes[cause].broken.append("a permanent fault leaves a clock that is not the default")
        job.close()
        if not all(gpu.is_at_default_clock for gpu in job.gpus):
            self.outcomes[cause].broken.append("the job leaves clocks that are not the default")
