"""A job's figures for Prometheus during training, over HTTP or in a file for node_exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from wsgiref.simple_server import ServerHandler

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from perseus_ds.artifacts.run_savings import SavingSummary
from perseus_ds.config import MetricsConfig
from perseus_ds.progress.facts import JobFacts, PipelineFacts, PlanFacts
from perseus_ds.progress.present import PHASES

_PERIOD_S = 5.0
_CLOSE_S = 2.0
_CLIENT_TIMEOUT_S = 5.0
# Time of each answer, so that clients take little processor time from training.
_PAUSE_S = 0.05
_LABELS = ("training_job", "simulated", "energy_note")
_Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Values: TypeAlias = Mapping[str, float | None]


class MetricsReporter:
    """Serves or writes the figures until closed, on its own threads."""

    def __init__(self, config: MetricsConfig, facts: Callable[[], JobFacts], on_error: Callable[[str], None]) -> None:
        """Start to serve or write figures.

        Other threads call ``facts``, and ``on_error`` with the reason why figures are not available at an address.
        """
        self._registry = registry_of(facts)
        self._on_error = on_error
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        if config.port is not None:
            self._start(self._serve, config.host, config.port)
        if config.textfile is not None:
            self._start(self._write_all, Path(config.textfile))

    def close(self) -> None:
        """Write the last figures and stop. May be called repeatedly."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="perseus-metrics", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, host: str, port: int) -> None:
        ServerHandler.server_software = "perseus"  # not the versions of Python and its library
        try:
            server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            self._on_error(f"nothing is served at {host}:{port} ({error})")
            return
        server.RequestHandlerClass.timeout = _CLIENT_TIMEOUT_S  # type: ignore[attr-defined]  # of each connection
        self._stopping.wait()
        server.shutdown()
        server.server_close()

    def _write_all(self, path: Path) -> None:
        works, is_last = True, False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_to_textfile(str(path), self._registry)
            except OSError as error:
                if works:
                    self._on_error(f"{path} cannot be written ({error})")
                works = False
            self._stopping.wait(_PERIOD_S)


