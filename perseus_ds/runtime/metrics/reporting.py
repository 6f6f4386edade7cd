"""Gives a job's figures to Prometheus while it trains, without ever taking time of the training thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from prometheus_client import generate_latest

from perseus_ds.artifacts.io import write_atomically
from perseus_ds.report.live.facts import JobFacts
from perseus_ds.runtime.config import MetricsConfig
from perseus_ds.runtime.metrics.endpoint import MetricsServer
from perseus_ds.runtime.metrics.families import registry_of

logger = logging.getLogger("perseus_ds")
_PERIOD_S = 5.0
_CLOSE_S = 2.0


class MetricsReporter:
    """Serves or writes the figures until closed, on threads of its own."""

    def __init__(self, config: MetricsConfig, facts: Callable[[], JobFacts], on_error: Callable[[str], None]) -> None:
        """Begin.

        Args:
            config: Where to.
            facts: Returns the facts of the job, from any thread.
            on_error: Told once, on another thread, why there are no figures at one of the places.
        """
        self._config = config
        self._registry = registry_of(facts)
        self._on_error = on_error
        self._stopping = threading.Event()
        work = ((self._serve, config.port), (self._write_all, config.textfile))
        self._threads = [
            threading.Thread(target=target, name="perseus-metrics", daemon=True)
            for target, wanted in work
            if wanted is not None
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write the last figures and stop; harmless when called again."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _serve(self) -> None:
        assert self._config.port is not None
        try:
            server = MetricsServer(self._config.host, self._config.port, self._registry)
        except OSError as error:
            self._fail(f"nothing is served at {self._config.host}:{self._config.port} ({error})")
            return
        server.serve_until(self._stopping)

    def _write_all(self) -> None:
        path = Path(str(self._config.textfile))
        works, is_last = True, False
        while not is_last:
            is_last = self._stopping.is_set()
            problem = _write(path, generate_latest(self._registry))
            if problem and works:
                works = False
                self._fail(problem)
            self._stopping.wait(_PERIOD_S)

    def _fail(self, problem: str) -> None:
        logger.warning("perseus: metrics: %s. Training goes on without them.", problem)
        self._on_error(problem)


def _write(path: Path, text: bytes) -> str:
    """Write the file; return why that does not work, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        return f"{path} cannot be written ({error})"
    return ""
