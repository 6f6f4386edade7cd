"""The first phase: ordinary iterations until times are steady."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from perseus_ds.artifacts.profile_metadata import ProfileInfo
from perseus_ds.device.gpu.latency import counter_period_s
from perseus_ds.device.rank_clocks import ClockPlan
from perseus_ds.device.timers import Span
from perseus_ds.errors import GpuError, PerseusError
from perseus_ds.profiler.blocking import measure_blocking_power_w
from perseus_ds.profiler.fixed_durations import load_durations_s, tail_durations_s, transfer_durations, without_gaps
from perseus_ds.runtime.phases import Observe, Phase, Seen, Tools

_STEADY = 0.02
_BLOCKING_WINDOW_S = 0.45
_REFRESHES = 4.5
_SHORT_LOOK_S = 0.35


@dataclass(frozen=True)
class Before:
    """What iterations were like before any clock was changed, on this rank.

    Attributes:
        spans: Operations, by iteration.
        time_s: A typical iteration [s].
        energy_j: Of this rank's GPU in a typical iteration [J].
        counter_period_s: How often the energy counter is refreshed [s].
        info: The job, and what of the iteration has no clock to choose; complete on rank 0.
    """

    spans: list[list[Span]]
    time_s: float
    energy_j: float
    counter_period_s: float
    info: ProfileInfo


class WarmUp:
    """Ordinary iterations until times are steady, in which loads, transfers and the tail are measured.

    Args:
        tools: Of this rank.
        following: Makes the next phase.
        records: Whether instructions are to be repeated afterwards.
    """

    name = "warm-up"
    clock_plan = ClockPlan.none()
    measures = True

    def __init__(self, tools: Tools, following: Callable[[Tools, Before], Phase], *, records: bool = False) -> None:
        self._tools = tools
        self._following = following
        self._records = records
        self._spans: list[list[Span]] = []
        self._times_s: list[float] = []
        self._energies_j: list[float] = []

    @property
    def records(self) -> bool:
        return self._records and len(self._spans) >= self._tools.config.profile.warm_up - 1

    def after(self, seen: Seen) -> Phase:
        self._spans.append(without_gaps(seen.spans(), seen.time_s))
        self._times_s.append(seen.time_s)
        self._energies_j.append(seen.energy_j)
        least = self._tools.config.profile.warm_up
        if len(self._spans) < least:
            return self
        drifts = abs(self._times_s[-1] / self._times_s[-2] - 1) > _STEADY
        if len(self._spans) < 3 * least and self._tools.ranks.all_max(float(drifts)):
            return self
        try:
            return self._following(self._tools, self._before())
        except (PerseusError, OSError) as error:  # the same on all ranks
            self._tools.fail(error)
            return Observe()

    def _look_at_counter(self) -> tuple[float, float]:
        """Return how often the energy counter is refreshed [s], and what this rank's GPU draws while it waits [W].

        Raises:
            GpuError: On all ranks, if it cannot be told on one.
        """
        tools = self._tools
        period_s, power_w = 0.0, 0.0
        problem: GpuError | None = None
        try:
            period_s = tools.patience.call(lambda: counter_period_s(tools.gpu, _SHORT_LOOK_S) or 0.0)
            period_s = period_s or tools.patience.call(lambda: counter_period_s(tools.gpu) or 0.0)
        except GpuError as error:
            problem = error
        window_s = max(_BLOCKING_WINDOW_S, _REFRESHES * tools.ranks.all_max(period_s))
        try:
            power_w = measure_blocking_power_w(tools.gpu, tools.ranks.topology, tools.job.device, window_s)
        except GpuError as error:
            problem = problem or error
        for found in tools.ranks.all_gather(problem):
            if found is not None:
                raise found
        return period_s, power_w

    def _before(self) -> Before:
        tools = self._tools
        spans = self._spans[1:]  # the first iteration allocates and agrees on shapes
        period_s, power_w = self._look_at_counter()
        profile_key = tools.profile_key()
        reports = tools.ranks.gather((tools.ranks.topology.data_parallel_rank, spans, power_w))
        pipeline = [spans for data_parallel_rank, spans, _ in reports if data_parallel_rank == 0]
        rest = {
            "load_s": load_durations_s(pipeline),
            "transfers": transfer_durations(pipeline),
            "tail_s": tail_durations_s([spans for _, spans, _ in reports]),
            "blocking_power_w": statistics.mean(power_w for *_, power_w in reports) if reports else power_w,
            "job": profile_key,
        }
        return Before(
            spans,
            statistics.median(self._times_s[1:]),
            statistics.mean(self._energies_j[1:]),
            period_s,
            tools.job.info.model_copy(update={**rest, "rows": []} if reports else {"blocking_power_w": power_w}),
        )