def registry_of(facts: Callable[[], JobFacts]) -> CollectorRegistry:
    """Return a registry with only the metrics of a job."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(facts))
    return registry


# By field of the facts, which provides the description. Counters and savings include all starts of the job. Gauges are
# current values, and are omitted after the job's end.
_COUNTERS = {
    "iterations": "perseus_iterations",
    "time_s": "perseus_iteration_seconds",
    "clock_changes": "perseus_clock_changes",
    "clock_skips": "perseus_clock_skips",
}
# By field of a saving, and by suffix of the metric's name: of iterations under plans, of all, and of the plan's trial.
_SAVINGS = {
    "gained_s": "gained_seconds",
    "saved": "saving_ratio",
    "saved_error": "saving_error_ratio",
    "slowdown": "slowdown_ratio",
    "slowdown_error": "slowdown_error_ratio",
    "pairs": "pairs",
}
_GAUGES = {
    "step": "perseus_step",
    "total_steps": "perseus_steps_wanted",
    "remaining_s": "perseus_remaining_seconds",
    "iteration_s": "perseus_typical_iteration_seconds",
    "power_w": "perseus_power_watts",
    "present_power_w": "perseus_present_power_watts",
    "highest_power_w": "perseus_highest_power_watts",
    "lowest_power_w": "perseus_lowest_power_watts",
    "power_change_w": "perseus_power_change_watts",
    "power_window_s": "perseus_power_window_seconds",
    "cap_w": "perseus_power_cap_watts",
    "profiling_j": "perseus_profiling_joules",
    "profiling_s": "perseus_profiling_seconds",
    "drift": "perseus_drift_ratio",
    "straggler_slowdown": "perseus_straggler_slowdown_ratio",
    "silent_s": "perseus_silent_seconds",
}
_GAUGES_OF_PLAN = {
    "plan": "perseus_plan",
    "promised_slowdown": "perseus_plan_promised_slowdown_ratio",
    "promised_saving": "perseus_plan_promised_saving_ratio",
}


class JobCollector(Collector):
    """Creates metrics from the facts at each request."""

    def __init__(self, facts: Callable[[], JobFacts]) -> None:
        self._facts = facts
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        with self._one_at_a_time:
            time.sleep(_PAUSE_S)
            facts = self._facts()

        def metric(kind: _Kind, name: str, text: str, values: _Values, *labels: str) -> Metric:
            made = kind(name, text, labels=(*_LABELS, *labels))
            for label, value in values.items():
                if value is not None:
                    about = (facts.name, str(facts.simulated).lower(), facts.energy_note)
                    made.add_metric((*about, *([label] if labels else [])), value)
            return made

        def of(model: type[BaseModel], field: str) -> str:
            return model.model_fields[field].description or ""

        for field, name in _COUNTERS.items():
            yield metric(CounterMetricFamily, name, of(JobFacts, field), {"": getattr(facts, field)})
        energies_j = {str(each.pipeline): each.energy_j for each in facts.pipelines}
        text = of(PipelineFacts, "energy_j")
        yield metric(CounterMetricFamily, "perseus_energy_joules", text, energies_j, "pipeline")
        # Not a counter, because it decreases when typical iterations become faster.
        saved_j = {str(each.pipeline): each.saved_j for each in facts.pipelines}
        text = of(PipelineFacts, "saved_j")
        yield metric(GaugeMetricFamily, "perseus_saved_joules", text, saved_j, "pipeline")

        def now(values: _Values) -> _Values:
            return {} if facts.ended else values

        planned = facts.under_plans.iterations if facts.under_plans is not None else 0
        text = "Iterations under plans."
        yield metric(CounterMetricFamily, "perseus_planned_iterations", text, {"": planned})
        savings = {"perseus_": facts.under_plans, "perseus_whole_": facts.whole}
        for prefix, saving in savings.items():
            for field, suffix in _SAVINGS.items():
                value = getattr(saving, field, None)
                yield metric(GaugeMetricFamily, prefix + suffix, of(SavingSummary, field), {"": value})
            is_undecided = None if saving is None else float(saving.saved is None)
            text = "1 as long as it is undecided whether plans save energy."
            yield metric(GaugeMetricFamily, f"{prefix}undecided", text, {"": is_undecided})
        real = None if facts.plan is None else facts.plan.real
        for field, suffix in _SAVINGS.items():
            value = getattr(real, field, None)
            yield metric(GaugeMetricFamily, f"perseus_plan_{suffix}", of(SavingSummary, field), now({"": value}))

        for field, name in _GAUGES.items():
            yield metric(GaugeMetricFamily, name, of(JobFacts, field), now({"": getattr(facts, field)}))
        for field, name in _GAUGES_OF_PLAN.items():
            yield metric(GaugeMetricFamily, name, of(PlanFacts, field), now({"": getattr(facts.plan, field, None)}))
        counts = {
            "perseus_limited_gpus": (of(JobFacts, "limits"), len(facts.limits) + facts.more_limits),
            "perseus_command_pending": ("1 while a command is not in force yet.", facts.pending is not None),
            "perseus_failed_ranks": (of(JobFacts, "failed_ranks"), len(facts.failed_ranks) + facts.more_failed_ranks),
            "perseus_slowed_gpus": (
                "GPUs with a clock that is locked on purpose.", sum(map(bool, facts.clocks_asked_mhz))
            ),
            "perseus_ranks_below_clock": (
                "Ranks with a GPU that does not reach the requested clock.", len(facts.ranks_below_their_clock)
            ),
        }  # fmt: skip
        for name, (text, count) in counts.items():
            yield metric(GaugeMetricFamily, name, text, now({"": float(count)}))
        limits_w = {str(rank): power_w for rank, power_w, _ in facts.limits}
        text = "Power limit of a GPU, if it is lower than during profiling."
        yield metric(GaugeMetricFamily, "perseus_gpu_power_limit_watts", text, now(limits_w), "rank")
        phases = {phase: float(phase == facts.phase) for phase in PHASES if phase != "verdict"}
        text = "1 for the current phase, 0 for others."
        yield metric(GaugeMetricFamily, "perseus_phase", text, phases, "phase")
