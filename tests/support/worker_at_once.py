"""The optimiser's process, in no time and in this process."""

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.optimizer import optimize
from perseus_ds.optimizer.worker import OptimizeResult


class WorkerAtOnce:
    """What ``OptimizeWorker`` does.

    Attributes:
        problem: Why it fails; a test may set it.
    """

    problem = None

    def __init__(self, request, log_path):
        self._request = request
        self._result = None
        self.stopped = False

    def remaining_s(self):
        return None

    def poll(self):
        if self.problem is not None:
            return OptimizeResult(ok=False, error=self.problem)
        if self._result is None:
            request = self._request
            frontier = optimize(
                request.schedule.to_schedule(),
                StageProfile.load(request.profile),
                plans=20,
                switch_cost_j=request.switch_cost_j,
                switch_cost_s=request.switch_cost_s,
                least_dwell_s=request.least_dwell_s,
            )
            self._result = OptimizeResult(ok=True, frontier=frontier.save(request.out))
        return self._result

    def stop(self):
        self.stopped = True
