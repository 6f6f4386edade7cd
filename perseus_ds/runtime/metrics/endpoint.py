"""An HTTP server of metrics that no client can harm: few connections, each for a short time."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

from perseus_ds.device.processor_share import ProcessorShare

_MOST_CONNECTIONS = 8
_TIMEOUT_S = 5.0
_PERIOD_S = 0.5
_SHARE = 0.01
"""Of one processor."""


class MetricsServer(TCPServer):
    """Answers every GET with the metrics, each connection on a thread of its own.

    There are 8 connections at most: one more ends the oldest. So half-open connections use little, and keep nobody
    out. However many requests there are, answers take a small share of a processor: the next connection waits until
    the pause after the last ones is over.

    Args:
        host: Where to listen.
        port: Where to listen.
        registry: The metrics.

    Raises:
        OSError: It cannot listen there.
    """

    allow_reuse_address = True
    request_queue_size = 128
    timeout = _PERIOD_S

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        # With the time at which each has to end; the oldest first.
        self._open: dict[socket.socket, float] = {}
        self._processor = ProcessorShare(_SHARE)
        super().__init__((host, port), type("_HandlerOfJob", (_Handler,), {"registry": registry}))

    def serve_until(self, stopping: threading.Event) -> None:
        """Serve until told to stop; then end all connections."""
        with self:
            while not stopping.is_set():
                began_s = time.thread_time()
                self.handle_request()
                self._end_connections(before_s=time.monotonic())
                self._processor.add(time.thread_time() - began_s)
                stopping.wait(self._processor.pause_s())
        self._end_connections(before_s=math.inf)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        with self._lock:
            self._open[request] = time.monotonic() + _TIMEOUT_S
            surplus = [*self._open][:-_MOST_CONNECTIONS]
        for connection in surplus:
            _end(connection)
        name = "perseus-metrics-answer"
        threading.Thread(target=self._answer, args=(request, client_address), name=name, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: it is the client's mistake."""

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)
            self._processor.add(time.thread_time())

    def _end_connections(self, before_s: float) -> None:
        """End the connections whose time is over at some moment."""
        with self._lock:
            late = [connection for connection, until_s in self._open.items() if until_s < before_s]
        for connection in late:
            _end(connection)


class _Handler(MetricsHandler):
    timeout = _TIMEOUT_S
    server_version, sys_version = "perseus", ""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)
