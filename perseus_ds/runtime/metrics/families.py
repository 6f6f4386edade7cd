"""The facts of a job as metrics, for ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perseus_ds.report.live.facts import JobFacts, PipelineFacts

_LABELS = ("training_job", "simulated")
_PHASES = ("calibrate", "warm-up", "profile", "plan", "default", "run", "pause", "halt", "observe")


class JobCollector(Collector):
    """Makes metrics of the facts whenever they are asked for.

    Counters count over all starts of the job; gauges are those of now, and there are none after the job's end.

    Args:
        facts: Returns the facts.
    """

    def __init__(self, facts: Callable[[], JobFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        facts = self._facts()
        own = _Labelled(facts)
        yield own.counter("perseus_iterations", "Training iterations.", facts.iterations)
        yield own.counter("perseus_iteration_seconds", "Time of all iterations.", facts.time_s)
        yield own.counter("perseus_clock_changes", "Clock changes of all GPUs.", facts.clock_changes)
        yield own.counter("perseus_clock_skips", "Clock changes that were left out.", facts.clock_skips)
        yield own.counter("perseus_planned_iterations", "Iterations under plans.", facts.planned)
        yield own.counter("perseus_planned_seconds", "Time of the iterations under plans.", facts.planned_s)
        yield own.counter(
            "perseus_planned_default_seconds",
            "Time that the iterations under plans take at default clocks.",
            facts.default_s,
        )
        yield own.by_pipeline("perseus_energy_joules", "Energy of all iterations.", [p.energy_j for p in _parts(facts)])
        yield own.by_pipeline(
            "perseus_planned_energy_joules",
            "Energy of the iterations under plans.",
            [p.planned_j for p in _parts(facts)],
        )
        yield own.by_pipeline(
            "perseus_planned_default_energy_joules",
            "Energy that the iterations under plans take at default clocks.",
            [p.default_j for p in _parts(facts)],
        )
        yield from _of_now(facts, own)


class _Labelled:
    """Makes metrics with the labels of a job."""

    def __init__(self, facts: JobFacts) -> None:
        self._values = (facts.name, str(facts.simulated).lower())

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def by_pipeline(self, name: str, text: str, values: Sequence[float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, "pipeline"))
        for pipeline, value in enumerate(values):
            family.add_metric((*self._values, str(pipeline)), value)
        return family

    def gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        if value is not None:
            family.add_metric(self._values, value)
        return family

    def phases(self, present: str | None) -> Metric:
        family = GaugeMetricFamily(
            "perseus_phase", "1 for what the job does, 0 for the others.", labels=(*_LABELS, "phase")
        )
        for phase in _PHASES:
            family.add_metric((*self._values, phase), float(phase == present))
        return family


def _parts(facts: JobFacts) -> Sequence[PipelineFacts]:
    return facts.pipelines


def _of_now(facts: JobFacts, own: _Labelled) -> Iterator[Metric]:
    """Yield the gauges; all of them have no value after the job's end, since there is no present state."""
    plan = facts.plan
    gauges: dict[str, tuple[str, float | None]] = {
        "perseus_step": ("The last training step.", facts.step),
        "perseus_steps_wanted": ("Steps of the whole training, where the policy names them.", facts.total_steps),
        "perseus_remaining_seconds": ("Estimated time until the last step is done.", facts.remaining_s),
        "perseus_typical_iteration_seconds": ("Median time of the last iterations.", facts.iteration_s),
        "perseus_power_watts": ("Mean power of all GPUs in the last iterations.", facts.power_w),
        "perseus_plan": ("The plan in use: its place on the frontier, 0 the fastest.", plan.plan if plan else None),
        "perseus_plan_promised_slowdown_ratio": (
            "Promised change of time; 0.01 is 1 % longer than default clocks.",
            plan.promised_slowdown if plan else None,
        ),
        "perseus_plan_slowdown_ratio": ("The same as it runs, median.", plan.slowdown if plan else None),
        "perseus_plan_promised_saving_ratio": (
            "Promised saving of energy; 0.1 is 10 % less than default clocks.",
            plan.promised_saving if plan else None,
        ),
        "perseus_plan_saving_ratio": ("The same as it runs, of a typical iteration.", plan.saving if plan else None),
        "perseus_profiling_joules": ("Additional energy for profiling.", facts.profiling_j),
        "perseus_profiling_seconds": ("Additional time for profiling.", facts.profiling_s),
        "perseus_drift_ratio": ("How far instructions are from the profile.", facts.drift),
        "perseus_straggler_slowdown_ratio": (
            "How many times as long the slowest pipeline takes; 1 without a straggler.", facts.straggler_slowdown
        ),
        "perseus_failed_ranks": (
            "Ranks that have fallen back to default clocks.", len(facts.failed_ranks) + facts.more_failed_ranks
        ),
        "perseus_ranks_below_clock": (
            "Ranks whose GPU does not reach the clock that it was asked for.", len(facts.ranks_below_their_clock)
        ),
        "perseus_silent_seconds": ("Time since the last record of the job.", facts.silent_s),
    }  # fmt: skip
    for name, (text, value) in gauges.items():
        yield own.gauge(name, text, None if facts.ended else value)
    yield own.phases(facts.phase)


def registry_of(facts: Callable[[], JobFacts]) -> CollectorRegistry:
    """Return a registry of nothing but the metrics of a job."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(facts))
    return registry
