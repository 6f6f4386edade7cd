"""An HTTP server of metrics that no client can harm: few connections, each for a short time."""

from __future__ import annotations

import contextlib
import io
import math
import socket
import threading
import time
from collections.abc import Iterable
from socketserver import TCPServer
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

_MOST_CONNECTIONS = 8
_TIMEOUT_S = 5.0
_PERIOD_S = 0.5


class MetricsServer(WSGIServer):
    """Answers every request with the metrics, each connection on a thread of its own.

    There are 8 connections at most: one more ends the oldest. So half-open connections use little, and keep nobody
    out.

    Args:
        host: Where to listen.
        port: Where to listen.
        registry: The metrics.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        # With the time at which each has to end; the oldest first.
        self._open: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)
        self.timeout = _PERIOD_S
        self.set_app(make_wsgi_app(registry))

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of the host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        with self._lock:
            self._open[request] = time.monotonic() + _TIMEOUT_S
            surplus = [*self._open][:-_MOST_CONNECTIONS]
        _end(surplus)
        name = "perseus-metrics-answer"
        threading.Thread(target=self._answer, args=(request, client_address), name=name, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: it is the client's mistake."""

    def serve_until(self, stopping: threading.Event) -> None:
        """Serve until told to stop; then end all connections."""
        with self:
            while not stopping.is_set():
                self.handle_request()
                self._end_connections(before_s=time.monotonic())
        self._end_connections(before_s=math.inf)

    def _end_connections(self, before_s: float) -> None:
        """End the connections whose time is over at some moment."""
        with self._lock:
            late = [connection for connection, until_s in self._open.items() if until_s < before_s]
        _end(late)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                self._open.pop(request, None)


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S
    server_version, sys_version = "perseus", ""

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def get_stderr(self) -> TextIO:
        return io.StringIO()


def _end(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)
