"""A job's figures for Prometheus, while it trains: served over HTTP or written for node_exporter, on other threads."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, MetricsHandler, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perseus_ds.runtime.config import MetricsConfig
from perseus_ds.runtime.progress import JobFacts
from perseus_ds.runtime.words import PHASES

logger = logging.getLogger("perseus_ds")
_PERIOD_S = 5.0
_CLOSE_S = 2.0
_CLIENT_TIMEOUT_S = 5.0
# After each request, so that clients that ask without pause take little processor time from training.
_PAUSE_S = 0.05
_LABELS = ("training_job", "simulated")
_Kind: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Values: TypeAlias = Mapping[str, float | None]


class MetricsReporter:
    """Serves or writes the figures until closed, on threads of its own."""

    def __init__(self, config: MetricsConfig, facts: Callable[[], JobFacts], on_error: Callable[[str], None]) -> None:
        """Begin.

        Args:
            config: Where to.
            facts: Returns the facts of the job, from any thread.
            on_error: Called once, from another thread, with the reason why there are no figures at one of the places.
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
        """Write the last figures and stop; harmless when called again."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="perseus-metrics", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, host: str, port: int) -> None:
        fields = {
            "registry": self._registry,
            "timeout": _CLIENT_TIMEOUT_S,
            "server_version": "perseus",
            "sys_version": "",
        }
        try:
            server = _Server((host, port), type("_Handler", (MetricsHandler,), fields))
        except OSError as error:
            self._fail(f"nothing is served at {host}:{port} ({error})")
            return
        with server:
            while not self._stopping.wait(_PAUSE_S):
                server.handle_request()

    def _write_all(self, path: Path) -> None:
        works, is_last = True, False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_to_textfile(str(path), self._registry)
            except OSError as error:
                if works:
                    self._fail(f"{path} cannot be written ({error})")
                works = False
            self._stopping.wait(_PERIOD_S)

    def _fail(self, problem: str) -> None:
        logger.warning("perseus: metrics: %s. Training goes on without them.", problem)
        self._on_error(problem)


class _Server(ThreadingHTTPServer):
    """Answers each request on a thread of its own, which ends when its client is silent for some seconds."""

    timeout = 0.2  # of waiting for a request, after which the server looks whether it is to stop

    def __init__(self, address: tuple[str, int], handler: type[MetricsHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: it is the client's mistake."""


def registry_of(facts: Callable[[], JobFacts]) -> CollectorRegistry:
    """Return a registry of nothing but the metrics of a job."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(facts))
    return registry


class JobCollector(Collector):
    """Makes metrics of the facts whenever they are asked for.

    Counters count over all starts of the job, and so do the figures of what was saved; other gauges are those of now,
    and there are none after the job's end.
    """

    def __init__(self, facts: Callable[[], JobFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        facts = self._facts()
        of_job = (facts.name, str(facts.simulated).lower())

        def metric(kind: _Kind, name: str, text: str, values: _Values, *labels: str) -> Metric:
            made = kind(name, text, labels=(*_LABELS, *labels))
            for label, value in values.items():
                if value is not None:
                    made.add_metric((*of_job, *([label] if labels else [])), value)
            return made

        for name, (text, figure) in _counters(facts).items():
            yield metric(CounterMetricFamily, name, text, {"": figure})
        energies_j = {str(pipeline.pipeline): pipeline.energy_j for pipeline in facts.pipelines}
        yield metric(CounterMetricFamily, "perseus_energy_joules", "Energy of all iterations.", energies_j, "pipeline")
        # Typical iterations may become faster or slower, so this may fall.
        saved_j = {str(pipeline.pipeline): pipeline.saved_j for pipeline in facts.pipelines}
        text = "Energy saved under plans so far, against default clocks."
        yield metric(GaugeMetricFamily, "perseus_saved_joules", text, saved_j, "pipeline")
        for name, (text, value) in _gauges_of_all_starts(facts).items():
            yield metric(GaugeMetricFamily, name, text, {"": value})
        for name, (text, value) in _gauges(facts).items():
            yield metric(GaugeMetricFamily, name, text, {} if facts.ended else {"": value})
        limits_w = {} if facts.ended else {str(rank): power_w for rank, power_w, _ in facts.limits}
        text = "Power limit of a GPU, where it is lower than when the profile was measured."
        yield metric(GaugeMetricFamily, "perseus_gpu_power_limit_watts", text, limits_w, "rank")
        phases = {phase: float(phase == facts.phase) for phase in PHASES if phase != "verdict"}
        text = "1 for what the job does, 0 for the others."
        yield metric(GaugeMetricFamily, "perseus_phase", text, phases, "phase")


def _counters(facts: JobFacts) -> dict[str, tuple[str, float]]:
    return {
        "perseus_iterations": ("Training iterations.", facts.iterations),
        "perseus_iteration_seconds": ("Time of all iterations.", facts.time_s),
        "perseus_clock_changes": ("Clock changes of all GPUs.", facts.clock_changes),
        "perseus_clock_skips": ("Clock changes that were left out.", facts.clock_skips),
        "perseus_planned_iterations": ("Iterations under plans.", facts.planned),
    }


def _gauges_of_all_starts(facts: JobFacts) -> dict[str, tuple[str, float | None]]:
    return {
        "perseus_gained_seconds": ("Time gained under plans so far, against default clocks.", facts.gained_s),
        "perseus_saving_ratio": ("Energy saved by a typical iteration under plans; 0.1 is 10 %.", facts.saved),
        "perseus_slowdown_ratio": ("Change of its time; 0.01 is 1 % longer than default clocks.", facts.slowdown),
    }


def _gauges(facts: JobFacts) -> dict[str, tuple[str, float | None]]:
    plan = facts.plan
    return {
        "perseus_step": ("The last training step.", facts.step),
        "perseus_steps_wanted": ("Steps of the whole training, where the policy names them.", facts.total_steps),
        "perseus_remaining_seconds": ("Estimated time until the last step is done.", facts.remaining_s),
        "perseus_typical_iteration_seconds": ("Median time of the last iterations.", facts.iteration_s),
        "perseus_power_watts": ("Mean power of all GPUs in the last iterations.", facts.power_w),
        "perseus_present_power_watts": ("Power of all GPUs in the last iteration.", facts.present_power_w),
        "perseus_highest_power_watts": ("Power of all GPUs in the highest of the last seconds.", facts.highest_power_w),
        "perseus_lowest_power_watts": ("Power of all GPUs in the lowest of them.", facts.lowest_power_w),
        "perseus_power_change_watts": ("The largest difference from one of them to the next.", facts.power_change_w),
        "perseus_power_window_seconds": (
            "What such a second took: whole iterations, so an iteration at least.", facts.power_window_s
        ),
        "perseus_power_cap_watts": ("The power cap in force, of all GPUs.", facts.cap_w),
        "perseus_limited_gpus": (
            "GPUs that may do less than when the profile was measured.", len(facts.limits) + facts.more_limits
        ),
        "perseus_order_pending": ("1 while an order is not in force yet.", float(facts.pending is not None)),
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
