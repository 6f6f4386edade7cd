"""Answers lines of local clients, on one thread with a small share of a processor, however many clients there are."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from perseus_ds.device import local_socket
from perseus_ds.device.processor_share import ProcessorShare

_SHARE = 0.005
"""Of one processor."""
_AT_ONCE = 8
_MOST_CLIENTS = 64
_TIMEOUT_S = 5.0


class _Client:
    """A connection: what it has sent so far, and what is left to be sent to it.

    Attributes:
        late_s: When it has had enough time.
    """

    def __init__(self, connection: socket.socket, late_s: float) -> None:
        self.connection = connection
        self.late_s = late_s
        self._received = b""
        self.answer = b""

    def line(self) -> bytes | None:
        """Return the line that it has sent; None while its end has not come.

        Raises:
            OSError: The other end is gone, or sends more than a line may have.
        """
        received = self.connection.recv(local_socket.LONGEST_LINE)
        self._received += received
        end = self._received.find(b"\n")
        if end >= 0:
            return self._received[:end]
        if not received or len(self._received) > local_socket.LONGEST_LINE:
            raise local_socket.LocalSocketError("a line without its end")
        return None


class LineServer:
    """Answers one line of each client of this user, or of root, and closes the connection.

    A client has a few seconds. Of more clients than it keeps, the oldest one has to leave.

    Args:
        listener: A socket that listens; closed at the end.
        answer: Returns what to answer to a line; called on the server's thread.
    """

    def __init__(self, listener: socket.socket, answer: Callable[[bytes], dict[str, Any]]) -> None:
        self._listener = listener
        self._answer = answer
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        self._processor = ProcessorShare(_SHARE)
        self._is_closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="perseus-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening; harmless when called again."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _serve(self) -> None:
        with self._selector, self._listener:
            while not self._is_closed:
                ready = self._selector.select(_TIMEOUT_S if self._clients else None)
                began_s = time.thread_time()
                for key, _ in ready[:_AT_ONCE]:
                    # Whatever one client sends, the others are served.
                    with contextlib.suppress(Exception):
                        self._accept() if key.fileobj is self._listener else self._advance(key.fd)
                self._drop_late()
                self._processor.add(time.thread_time() - began_s)
                if not self._is_closed:
                    time.sleep(self._processor.pause_s())
            for client in self._clients.values():
                client.connection.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none left, closed, or no descriptors
                return
            if local_socket.peer(connection)[1] not in (os.getuid(), 0):
                connection.close()
                continue
            connection.setblocking(False)
            if len(self._clients) >= _MOST_CLIENTS:
                self._drop(next(iter(self._clients)))
            self._clients[connection.fileno()] = _Client(connection, time.monotonic() + _TIMEOUT_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _advance(self, descriptor: int) -> None:
        client = self._clients[descriptor]
        try:
            if not client.answer:
                line = client.line()
                if line is None:
                    return
                client.answer = json.dumps(self._answer(line)).encode() + b"\n"
                self._selector.modify(client.connection, selectors.EVENT_WRITE)
            client.answer = client.answer[client.connection.send(client.answer) :]
            if not client.answer:
                self._drop(descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            self._drop(descriptor)
            raise

    def _drop(self, descriptor: int) -> None:
        client = self._clients.pop(descriptor)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        while self._clients and next(iter(self._clients.values())).late_s <= now_s:
            self._drop(next(iter(self._clients)))
