"""The encrypted connections of a job's server to the agents of its nodes.

A separate thread receives and sends messages, and sends heartbeats, so that agents receive these also while the server
decides for a long time. A server that has not waited for messages for half a minute hangs, and sends no heartbeats
until it does: agents return to default clocks, and another server replaces it. Only agents with the job's key are
accepted, and those who send commands with the control key.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections import deque
from contextlib import ExitStack

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from perseus_ds.errors import ConfigError
from perseus_ds.server.control_socket import CONTROL
from perseus_ds.timebase import REAL_TIME

_HEARTBEAT_S = 0.3
_HANGS_S = 30.0
"""Time without a call of :meth:`AgentConnections.wait` after which the server counts as hanging [s]."""
_FULL_S = 0.01
"""Interval at which the thread looks for space if too many messages wait to be processed [s]."""
_MOST_WAITING = 100_000
_MOST_IN_TURN = 256
"""Number of messages received, and sent, between two looks at the time of the next heartbeat."""
# Maximum number of messages to and from each agent in memory.
_MOST_TO_AGENT, _MOST_FROM_AGENT = 100_000, 1000
_LINGER_MS = 1000


class AgentConnections:
    """Receives the messages of agents, and sends messages and heartbeats to them.

    Attributes:
        control_keys: Public and secret key of those who send the job commands from other nodes.
        agents: The agents that have sent a message.
        received: The agent and the frames of each received message, the oldest first.
    """

    def __init__(self, host: str, port: int, *, key: bytes, secret_key: bytes, agents_key: bytes, epoch: int) -> None:
        """Listen.

        Args:
            host: Name or address by which agents reach this node.
            port: Port, or 0 for any.
            key: Public key of the server.
            secret_key: Its secret key.
            agents_key: Public key of the job's agents.
            epoch: Number of the server in the job, the content of heartbeats.

        Raises:
            ConfigError: The port is not available.
        """
        self.control_keys = zmq.curve_keypair()
        self.agents: set[bytes] = set()
        self.received: deque[tuple[bytes, list[bytes]]] = deque()
        self._host, self._heartbeat = host, b"%d" % epoch
        self._outgoing: deque[tuple[bytes, ...]] = deque()
        self._has_received, self._closes = threading.Event(), threading.Event()
        self._waited_s = REAL_TIME.now_s()
        self._parts = ExitStack()
        with ExitStack() as opened:
            self._socket = self._listen(opened, port, key, secret_key, agents_key)
            self._is_woken = False
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, self._wake_read)
            opened.callback(os.close, self._wake_write)
            thread = threading.Thread(target=self._run, name="perseus-connections", daemon=True)
            thread.start()
            opened.callback(thread.join)
            opened.callback(self._end)
            self._parts = opened.pop_all()

    def _listen(
        self, opened: ExitStack, port: int, key: bytes, secret_key: bytes, agents_key: bytes
    ) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        opened.callback(context.destroy, _LINGER_MS)  # waits until rank 0 has the last messages
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        opened.callback(authenticator.stop)
        authenticator.configure_curve_callback("*", _Keys(agents_key, self.control_keys[0]))
        listener: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        opened.callback(listener.close, _LINGER_MS)
        listener.setsockopt(zmq.SNDHWM, _MOST_TO_AGENT)
        listener.setsockopt(zmq.RCVHWM, _MOST_FROM_AGENT)
        listener.setsockopt(zmq.IPV6, 1)
        listener.curve_server = True
        listener.curve_publickey = key
        listener.curve_secretkey = secret_key
        own = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "[::1]"}.get(self._host, "*")
        try:
            listener.bind(f"tcp://{own}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"perseus.server: port {port} of {socket.gethostname()} cannot be used ({error}). Choose "
                "another one, or leave it out for any free port."
            ) from None
        self._port = listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0")
        return listener

    @property
    def address(self) -> str:
        """Address at which agents reach the server."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"tcp://{host}:{self._port}"

    def wait(self, timeout_s: float) -> None:
        """Wait until a message has been received since the last call, or until the timeout."""
        self._waited_s = REAL_TIME.now_s()
        self._has_received.wait(timeout_s)
        self._has_received.clear()

    def put(self, agent: bytes, *frames: bytes) -> None:
        """Send a message to an agent, without waiting. May be called from any thread."""
        self._outgoing.append((agent, *frames))
        if not self._is_woken:
            self._wake()

    def close(self) -> None:
        """Send what was put, and disconnect."""
        self._parts.close()

    def _end(self) -> None:
        self._closes.set()
        self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        beat_at_s = 0.0
        while not self._closes.is_set():
            is_full = len(self.received) >= _MOST_WAITING
            poller.register(self._socket, 0 if is_full else zmq.POLLIN)
            left_s = min(beat_at_s - REAL_TIME.now_s(), _FULL_S if is_full else _HEARTBEAT_S)
            if self._outgoing:
                left_s = 0.0
            poller.poll(math.ceil(1000 * max(0.0, left_s)))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._is_woken = False  # after the pipe is empty: a message that is put from now on wakes this thread again
            if self._receive():
                beat_at_s = 0.0  # a new agent is answered immediately
            now_s = REAL_TIME.now_s()
            if now_s >= beat_at_s:
                beat_at_s = now_s + _HEARTBEAT_S
                if now_s < self._waited_s + _HANGS_S:
                    self._outgoing.extendleft((agent, self._heartbeat) for agent in self.agents)
            self._send()
        while self._outgoing:
            self._send()

    def _receive(self) -> bool:
        """Receive messages that have arrived, and return whether an agent is new."""
        known = len(self.agents)
        for _ in range(min(_MOST_IN_TURN, _MOST_WAITING - len(self.received))):
            try:
                agent, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames[:1] != [CONTROL]:
                self.agents.add(agent)
            self.received.append((agent, frames))
            self._has_received.set()
        return len(self.agents) > known

    def _send(self) -> None:
        for _ in range(min(_MOST_IN_TURN, len(self._outgoing))):
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(self._outgoing.popleft(), zmq.NOBLOCK)


class _Keys:
    """Accepts only the public keys of this job's agents, and of those who send it commands."""

    def __init__(self, *public_keys: bytes) -> None:
        self._keys = public_keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys
