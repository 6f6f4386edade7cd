"""A job's figures for Prometheus, while it trains: served over HTTP or written for node_exporter, on other threads."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perseus_ds.runtime.config import MetricsConfig
from perseus_ds.runtime.progress import JobFacts

logger = logging.getLogger("perseus_ds")
_PERIOD_S = 5.0
_CLOSE_S = 2.0
_CLIENT_TIMEOUT_S = 5.0
# After each request, so that clients that ask without pause take little processor time from training.
_PAUSE_S = 0.05
_LABELS = ("training_job", "simulated")
_PHASES = ("calibrate", "warm-up", "profile", "optimizing", "default", "run", "pause", "halt", "observe")


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
        labels = (facts.name, str(facts.simulated).lower())
        yield from _counters(facts, labels)
        for name, (text, value) in _gauges(facts).items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            if value is not None and not facts.ended:
                gauge.add_metric(labels, value)
            yield gauge
        phases = GaugeMetricFamily(
            "perseus_phase", "1 for what the job does, 0 for the others.", labels=(*_LABELS, "phase")
        )
        for phase in _PHASES:
            phases.add_metric((*labels, phase), float(phase == facts.phase))
        yield phases


def _counters(facts: JobFacts, labels: tuple[str, str]) -> Iterator[Metric]:
    for name, text, value in (
        ("perseus_iterations", "Training iterations.", facts.iterations),
        ("perseus_iteration_seconds", "Time of all iterations.", facts.time_s),
        ("perseus_clock_changes", "Clock changes of all GPUs.", facts.clock_changes),
        ("perseus_clock_skips", "Clock changes that were left out.", facts.clock_skips),
        ("perseus_planned_iterations", "Iterations under plans.", facts.planned),
    ):
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric(labels, value)
        yield counter
    energy = CounterMetricFamily("perseus_energy_joules", "Energy of all iterations.", labels=(*_LABELS, "pipeline"))
    # Typical iterations may become faster or slower, so this may fall.
    saved = GaugeMetricFamily(
        "perseus_saved_joules",
        "Energy saved under plans so far, against default clocks.",
        labels=(*_LABELS, "pipeline"),
    )
    for pipeline in facts.pipelines:
        energy.add_metric((*labels, str(pipeline.pipeline)), pipeline.energy_j)
        saved.add_metric((*labels, str(pipeline.pipeline)), pipeline.saved_j)
    yield from (energy, saved)
    for name, text, figure in (
        ("perseus_gained_seconds", "Time gained under plans so far, against default clocks.", facts.gained_s),
        ("perseus_saving_ratio", "Energy saved by a typical iteration under plans; 0.1 is 10 %.", facts.saved),
        ("perseus_slowdown_ratio", "Change of its time; 0.01 is 1 % longer than default clocks.", facts.slowdown),
    ):
        total = GaugeMetricFamily(name, text, labels=_LABELS)
        if figure is not None:
            total.add_metric(labels, figure)
        yield total


def _gauges(facts: JobFacts) -> dict[str, tuple[str, float | None]]:
    plan = facts.plan
    return {
        "perseus_step": ("The last training step.", facts.step),
        "perseus_steps_wanted": ("Steps of the whole training, where the policy names them.", facts.total_steps),
        "perseus_remaining_seconds": ("Estimated time until the last step is done.", facts.remaining_s),
        "perseus_typical_iteration_seconds": ("Median time of the last iterations.", facts.iteration_s),
        "perseus_power_watts": ("Mean power of all GPUs in the last iterations.", facts.power_w),
        "perseus_present_power_watts": ("Power of all GPUs in the last iteration.", facts.present_power_w),
        "perseus_power_cap_watts": ("The power cap in force, of all GPUs.", facts.cap_w),
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
