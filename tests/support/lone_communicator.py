"""A job of one rank whose collectives return at once; and phases driven without a runtime."""

import numpy as np

from perseus_ds.artifacts.rank_report import JobReport, RankReport, RankReports
from perseus_ds.device.moments import PassedMoment
from perseus_ds.device.timers import FinishedIteration
from perseus_ds.distributed import Messages, PipelineTopology
from perseus_ds.runtime.phases import IterationMeasurement


class LoneCommunicator:
    """What ``Communicator`` does in a job of one rank."""

    world_size = 1
    is_first = True
    is_connected = True

    def __init__(self, topology=None):
        self.topology = topology or PipelineTopology(0, (0,))
        self.pipeline_of_rank = np.array([0])
        self.messages = Messages()

    def gather(self, value):
        return [value]

    def from_first(self, make):
        return make()

    def together(self, check):
        check()

    def first_of(self, value):
        return value

    all_max = all_sum = stage_max = first_of

    def agree(self, value, combined):
        return combined([value])

    pipeline_gather = gather

    def barrier(self):
        pass

    pipeline_barrier = barrier

    def start_exchange(self, numbers, answers, widths):
        common, own = answers(np.array([numbers], dtype=float))
        return _Arrived(np.concatenate([common, own[0]]))

    start = start_exchange

    def more_exchanges(self):
        return self


class _Arrived:
    """What ``PendingAnswer`` does for numbers that are there at once."""

    def __init__(self, numbers):
        self._numbers = numbers

    def result(self):
        return self._numbers

    def is_there_within(self, timeout_s):
        return True


def seen(*, time_s=1.0, energy_j=100.0, start_s=0.0, spans=(), clock_mhz=None, failed=False, reports=None):
    """An iteration as a phase receives it."""
    begin, end = PassedMoment(start_s), PassedMoment(start_s + time_s)
    finished = FinishedIteration(begin, end, lambda: time_s, lambda: list(spans))
    times_s = (start_s, start_s + time_s)
    return IterationMeasurement(finished, lambda: energy_j, lambda: True, times_s, clock_mhz or {}, failed, reports)


def reports_of(*fields, pipelines=None):
    """The reports of as many ranks as there are fields, as rank 0 has them."""
    numbers = [RankReport(**{"time_s": 1.0, "energy_j": 100.0, **field}).as_numbers() for field in fields]
    return RankReports(np.array(numbers), None if pipelines is None else np.array(pipelines))


def told_of(*fields):
    """What all ranks are told of such reports."""
    return JobReport.of(reports_of(*fields))


def drive(phase, measure, most=100):
    """Run a phase to its end, each iteration reported by this rank alone; return what it wanted, and what it returned.

    Args:
        phase: The generator.
        measure: Returns what is seen of an iteration, given what was wanted of it and its number.
        most: Iterations after which a phase that has not ended is stopped.
    """
    wanted = [next(phase)]
    for number in range(most):
        reports = told_of({**wanted[-1].reported, **wanted[-1].reported_later()})
        iteration = measure(wanted[-1], number)
        try:
            wanted.append(phase.send(seen(**{"reports": reports, **iteration})))
        except StopIteration as end:
            return wanted, end.value
    phase.close()
    return wanted, None
