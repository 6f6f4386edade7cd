"""The process of a job's server, which is started by rank 0's agent and ends with the job.

It reads a :class:`ServerRequest` from its standard input, and answers on its standard output once it listens. All
connections are encrypted, and only agents with the job's key are accepted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from perseus_ds import errors
from perseus_ds.artifacts.io import write_atomically
from perseus_ds.artifacts.run_records import Failed
from perseus_ds.config import PerseusConfig
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.policy.policies import Status
from perseus_ds.protocol import description as described
from perseus_ds.protocol.job_messages import RankReport, Say, Spans, ToRank, ToServer
from perseus_ds.protocol.messages import ServerStarted
from perseus_ds.server.control_socket import CONTROL, ControlServer, RemoteAccess
from perseus_ds.server.metrics import MetricsReporter
from perseus_ds.server.output_folder import FolderLock, own_folder
from perseus_ds.server.server import JobServer
from perseus_ds.timebase import REAL_TIME

STATE_FILE = "state.json"
_HEARTBEAT_S, _STATE_S, _POLL_S = 0.5, 1.0, 0.1
_FIRST_AGENT_S, _NO_AGENT_S, _ENDED_S = 300.0, 30.0, 2.0
"""Times without messages from agents after which the server ends: before the first message, during training, and after
the end of the job, such as without the ranks of a lost node, because the next start of the job needs the folder."""
_BEHIND_S = 5.0
"""Age of received messages above which the server discards reports and the job continues at default clocks."""
# Maximum number of messages to and from each agent in memory.
_MOST_TO_AGENT, _MOST_FROM_AGENT = 100_000, 1000
_LINGER_MS = 1000
_MOST_ANSWERS = 100
_RANK = struct.Struct("=I")
_to_server = msgspec.msgpack.Decoder(ToServer)
_encode = msgspec.msgpack.Encoder().encode


class ServerRequest(msgspec.Struct, frozen=True):
    """Request to start the server of a job.

    Attributes:
        description: Description of the job.
        host: Name or address by which agents reach rank 0's node.
        port: Port to listen at; 0 for any.
        epoch: Number of the server in the job, starting at 0.
        server_key: Public key of the server.
        server_secret: Secret key of the server.
        public_key: Public key of the agents.
        output_dir: Output folder of the server that it replaces; empty for the first server of a job.
    """

    description: bytes
    host: str
    port: int
    epoch: int
    server_key: bytes
    server_secret: bytes
    public_key: bytes
    output_dir: str = ""


class ServerProcess:
    """Transfers messages between agents and the :class:`~perseus_ds.server.server.JobServer`."""

    def __init__(self, request: ServerRequest) -> None:
        """Listen, and check what can be checked before training.

        Raises:
            PerseusError: The job cannot be trained as configured, or the port is not available.
        """
        self._request = request
        self._parts = ExitStack()
        self._lock = threading.RLock()
        self._agents: set[bytes] = set()
        self._agent_of: dict[int, bytes] = {}
        self._outbox: list[tuple[int, ToRank]] = []
        # Orders from other nodes, which may wait for the disk, and their answers by client.
        self._control: ControlServer | None = None
        self._orders = ThreadPoolExecutor(1, "perseus-orders")
        self._parts.callback(self._orders.shutdown, wait=False, cancel_futures=True)
        self._answers: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_ANSWERS)
        self._socket = self._listen()
        job = described.decode_description(request.description)
        os.chdir(job.folder)
        config = PerseusConfig.model_validate_json(job.config)
        folder = FolderLock()
        self._parts.callback(folder.release)
        output_dir, warning = own_folder(config, folder, request.output_dir)
        config = config.model_copy(update={"output_dir": output_dir})
        job = msgspec.structs.replace(job, config=config.model_dump_json().encode())
        self._state_path = Path(output_dir) / STATE_FILE
        state, problem = _read_state(self._state_path)
        self.server = JobServer(job, self._send, state=state, epoch=request.epoch)
        for text in filter(None, (warning, problem)):
            self.server.recorder.warn(text)
        self._state = b""
        self._files = ThreadPoolExecutor(1, "perseus-state")
        self._parts.callback(self._files.shutdown, wait=False)
        self._saved: Future[None] = Future()
        self._saved.set_result(None)
        self._state_at_s = self._beat_at_s = 0.0
        # Time of the last message, and the last time at which all messages were processed.
        self._received_s = self._up_to_date_s = REAL_TIME.now_s()
        self._has_received = self._is_behind = False

    @property
    def address(self) -> str:
        """Address at which agents reach it."""
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0")
        host = f"[{self._request.host}]" if ":" in self._request.host else self._request.host
        return f"tcp://{host}:{port}"

    def _listen(self) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._parts.callback(context.destroy, _LINGER_MS)  # waits until rank 0 has the last messages
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        self._parts.callback(authenticator.stop)
        self._control_keys = zmq.curve_keypair()
        authenticator.configure_curve_callback("*", _Keys(self._request.public_key, self._control_keys[0]))
        listener: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._parts.callback(listener.close, _LINGER_MS)
        listener.setsockopt(zmq.SNDHWM, _MOST_TO_AGENT)
        listener.setsockopt(zmq.RCVHWM, _MOST_FROM_AGENT)
        listener.setsockopt(zmq.IPV6, 1)
        listener.curve_server = True
        listener.curve_publickey = self._request.server_key
        listener.curve_secretkey = self._request.server_secret
        is_local = self._request.host in ("localhost", "127.0.0.1", "::1")
        port = self._request.port or "*"
        try:
            listener.bind(f"tcp://127.0.0.1:{port}" if is_local else f"tcp://*:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"perseus.server: port {port} of {socket.gethostname()} cannot be used ({error}). Choose "
                "another one, or leave it out for any free port."
            ) from None
        return listener

    def _save(self) -> Future[None]:
        """Begin to save the state for a later start of the job, on a thread, because the folder may be slow."""
        content = json.dumps({"epoch": self._request.epoch, **self.server.state()}).encode()
        return self._files.submit(self._write, content)

    def _write(self, content: bytes) -> None:
        if content != self._state:
            with contextlib.suppress(OSError):  # a full disk: it is tried again
                write_atomically(self._state_path, content.decode() + "\n")
                self._state = content

    def serve(self) -> None:
        """Serve until the job ends, or no agent is left."""
        self.server.start()
        self._supervise()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self.server.is_over and self._is_needed():
            with self._lock:
                files = self.server.files
            for file in files:
                poller.register(file, zmq.POLLIN)
            poller.poll(int(1000 * _POLL_S))
            for file in files:
                poller.unregister(file)
            with self._lock:
                self._receive()
                with self._surviving_errors():
                    self.server.tick()
                self._beat()
                self._flush()
        self._save().result()
        self.server.recorder.flush()
        self.close()

    def close(self) -> None:
        """Stop listening and release the output folder."""
        self._parts.close()

    def _supervise(self) -> None:
        """Open the control socket and start to report metrics."""
        server = self.server
        config = server.job.config
        if config.mode in ("auto", "run"):
            try:
                keys = (self._request.server_key, *self._control_keys)
                remote = RemoteAccess(self.address, *(key.decode() for key in keys))
                self._control = ControlServer(server.job.output_dir, self._carry_out, remote)
                self._parts.callback(self._control.close)
            except OSError as error:
                server.recorder.warn(f"`perseus-ds control` will not reach this job: {error}")
                server.recorder.event(Failed(event="control", error=str(error)))
        if config.metrics is not None:

            def failed(problem: str) -> None:
                server.recorder.warn(f"metrics: {problem}. Training continues without them")
                server.recorder.event(Failed(event="metrics", error=problem))

            self._parts.callback(MetricsReporter(config.metrics, server.recorder.facts, failed).close)

    def _carry_out(self, order: Any) -> dict[str, Any]:
        if isinstance(order, Status):  # outside the lock, because the disk may be slow
            self.server.recorder.flush()
        with self._lock:
            return self.server.control.carry_out(order)

    def _is_needed(self) -> bool:
        silent_s = REAL_TIME.now_s() - self._received_s
        if self.server.has_ended:
            return silent_s < _ENDED_S
        return silent_s < (_NO_AGENT_S if self._has_received else _FIRST_AGENT_S)

    def _receive(self) -> None:
        """Process the received messages for a short time, so that heartbeats are sent in between."""
        end_s = REAL_TIME.now_s() + _POLL_S
        while (now_s := REAL_TIME.now_s()) < end_s:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._up_to_date_s, self._is_behind = now_s, False
                return
            agent, *rest = frames
            if len(rest) == 2 and rest[0] == CONTROL:
                self._orders.submit(self._answer_order, agent, rest[1])
                continue
            self._received_s, self._has_received = now_s, True
            if agent not in self._agents:
                self._agents.add(agent)
                self._beat_at_s = 0.0  # it is answered immediately
            if len(rest) == 2 and len(rest[0]) == _RANK.size:
                rank = _RANK.unpack(rest[0])[0]
                try:
                    message = _to_server.decode(rest[1])
                except msgspec.DecodeError as error:
                    logging.getLogger("perseus_ds").warning("perseus: a message of rank %d is none: %s", rank, error)
                    continue
                if self._is_behind and isinstance(message, RankReport | Spans):
                    continue
                before, self._agent_of[rank] = self._agent_of.get(rank, agent), agent
                with self._surviving_errors():
                    self.server.receive(rank, message)
                    if agent != before:  # messages to the rank may be lost
                        self.server.resend(rank)
        if now_s > self._up_to_date_s + _BEHIND_S and not self._is_behind:
            self._is_behind = True
            with self._surviving_errors():
                self.server.fall_behind()

    @contextlib.contextmanager
    def _surviving_errors(self) -> Iterator[None]:
        """Return a context manager in which an error ends only the job's mode, which begins again later."""
        try:
            yield
        except Exception as error:
            self.server.has_failed(error)

    def _beat(self) -> None:
        now_s = REAL_TIME.now_s()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + _HEARTBEAT_S
            for agent in self._agents:
                self._put(agent, b"%d" % self._request.epoch)
        if now_s >= self._state_at_s and self._saved.done():
            self._state_at_s = now_s + _STATE_S
            self._saved = self._save()

    def _send(self, rank: int, message: ToRank) -> None:
        self._outbox.append((rank, message))  # called from any thread

    def _answer_order(self, client: bytes, line: bytes) -> None:
        if self._control is not None:
            self._answers.append((client, json.dumps(self._control.answer(line)).encode()))

    def _flush(self) -> None:
        while self._answers:
            client, answer = self._answers.popleft()
            self._put(client, CONTROL, answer)
        outbox, self._outbox = self._outbox, []
        for rank, message in outbox:
            if rank in self._agent_of:
                self._put(self._agent_of[rank], _RANK.pack(rank), _encode(message))
            elif isinstance(message, Say):
                self._outbox.append((rank, message))  # kept until the rank is known

    def _put(self, agent: bytes, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([agent, *frames], zmq.NOBLOCK)


class _Keys:
    """Accepts only the public keys of this job's agents, and of those who give it orders."""

    def __init__(self, *public_keys: bytes) -> None:
        self._keys = public_keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


class _ToRank0(logging.Handler):
    """Sends the warnings of this process to rank 0, which logs them."""

    def __init__(self, send: Callable[[int, ToRank], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(0, Say(record.getMessage(), warns=True))


def _read_state(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state saved by an earlier start of the job, if any, and a warning if it is damaged."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read ({error}); the job begins anew"
    return found if isinstance(found, dict) else None, ""


def main() -> None:
    """Run the server of a job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # each agent has a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    answer = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ServerRequest)
    try:
        process = ServerProcess(request)
        welcome = described.encode(process.server.welcome())
        started = ServerStarted(process.address, answer=welcome, output_dir=process.server.job.config.output_dir)
    except PerseusError as error:
        kind = type(error).__name__ if hasattr(errors, type(error).__name__) else "ConfigError"
        started = ServerStarted(kind=kind, error=str(error))
    except Exception as error:
        started = ServerStarted(kind="PerseusError", error=f"the server cannot start: {error!r}")
    answer.write(_encode(started))
    answer.close()
    if started.kind:
        os._exit(1)  # threads of a server that has failed must not keep the process alive
    logging.getLogger("perseus_ds").addHandler(_ToRank0(process._send))
    process.serve()
    os._exit(0 if process.server.has_ended else 1)  # a server without agents may be needed again
